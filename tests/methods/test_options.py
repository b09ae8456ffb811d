"""Every option of every method, at a value that is not its default, changes uploads, states or
answers.
"""

import types
import typing
from collections.abc import Iterator, Sequence
from contextlib import suppress
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
from fczoo.testing.method_under_test import Call, MethodUnderTest, Record, record_run
from fczoo.testing.world import small_method, toy_bench

TWO_ROUNDS = {"rounds": 2}
TWO_STEPS = {"rounds": 2, "epochs": 2}
NEEDS: dict[tuple[str, str], tuple[dict[str, Any], dict[str, Any]]] = {
    # (method, option) -> other options, settings: without these it changes nothing in the toy world
    ("pilora", "schedule"): ({}, TWO_ROUNDS),  # the first round has the full rate
    ("fedproto", "strength"): ({}, TWO_ROUNDS),  # prototypes come with the first uploads of a task
    ("fedproto", "per_sample"): ({}, TWO_ROUNDS),
    ("fppl", "unify"): ({}, TWO_ROUNDS),
    ("pip", "reach"): ({}, TWO_ROUNDS),
    ("uopp", "reach"): ({}, TWO_ROUNDS),
    ("uopp", "squared_variance"): ({}, TWO_ROUNDS),
    ("uopp", "reset_prompt"): ({}, TWO_ROUNDS),
    ("fppl", "temperature"): ({}, TWO_ROUNDS),
    ("powder", "distil"): ({}, TWO_STEPS),  # the first step starts from the model that teaches
    ("powder", "temperature"): ({}, TWO_STEPS),
    ("powder", "tasks_10_14"): (
        {},
        {"clients": 5, "partition": "iid"},
    ),  # else fewer than ten tasks
    ("fppl", "view"): ({}, {"augment": "flip"}),  # without it training and test view are one
    ("regmean", "view"): ({}, {"augment": "flip"}),
    ("lorm", "view"): ({}, {"augment": "flip"}),
    ("lorm", "passes"): ({"view": "train"}, {"augment": "flip"}),
    ("lorm", "lr_a"): ({}, TWO_ROUNDS),  # the first round trains B
    ("ccvr", "gaussian"): ({"calibrate": "each_round"}, {}),  # else they are pooled
    ("hgp", "class_weights"): ({"keep_single": False}, {}),  # else all classes have as many images
    ("ewc", "strength"): (
        {},
        TWO_ROUNDS,
    ),  # new rows of the head start at 0: one step moves nothing of old
    ("ewc", "amp_vanish"): ({}, TWO_ROUNDS),
    ("ewc", "asked"): ({}, {"participation": 0.34}),  # else everybody trains
    ("pilora", "unheld"): (
        {},
        {"rounds": 6, "participation": 0.34},
    ),  # else someone holds each class
    ("glfc", "best_perf_no_reset"): (
        {"lr": 0.0, "lr_backbone": 0.0},
        {},
    ),  # no better in a later task
    ("fedridge", "width"): ({"lift": "random"}, {}),
    ("fedridge", "gram_rank"): ({"bias": "none"}, {}),  # a free bias refuses it
    ("fedridge", "score"): ({"bias": "none"}, {}),  # a cosine has no use for a free bias
    (
        "glfc",
        "augmentations",
    ): (  # of LGA: later tasks have the noise, and answers must be close to a change
        {"detector": "oracle", "lr": 1.0, "lr_backbone": 0.01},
        {},
    ),
    ("dytox", "choice"): (
        {"memory": 30, "lr": 0.05},
        {},
    ),  # else features are alike, and few are chosen
    ("target", "student_steps"): ({"warmup": 0}, {}),  # else it learns when all images are made
    ("target", "student_lr"): ({"warmup": 0}, {}),
    ("lander", "bound"): ({"radius": 0.4}, {}),  # among the distances of the images
    ("lander", "prior_blocks"): ({"prior": "survey"}, {}),
    ("lander", "prior_weight"): ({"prior": "survey"}, {}),
    ("mfcl", "prior_blocks"): ({"prior": "survey"}, {}),
    ("mfcl", "prior_weight"): ({"prior": "survey"}, {}),
    ("mfcl", "weight_feature"): ({}, TWO_ROUNDS),  # the first step starts from the old features
    ("glfc", "detector"): ({"threshold": 1e6}, {}),  # else the entropy tells as much as the oracle
}
PROXY = {  # options of GLFC and LGA about their reconstructions
    *("proxy", "reconstructions", "best_perf_no_reset"),
    *("warmup", "augmentations"),
}

