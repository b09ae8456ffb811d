"""Checks of aggregators, attacks and rules of local training."""

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fczoo.aggregators.merge import is_stateless
from fczoo.core.errors import FczooError
from fczoo.core.payload import Payload
from fczoo.core.registry import AGGREGATORS, ATTACKS, LOCAL_TRAINING, make_aggregator
from fczoo.core.seeds import torch_stream
from fczoo.core.tree import Tree
from fczoo.core.types import ServerAggregator
from fczoo.federation.callbacks import Callback
from fczoo.federation.local_rules import CONTROL, LocalRule
from fczoo.security.attacks import Attack
from fczoo.testing.method_under_test import Record, copy_tree, need_same, record_run
from fczoo.testing.toy_benchmark import (
    Draw,
    check_random_cases,
    need,
    need_documented,
    need_one_line,
    small_method,
    toy_bench,
)

Extra = Callable[[torch.Generator], Tree]
"""Function that draws the tensors of one client's upload in addition to parameters."""

PARAMETERS = ("head", "prompt", "half")
SUM_TOLERANCE = 1e-9  # float64: only the order of sums differs


def random_uploads(count: int, seed: int, extra: Extra = lambda rng: {}) -> list[Payload]:
    """Draw uploads of clients 0, 1, ... with 1 to 199 images each.

    Args:
        count: Number of uploads.
        seed: Seed of the draw.
        extra: Draws the tensors of an upload in addition to parameters.

    Returns:
        Uploads with ``head`` [4, 3] and ``prompt`` [5] in float64, ``half`` [2] in bfloat16, and
        the tensors of ``extra``.
    """
    rng = torch.Generator().manual_seed(seed)
    samples = torch.randint(1, 200, (count,), generator=rng).tolist()

    def upload(client: int) -> Payload:
        head = torch.randn(4, 3, generator=rng, dtype=torch.float64)
        prompt = torch.randn(5, generator=rng, dtype=torch.float64)
        half = torch.randn(2, generator=rng).bfloat16()
        tensors = {"head": head, "prompt": prompt, "half": half, **extra(rng)}
        return Payload(tensors, client, samples[client])

    return [upload(client) for client in range(count)]


def check_aggregator(
    aggregator: str | ServerAggregator, extra: Extra = lambda rng: {}, fewest: int = 1
) -> None:
    """Check that an aggregator follows all rules; a broken one raises AssertionError.

    The rules, on random uploads:

    - No upload is changed, and the merged tree shares no memory with one.
    - The same uploads give the same tree, in any order of the clients.
    - Parameters keep their name, shape and type. Every coordinate is between the clients' values,
      and unchanged if all clients agree.
    - Fewer uploads than ``fewest`` raise an error of one line.
    - A registered aggregator and each of its options have a description.

    Args:
        aggregator: Registered name with its options, such as ``trimmed_mean:2``, or a function.
        extra: Draws the tensors that it reads in addition to parameters.
        fewest: Smallest number of uploads that it accepts.

    Raises:
        AssertionError: A rule is broken.
    """
    if isinstance(aggregator, str):
        label, merge = aggregator, make_aggregator(aggregator)
        need_documented(AGGREGATORS.get(aggregator.partition(":")[0]), label)
    else:
        label, merge = getattr(aggregator, "name", repr(aggregator)), aggregator

    def case(draw: Draw) -> None:
        uploads = random_uploads(draw(fewest, fewest + 5), draw(0, 2**31), extra)
        merged_tree = _merge_checked(label, merge, uploads)
        _check_parameters(label, merged_tree, uploads)
        _check_order(label, merge, merged_tree, uploads, draw(0, 2**31))
        _check_agreement(label, merge, uploads)

    check_random_cases(case)
    if fewest > 1:
        _check_refusal(label, merge, random_uploads(fewest - 1, 0, extra))


def _merge_checked(label: str, merge: ServerAggregator, uploads: Sequence[Payload]) -> Tree:
    """Merge uploads; check that they are unchanged and that a second merge gives the same."""
    copies = [{name: value.clone() for name, value in upload.items()} for upload in uploads]
    inputs = list(uploads)
    merged_tree = merge(inputs)
    need(len(inputs) == len(copies), f"{label} changes the list of uploads; work on a copy")
    for upload, old in zip(inputs, copies, strict=True):
        same = upload.keys() == old.keys() and all(
            torch.equal(upload[name], old[name]) for name in old
        )
        need(same, f"{label} changes an upload in place; make new tensors")
        for name in merged_tree.keys() & old.keys():
            same_memory = (
                merged_tree[name].numel()
                and merged_tree[name].data_ptr() == upload[name].data_ptr()
            )
            need(not same_memory, f"{label} returns {name} in the memory of an upload; clone it")
    need(
        is_stateless(merge, inputs),
        f"{label} merges the same uploads to different values; draw nothing and keep no state",
    )
    return merged_tree


