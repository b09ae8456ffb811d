"""Every option of every method, at a value that is not its default, changes uploads, states or
answers.
"""

import types
import typing
from collections.abc import Iterator
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fczoo import Benchmark, Method, Tree
from fczoo.core.options import spaces
from fczoo.core.registry import METHODS
from fczoo.testing.method_under_test import SHORT, Call, MethodUnderTest, Record, record_run
from fczoo.testing.toy_benchmark import small_method, toy_bench
from helpers_methods import SHORT_LOOPS, first_tasks

TWO_ROUNDS = {"rounds": 2}
TWO_STEPS = {"rounds": 2, "epochs": 2}
NEEDS: dict[tuple[str, str], tuple[dict[str, Any], dict[str, Any]]] = {
    # (method, option) -> options and settings without which it changes nothing in a toy run
    ("pilora", "schedule"): ({}, TWO_ROUNDS),  # the first round has the full rate
    ("fedproto", "strength"): ({}, TWO_ROUNDS),  # prototypes come with the first uploads of a task
    ("fedproto", "per_sample"): ({}, TWO_ROUNDS),
    ("fppl", "unify"): ({}, TWO_ROUNDS),
    ("pip", "reach"): ({}, TWO_ROUNDS),
    ("uopp", "reach"): ({}, TWO_ROUNDS),
    ("uopp", "squared_variance"): ({}, TWO_ROUNDS),
    ("uopp", "reset_prompt"): ({}, TWO_ROUNDS),
    ("fppl", "temperature"): ({}, TWO_ROUNDS),
    ("powder", "distil"): ({}, TWO_STEPS),  # the first step starts from the teacher
    ("powder", "temperature"): ({}, TWO_STEPS),
    ("powder", "tasks_10_14"): (
        {},
        {"clients": 5, "partition": "iid"},
    ),  # else fewer than ten tasks
    ("fppl", "view"): ({}, {"augment": "flip"}),  # else training and test view are equal
    ("regmean", "view"): ({}, {"augment": "flip"}),
    ("lorm", "view"): ({}, {"augment": "flip"}),
    ("lorm", "passes"): ({"view": "train"}, {"augment": "flip"}),
    ("lorm", "lr_a"): ({}, TWO_ROUNDS),  # the first round trains B
    ("ccvr", "gaussian"): ({"calibrate": "each_round"}, {}),  # else they are pooled
    ("hgp", "class_weights"): ({"keep_single": False}, {}),  # else classes have equal counts
    ("ewc", "strength"): (
        {},
        TWO_ROUNDS,
    ),  # new head rows start at 0: one step moves no old ones
    ("ewc", "amp_vanish"): ({}, TWO_ROUNDS),
    ("ewc", "asked"): ({}, {"participation": 0.34}),  # else all clients train
    ("pilora", "unheld"): (
        {},
        {"rounds": 6, "participation": 0.34},
    ),  # else a client holds each class
    ("glfc", "best_perf_no_reset"): (
        {"lr": 0.0, "lr_backbone": 0.0},
        {},
    ),  # later models are not better
    ("fedridge", "width"): ({"lift": "random"}, {}),
    ("fedridge", "gram_rank"): ({"bias": "none"}, {}),  # a free bias does not allow it
    ("fedridge", "score"): ({"bias": "none"}, {}),  # the cosine score does not allow a bias
    (
        "glfc",
        "augmentations",
    ): (  # LGA: later tasks add noise, and predictions must be close to a change
        {"detector": "oracle", "lr": 1.0, "lr_backbone": 0.01},
        {},
    ),
    ("dytox", "choice"): (
        {"memory": 30, "lr": 0.05},
        {},
    ),  # else features are similar, and few are selected
    ("target", "student_steps"): ({"warmup": 0}, {}),  # else it trains after synthesis
    ("target", "student_lr"): ({"warmup": 0}, {}),
    ("lander", "bound"): ({"radius": 0.4}, {}),  # a radius within the range of distances
    ("lander", "disagree"): ({"synthesis_rounds": 4}, {}),
    ("lander", "student_lr"): ({"synthesis_rounds": 4}, {}),
    ("lander", "student_clip"): ({"synthesis_rounds": 4}, {}),
    ("lander", "prior_blocks"): ({"prior": "survey"}, {}),
    ("lander", "prior_weight"): ({"prior": "survey"}, {}),
    ("mfcl", "prior_blocks"): ({"prior": "survey"}, {}),
    ("mfcl", "prior_weight"): ({"prior": "survey"}, {}),
    ("mfcl", "weight_feature"): ({}, TWO_ROUNDS),  # the first step starts from the old features
    ("glfc", "detector"): ({"threshold": 1e6}, {}),  # else entropy and oracle give the same signals
}
PROXY = {  # options of GLFC and LGA about their reconstructions
    *("proxy", "reconstructions", "best_perf_no_reset"),
    *("warmup", "augmentations"),
}

