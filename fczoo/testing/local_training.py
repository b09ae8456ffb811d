"""The check of a rule of local training."""

from typing import Any

import torch

from fczoo.core.registry import LOCAL_TRAINING
from fczoo.core.seeds import torch_stream
from fczoo.core.tree import Tree
from fczoo.federation.local_rules import CONTROL, LocalRule
from fczoo.testing.call_recorder import Record, copy_tree, record_run
from fczoo.testing.method_under_test import need_same
from fczoo.testing.runs import Draw, check_random_cases, need, need_documented
from fczoo.testing.world import small_method, toy_bench

SUM_TOLERANCE = 1e-9  # float64: only the order of sums differs


def check_local_training(spec: str) -> None:
    """Raise AssertionError, in one sentence, where a rule of local training breaks a rule itself.

    Checked on random tensors: the added terms have names and shapes of gradients, are finite, and
    are zero for a client whose weights are those of the beginning of the round and whose tree is
    zero, or the server's where they are shared; no input is changed. Checked in the toy world: a
    run is the same again and with clients together, what it uploads is declared, and the server's
    tree is the mean of the clients'. The class and each of its options have a description.

    Args:
        spec: Registered name with its options, such as ``fedprox:0.1``.

    Raises:
        AssertionError: A rule is broken.
    """
    rule = LOCAL_TRAINING.create(spec)
    need(isinstance(rule, LocalRule), f"{spec} is not a LocalTraining; derive it from that class")
    need_documented(type(rule), spec)

    def case(draw: Draw) -> None:
        shapes = [[draw(0, 3) for _ in range(draw(0, 2))] for _ in range(2)]
        _check_added(spec, rule, shapes, draw(0, 2**31))

    check_random_cases(case)
    _check_run(spec, rule)


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
    new_trees = rule.new_client_tree(weights, start, weights, *trees) if rule.keeps else {}
    for ours, theirs in zip(inputs, copies, strict=True):
        need_same(ours, theirs, f"{spec} changes what it is given; return new tensors")
    for name, value in (*gradient_terms.items(), *new_trees.items()):
        fits = (
            name in weights
            and value.shape == weights[name].shape
            and value.dtype == weights[name].dtype
        )
        need(fits, f"{spec} makes {name} with shape {list(value.shape)}, which fits no gradient")
        need(value.isfinite().all(), f"{spec} makes {name}, which is not finite")
    zero = {name: torch.zeros_like(value) for name, value in start.items()}
    same = (server_control, server_control) if rule.shares else (zero, zero)
    for name, value in rule.gradient_term(start, start, *same).items():
        need(
            not value.any(),
            f"{spec} adds to {name} of a client that has the weights of the round's beginning",
        )


def _check_run(spec: str, rule: LocalRule) -> None:
    tune = "lora" if rule.reads_features else "head"

    def run(**settings: Any) -> Record:
        return record_run(
            toy_bench(local=spec, **settings), small_method("fedavg", tune=tune, optimizer="sgd")
        )

    one, second, together = run(), run(), run(together=3)
    for ours, theirs in zip(one.calls, second.calls, strict=True):
        need_same(
            ours.state, theirs.state, f"{spec} gives another run from the same seed; keep no state"
        )
    for ours, theirs in zip(one.calls, together.calls, strict=True):
        need_same(
            ours.state, theirs.state, f"{spec} trains differently with --together 3", SUM_TOLERANCE
        )
    need(not one.result.rejected, f"{spec} has an honest upload rejected")
    control_names = {
        name for call in one.calls for p in call.payloads for name in p if name.startswith(CONTROL)
    }
    need(
        bool(control_names) == rule.shares,
        f"{spec} sends control variates only where shares is true",
    )
    controls = one.calls[-1].engine.controls
    for name, value in controls.server.items():
        total = torch.stack([tree[name] for tree in controls.clients.values()]).sum(0)
        mean = total / one.bench.partition.clients
        need_same({name: value}, {name: mean}, f"{spec}'s trees do not add up", SUM_TOLERANCE)