def _check_parameters(label: str, merged: Tree, uploads: Sequence[Payload]) -> None:
    for name in PARAMETERS:
        need(
            name in merged,
            f"{label} does not return the parameter {name}; merge all parameters of the uploads",
        )
        value, rows = merged[name], torch.stack([upload[name] for upload in uploads])
        need(
            value.shape == rows.shape[1:] and value.dtype == rows.dtype,
            f"{label} turns {rows.dtype} {list(rows.shape[1:])} into {value.dtype} "
            f"{list(value.shape)}; keep data type and shape",
        )
        inside = (value >= rows.amin(0) - 1e-12) & (value <= rows.amax(0) + 1e-12)
        need(
            inside.all(),
            f"{label} merges {name} to a value outside the range of the clients' values; weights "
            "must be at least 0 and add up to 1",
        )


def _check_order(
    label: str, merge: ServerAggregator, merged: Tree, uploads: Sequence[Payload], seed: int
) -> None:
    order = torch.randperm(len(uploads), generator=torch.Generator().manual_seed(seed)).tolist()
    permuted_tree = merge([uploads[i] for i in order])
    for name in PARAMETERS:
        need(
            _is_close(merged[name], permuted_tree[name]),
            f"{label} depends on the order of the clients; sort by client",
        )


def _check_agreement(label: str, merge: ServerAggregator, uploads: Sequence[Payload]) -> None:
    one = uploads[0]
    merged_tree = merge(
        [Payload(one.tensors, upload.client, upload.num_samples) for upload in uploads]
    )
    for name in PARAMETERS:
        need(
            _is_close(merged_tree[name], one[name]),
            f"{label} changes {name}, on which all clients agree; return it unchanged",
        )


def _is_close(a: Tensor, b: Tensor) -> bool:
    tolerance = 2e-2 if a.dtype == torch.bfloat16 else 1e-9
    return torch.allclose(a.double(), b.double(), rtol=tolerance, atol=tolerance)


def _check_refusal(label: str, merge: ServerAggregator, uploads: Sequence[Payload]) -> None:
    try:
        merge(uploads)
    except FczooError as error:
        need_one_line(error, label)
    else:
        needed = len(uploads) + 1
        raise AssertionError(
            f"{label} merges {len(uploads)} uploads; raise FczooError for fewer than {needed}"
        )


def check_attack(spec: str) -> None:
    """Check that an attack follows all rules; a broken one raises AssertionError.

    The rules, on random changes, also without elements: the forged change is finite, with the shape
    and type of the honest change; the honest change stays unmodified; and the same generator gives
    the same result. In the toy benchmark one attacker of three clients changes the run,
    reproducibly. The class and each of its options have a description.

    Args:
        spec: Registered name with its options, such as ``scale:10``.

    Raises:
        AssertionError: A rule is broken.
    """
    attack = ATTACKS.create(spec)
    need(
        isinstance(attack, Attack),
        f"{spec} is not an Attack; derive it from fczoo.security.attacks.Attack",
    )
    need_documented(type(attack), spec)

    def case(draw: Draw) -> None:
        shape = [draw(0, 4) for _ in range(draw(0, 3))]
        _check_forged(
            spec, attack, shape, (torch.float32, torch.float64)[draw(0, 1)], draw(0, 2**31)
        )

    check_random_cases(case)
    _check_attacked_run(spec)


def _check_forged(
    spec: str, attack: Attack, shape: list[int], dtype: torch.dtype, seed: int
) -> None:
    change = torch.randn(shape, generator=torch_stream("change", seed), dtype=dtype)
    original = change.clone()
    first = attack.forge(change, torch_stream("attack", seed))
    need(
        torch.equal(change, original),
        f"{spec} modifies the honest change in place; return a new tensor",
    )
    second = attack.forge(change, torch_stream("attack", seed))
    need(
        first.shape == change.shape and first.dtype == change.dtype,
        f"{spec} turns {dtype} {shape} into {first.dtype} {list(first.shape)}; the server would "
        "reject it",
    )
    need(
        first.isfinite().all(),
        f"{spec} returns values that are not finite; the server would reject them",
    )
    need(
        torch.equal(first, second),
        f"{spec} returns different values for the same rng; draw only from rng",
    )


def _check_attacked_run(spec: str) -> None:
    def losses(**settings: Any) -> list[float]:
        recorder = mock.Mock(Callback)
        toy_bench(**settings).run(small_method("fedavg", tune="head"), 0, recorder)
        return [call.args[0]["loss"] for call in recorder.round.call_args_list]

    attacked_losses, second_losses, honest_losses = (
        losses(attack=spec, attackers=0.34),
        losses(attack=spec, attackers=0.34),
        losses(),
    )
    need(
        attacked_losses == second_losses,
        f"{spec} is not reproducible with the same seed; draw only from rng and keep no state",
    )
    need(
        attacked_losses != honest_losses,
        f"{spec} has no effect on a run; return a false change from forge, or set flips = True",
    )