NEED_ALL_WEIGHTS = ("margin", "gamma", "augmentations")  # LoRA pairs hardly move the features
SHARED = ("optimizer", "head_init")
RECTIFIER = ("rectify_weight", "lr_rectifier", "head_width", "ode_steps", "repeats")  # of UOPP
ADAPTER = (
    "bottleneck",
    "lr",
    "momentum",
    "weight_decay",
)  # of analytic methods that may train an adapter


def required_options(name: str, option: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return options and settings that an option needs to change something in a short run."""
    noisy, name = name == "lga", "glfc" if name == "lga" else name  # LGA shares GLFC's options
    options, settings = NEEDS.get((name, option), ({}, {}))
    if "adapt" in METHODS.get(name).__dataclass_fields__ and option in ADAPTER:
        return {**options, "adapt": "adapter"}, settings
    if name in ("fisheravg", "lander") and option not in SHORT_LOOPS[name]:
        options = {**SHORT_LOOPS[name], **options}
    if option == "momentum":
        options = {**options, "optimizer": "sgd"}
    if option == "optimizer":
        options = {**options, "weight_decay": 0.1}  # without it Adam equals AdamW
    has_tune = "tune" in METHODS.get(name).__dataclass_fields__
    if has_tune and option not in ("tune", "lr_backbone") and option not in NEED_ALL_WEIGHTS:
        options = {"tune": "lora", **options}  # faster than all weights
    if name == "affcl" and option in ("lr_backbone", "k_feature"):
        options = {**options, "tune": "lora"}  # frozen features do not move
    if name == "uopp" and option in RECTIFIER:
        options = {"ode_steps": 1, "rectify": "ode"}
    if name == "l2p" and option in ("lr_lora", "rank", "blocks"):
        options = {**options, "lora": True}
    if name == "glfc":
        rebuilds = option in PROXY or option.startswith(("inversion_", "perturb_"))
        quick = {"inversion_steps": 2, "inversion_inner": 2} if rebuilds else {"proxy": "last"}
        options = {**options, **quick}
    if noisy and option in PROXY - {"warmup"}:
        options = {**options, "warmup": 0}
    return options, settings


ANCHORS = str(Path(__file__).with_name("anchors.safetensors"))  # seven classes, three entries
OTHER = {  # values for options that a small change of the number does not affect
    ("lander", "anchor_file"): ANCHORS,
    ("lander", "images"): 20,  # fewer than are made
    **{(name, "gram_rank"): 2 for name in ("fedridge", "afcl", "ranpac")},
    ("codap", "components"): 12,  # 10 and 11 give each of three tasks three components
    ("fedcprompt", "components"): 12,
    ("bic", "validation"): 0.5,  # of four exemplars per class at least one is held out
    ("fedcprompt", "margin"): 0.0,  # closes the hinge
    ("ssil", "ratio"): 0.25,  # there are as many exemplars as a fourth of the new images
    ("glfc", "threshold"): 1e6,  # never reached
    ("fot", "growth"): 0.1,  # enough for another direction
    ("fedprotip", "growth"): 0.1,
    ("lga", "reconstructions"): 1,
    ("lga", "warmup"): 0,
    ("lga", "augmentations"): 50,  # there are few images: accuracy often does not change with noise
    ("lga", "lowest"): 0.99,  # near 1, as weights are in the first steps
    ("lga", "highest"): 1.01,
    ("lga", "threshold"): 1e6,
    ("glfc", "reconstructions"): 1,  # more than the steps have no effect
}


def named_values(hint: Any) -> Iterator[Any]:
    """Yield each choice that the type of an option lists: literals, true and false, none."""
    union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    for part in typing.get_args(hint) if union else (hint,):
        if typing.get_origin(part) is typing.Literal:
            yield from typing.get_args(part)
        elif part is bool:
            yield from (True, False)
        elif part is types.NoneType:
            yield None


def other_values(name: str) -> Iterator[tuple[str, Any]]:
    """Yield option and value: all choices but the default, and another number for each number."""
    cls, small = METHODS.get(name), small_method(name)
    hints = typing.get_type_hints(cls)
    for field in fields(cls):
        value = getattr(small, field.name)
        for named in named_values(hints[field.name]):
            if named is not field.default and named != field.default:
                yield field.name, named
        if (name, field.name) in OTHER:
            yield field.name, OTHER[name, field.name]
        elif isinstance(value, tuple):
            yield field.name, value[:-1] if len(value) > 1 else (value[0] + 1,)
        elif type(value) is int:
            high = field.metadata["high"]
            yield field.name, value - 1 if high is not None and value >= high else value + 1
        elif type(value) is float:
            yield field.name, value / 2 or 0.1
        elif value is None and float in typing.get_args(hints[field.name]):
            yield field.name, 0.05
        elif value is None and tuple[int, ...] in typing.get_args(hints[field.name]):
            yield field.name, (0, 2)  # some blocks instead of all


class Difference(Exception):
    """End a run that differs from the run it is compared with."""


@lru_cache(4)  # recent reference runs; all would take gigabytes
def plain_run(name: str, options: tuple, settings: tuple, tasks: int) -> Record:
    """Record a run of the first tasks with some options and settings."""
    record = record_run(bench_with(settings, tasks), small_method(name, **dict(options)))
    assert dict(options).items() <= record.result.options.items()
    assert [len(row) for row in record.result.accuracy] == [*range(1, tasks + 1)]
    return record


def bench_with(settings: tuple, tasks: int) -> Benchmark:
    return first_tasks(toy_bench(**{"rounds": 1, **SHORT, **dict(settings)}), tasks)


def differs(method: Method, settings: tuple, plain: Record, whole: bool = False) -> bool:
    """Compare the uploads, states and logits of a run with those of another.

    Unless it is to be ``whole``, the run ends at the first difference.
    """
    expected_calls, differences = iter(plain.calls), set()

    def compare(call: Call) -> None:
        expected = next(expected_calls, None)
        differences.update(
            changes(exchanged_tensors(call), exchanged_tensors(expected) if expected else {})
        )
        if differences and not whole:
            raise Difference

    tasks = len(plain.result.accuracy)
    try:
        record = record_run(bench_with(settings, tasks), method, on_call=compare)
    except Difference:
        return True
    assert [len(row) for row in record.result.accuracy] == [*range(1, tasks + 1)]
    differences.update(changes(outcome(record), outcome(plain)))
    return bool(differences) or next(expected_calls, None) is not None


def exchanged_tensors(call: Call) -> Tree:
    """Return the broadcast state and the uploads of a round or survey."""
    uploads = {
        f"upload of {payload.client}: {key}": value
        for payload in call.payloads
        for key, value in payload.items()
    }
    return {**{f"state: {key}": value for key, value in call.state.items()}, **uploads}


def outcome(record: Record) -> Tree:
    """Return the state after each task and its logits."""
    tensors: dict[str, Tensor] = {}
    for task, state in record.states.items():
        tensors |= {f"state {task}: {key}": value for key, value in state.items()}
        tensors[f"logits {task}"] = MethodUnderTest(record.method).logits(record, task)
    return tensors


def changes(ours: Tree, theirs: Tree) -> set[str]:
    return {
        name
        for name in ours.keys() | theirs.keys()
        if name not in ours or name not in theirs or not same(ours[name], theirs[name])
    }


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a, b)


SAME = {("choice", "raw")}  # toy features have nearly equal norms; see test_golden_memory.py

CASES = [
    (name, option, value)
    for name in METHODS.names()
    for option, value in other_values(name)
    if (option, value) not in SAME
]


@pytest.mark.parametrize(("name", "option", "value"), CASES)
def test_every_option_changes_run(name: str, option: str, value: Any) -> None:
    """Compare runs of two tasks, or of three if these are equal.

    A choice of the method may run other code in the second task, so its first run does not end
    early. Those of ``SHARED`` run the same code for all methods: test_client_engine.py and
    test_heads.py compare it with values by hand.
    """
    options, settings = required_options(name, option)
    key = tuple(settings.items())
    method = small_method(name, **{**options, option: value})
    assert getattr(method, option) == value
    whole = type(value) not in (int, float) and option not in SHARED
    assert any(
        differs(method, key, plain_run(name, tuple(options.items()), key, tasks), whole)
        for tasks in (2, 3)
    )


def test_run_with_same_options_does_not_differ() -> None:
    """Check that the comparison above reports no difference between equal runs."""
    for name in ("hgp", "fcilpt"):
        assert not differs(small_method(name), (), plain_run(name, (), (), 3))


def test_every_option_is_covered() -> None:
    """Check that the cases above include every option."""
    tried = {(name, option) for name, option, _ in CASES}
    every = {(name, f.name) for name in METHODS.names() for f in fields(METHODS.get(name))}
    assert every == tried
    values = [case[1:] for case in CASES if case[0] == "hgp"]
    for pair in (("init", "zeros"), ("clip", None), ("server_cosine", False), ("logit_norm", None)):
        assert pair in values


@pytest.mark.parametrize("name", sorted(METHODS.names()))
def test_search_space_has_two_to_four_options(name):
    assert 2 <= len(spaces(METHODS.get(name))) <= 4