RECTIFIER = ("rectify_weight", "lr_rectifier", "head_width", "ode_steps", "repeats")  # of UOPP
ADAPTER = (
    "bottleneck",
    "lr",
    "momentum",
    "weight_decay",
)  # of analytic methods that may train an adapter


def required_options(name: str, option: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return options and settings that an option needs to change something in a short run."""
    noisy, name = name == "lga", "glfc" if name == "lga" else name  # whose options it shares
    options, settings = NEEDS.get((name, option), ({}, {}))
    if "adapt" in METHODS.get(name).__dataclass_fields__ and option in ADAPTER:
        return {**options, "adapt": "adapter"}, settings
    if option == "momentum":
        options = {**options, "optimizer": "sgd"}
    if option == "optimizer":
        options = {**options, "weight_decay": 0.1}  # without it Adam and AdamW are one
    if option in ("rank", "blocks") and "tune" in METHODS.get(name).__dataclass_fields__:
        options = {**options, "tune": "lora"}
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
OTHER = {  # where neither half, double, one more nor one less makes a difference
    ("lander", "anchor_file"): ANCHORS,
    ("lander", "images"): 50,  # fewer than are made
    **{(name, "gram_rank"): 2 for name in ("fedridge", "afcl", "ranpac")},
    ("codap", "components"): 12,  # three tasks share them: 10 and 11 are three for each
    ("fedcprompt", "components"): 12,
    ("bic", "validation"): 0.5,  # of four exemplars per class at least one is held out
    ("fedcprompt", "margin"): 0.0,  # closes the hinge
    ("ssil", "ratio"): 0.25,  # as many exemplars as a fourth of the new images are at hand
    ("glfc", "threshold"): 1e6,  # never reached
    ("fot", "growth"): 0.1,  # enough for another direction
    ("fedprotip", "growth"): 0.1,
    ("lga", "reconstructions"): 1,
    ("lga", "warmup"): 0,
    ("lga", "augmentations"): 50,  # of few images: an accuracy of other noise is often the same
    ("lga", "lowest"): 0.99,  # near 1, where weights are in the first steps
    ("lga", "highest"): 1.01,
    ("lga", "threshold"): 1e6,
    ("glfc", "reconstructions"): 1,  # more than the steps are no more
}


def named_values(hint: Any) -> Iterator[Any]:
    """Each choice that the type of an option lists: literals, true and false, none."""
    union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    for part in typing.get_args(hint) if union else (hint,):
        if typing.get_origin(part) is typing.Literal:
            yield from typing.get_args(part)
        elif part is bool:
            yield from (True, False)
        elif part is types.NoneType:
            yield None


def other_values(name: str) -> Iterator[tuple[str, Any]]:
    """Option and value: all named values but the default, and another number for each number."""
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
            yield field.name, (0, 2)  # some blocks in place of all


class Difference(Exception):
    """End a run that differs from the run it is compared with."""


class LaterTask(Exception):
    """End a run after its first task."""


@lru_cache(4)  # what is compared with what; all of it would take gigabytes
def plain_run(name: str, options: tuple, settings: tuple) -> Record:
    """Record a whole run with some options and settings."""
    record = record_run(bench_with(settings), small_method(name, **dict(options)))
    assert dict(options).items() <= record.result.options.items()
    assert [len(row) for row in record.result.accuracy] == [1, 2, 3]
    return record


@lru_cache(4)
def calls_of_first_task(name: str, options: tuple, settings: tuple) -> tuple[Call, ...]:
    """Record the calls of the first task of a run; most options change one of them."""
    calls: list[Call] = []

    def keep(call: Call) -> None:
        if call.ctx.task.index:
            raise LaterTask
        calls.append(call)

    with suppress(LaterTask):
        record_run(bench_with(settings), small_method(name, **dict(options)), on_call=keep)
    return tuple(calls)


def bench_with(settings: tuple) -> Benchmark:
    return toy_bench(**{"rounds": 1, "epochs": 1, "batch_size": 8, **dict(settings)})


def differs_in_first_task(method: Method, settings: tuple, plain: Sequence[Call]) -> bool:
    """Compare the uploads of the first task with those of another run, and the states before."""
    expected_calls = iter(plain)

    def compare(call: Call) -> None:
        expected = next(expected_calls, None)
        if expected is None:
            raise LaterTask
        if changes(exchanged(call), exchanged(expected)):
            raise Difference

    try:
        record_run(bench_with(settings), method, on_call=compare)
    except LaterTask:
        return False
    except Difference:
        return True
    return False


def differs(method: Method, settings: tuple, plain: Record, tasks: int = 0) -> bool:
    """Compare the uploads, states and logits of a run with those of another.

    The run ends at the first difference, but not before it has learned ``tasks`` tasks.
    """
    expected_calls, differences = iter(plain.calls), set()

    def compare(call: Call) -> None:
        expected = next(expected_calls, None)
        differences.update(changes(exchanged(call), exchanged(expected) if expected else {}))
        if differences and call.ctx.task.index >= tasks:
            raise Difference

    try:
        record = record_run(bench_with(settings), method, on_call=compare)
    except Difference:
        return True
    assert [len(row) for row in record.result.accuracy] == [1, 2, 3]
    differences.update(changes(outcome(record), outcome(plain)))
    return bool(differences) or next(expected_calls, None) is not None


def exchanged(call: Call) -> Tree:
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


SAME = {
    ("choice", "raw")
}  # features in the toy world are of nearly one length; see test_golden_memory.py

CASES = [
    (name, option, value)
    for name in METHODS.names()
    for option, value in other_values(name)
    if (option, value) not in SAME
]


@pytest.mark.parametrize(("name", "option", "value"), CASES)
def test_every_option_changes_something(name: str, option: str, value: Any) -> None:
    """Compare runs; a choice, which may take other code in a later task, learns two tasks."""
    options, settings = required_options(name, option)
    plain = (name, tuple(options.items()), tuple(settings.items()))
    method = small_method(name, **{**options, option: value})
    assert getattr(method, option) == value
    one_task = type(value) in (int, float) or option == "optimizer"  # whose code is one for all
    if (
        one_task
        and options
        and differs_in_first_task(method, plain[2], calls_of_first_task(*plain))
    ):
        return
    method = small_method(name, **{**options, option: value})
    assert differs(method, plain[2], plain_run(*plain), tasks=0 if one_task else 2)


def test_a_run_with_the_same_options_does_not_differ() -> None:
    """So that the test above does not hold for any two runs."""
    for name in ("hgp", "fcilpt"):
        assert not differs(small_method(name), (), plain_run(name, (), ()))
        calls = calls_of_first_task(name, (), ())
        assert calls
        assert not differs_in_first_task(small_method(name), (), calls)


def test_every_option_is_tried() -> None:
    """So that the test above cannot become empty unnoticed; words that are not a choice are left
    out by name.
    """
    tried = {(name, option) for name, option, _ in CASES}
    every = {(name, f.name) for name in METHODS.names() for f in fields(METHODS.get(name))}
    assert every == tried
    values = [case[1:] for case in CASES if case[0] == "hgp"]
    for pair in (("init", "zeros"), ("clip", None), ("server_cosine", False), ("logit_norm", None)):
        assert pair in values


@pytest.mark.parametrize("name", sorted(METHODS.names()))
def test_two_to_four_options_are_searched(name):
    assert 2 <= len(spaces(METHODS.get(name))) <= 4