def check_local_training(spec: str) -> None:
    """Check a rule of local training, such as FedProx; a broken one raises AssertionError.

    On random tensors: the added terms are finite, with the names and shapes of gradients, and no
    input is changed. The terms are zero at the start of the round if the client's tree is zero, or
    equals the server's tree where they are shared. In the toy benchmark: a run is reproducible,
    also with clients in one batch; it uploads control variates only if ``uploads_tree`` is true;
    and the server's tree is the mean of the clients' trees. The class and each of its options have
    a description.

    Args:
        spec: Registered name with its options, such as ``fedprox:0.1``.

    Raises:
        AssertionError: A rule is broken.
    """
    rule = LOCAL_TRAINING.create(spec)
    need(
        isinstance(rule, LocalRule),
        f"{spec} is not a LocalRule; derive it from fczoo.federation.local_rules.LocalRule",
    )
    need_documented(type(rule), spec)

    def case(draw: Draw) -> None:
        shapes = [[draw(0, 3) for _ in range(draw(0, 2))] for _ in range(2)]
        _check_added(spec, rule, shapes, draw(0, 2**31))

    check_random_cases(case)
    _check_rule_run(spec, rule)


def _check_added(spec: str, rule: LocalRule, shapes: list[list[int]], seed: int) -> None:
    rng = torch_stream("local training", seed)

    def tree() -> Tree:
        return {
            f"t{i}": torch.randn(s, generator=rng, dtype=torch.float64)
            for i, s in enumerate(shapes)
        }

    inputs = weights, start, client_control, server_control = tree(), tree(), tree(), tree()
    copies = [copy_tree(t) for t in inputs]
    trees = client_control, server_control
    gradient_terms = rule.gradient_term(weights, start, *trees)
    new_trees = (
        rule.new_client_tree(weights, start, weights, *trees) if rule.has_client_tree else {}
    )
    for actual, expected in zip(inputs, copies, strict=True):
        need_same(actual, expected, f"{spec} modifies its arguments in place; return new tensors")
    for name, value in (*gradient_terms.items(), *new_trees.items()):
        fits = (
            name in weights
            and value.shape == weights[name].shape
            and value.dtype == weights[name].dtype
        )
        need(
            fits,
            f"{spec} returns {name} as {value.dtype} {list(value.shape)}; return tensors with the "
            "names, types and shapes of the weights",
        )
        need(value.isfinite().all(), f"{spec} returns {name} with values that are not finite")
    zero = {name: torch.zeros_like(value) for name, value in start.items()}
    same = (server_control, server_control) if rule.uploads_tree else (zero, zero)
    for name, value in rule.gradient_term(start, start, *same).items():
        need(
            not value.any(),
            f"{spec} adds a gradient to {name} at the start of a round; it must be 0 there",
        )


def _check_rule_run(spec: str, rule: LocalRule) -> None:
    tune = "lora" if rule.reads_features else "head"

    def run(**settings: Any) -> Record:
        return record_run(
            toy_bench(local=spec, **settings), small_method("fedavg", tune=tune, optimizer="sgd")
        )

    one, second, together = run(), run(), run(together=3)
    for first_call, second_call in zip(one.calls, second.calls, strict=True):
        need_same(
            first_call.state,
            second_call.state,
            f"{spec} is not reproducible with the same seed; keep no state",
        )
    for single_call, batched_call in zip(one.calls, together.calls, strict=True):
        need_same(
            single_call.state,
            batched_call.state,
            f"{spec} trains differently with --together 3",
            SUM_TOLERANCE,
        )
    rejections = one.result.rejected
    need(
        not rejections,
        f"{spec}: the server rejects an honest upload: {rejections and rejections[0]['reason']}",
    )
    control_names = {
        name for call in one.calls for p in call.payloads for name in p if name.startswith(CONTROL)
    }
    need(
        bool(control_names) == rule.uploads_tree,
        f"{spec} uploads {'' if control_names else 'no '}control variates, but uploads_tree is "
        f"{rule.uploads_tree}; change uploads_tree",
    )
    controls = one.calls[-1].engine.controls
    for name, value in controls.server.items():
        total = torch.stack([tree[name] for tree in controls.clients.values()]).sum(0)
        mean = total / one.bench.partition.clients
        sentence = f"{spec}'s server tree is not the mean of the clients' trees"
        need_same({name: value}, {name: mean}, sentence, SUM_TOLERANCE)
