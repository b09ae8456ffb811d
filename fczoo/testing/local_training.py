"""The check of a rule of local training."""

from typing import Any

import torch

from fczoo.core.registry import LOCAL_TRAINING
from fczoo.core.seeds import torch_stream
from fczoo.core.tree import Tree
from fczoo.federation.local_training import CONTROL, LocalTraining
from fczoo.testing.recording import Record, copied, watch
from fczoo.testing.subject import need_same
from fczoo.testing.trials import Draw, need, need_documented, tried
from fczoo.testing.world import small_method, toy_bench

TOGETHER = 1e-9  # float64: only the order of sums differs


def check_local_training(spec: str) -> None:
    """Raise AssertionError, in one sentence, where a rule of local training breaks a rule itself.

    ``spec`` is a registered name with its options, such as ``fedprox:0.1``. Checked on random tensors: what
    is added has names and shapes of gradients, is finite, and is zero for a client that stands where the
    round began with the server's control variates; nothing given is changed. Checked in the toy world: a
    run is the same again and with clients together, and its control variates are declared and add up.
    The class and each of its options say what they mean.
    """
    rule = LOCAL_TRAINING.create(spec)
    need(isinstance(rule, LocalTraining), f"{spec} is no LocalTraining; derive it from that class")
    need_documented(type(rule), spec)

    def case(draw: Draw) -> None:
        shapes = [[draw(0, 3) for _ in range(draw(0, 2))] for _ in range(2)]
        _check_added(spec, rule, shapes, draw(0, 2**31))

    tried(case)
    _check_run(spec, rule)


def _check_added(spec: str, rule: LocalTraining, shapes: list[list[int]], seed: int) -> None:
    rng = torch_stream("local training", seed)

    def tree() -> Tree:
        return {f"t{i}": torch.randn(s, generator=rng, dtype=torch.float64) for i, s in enumerate(shapes)}

    given = now, start, own, server = tree(), tree(), tree(), tree()
    before = [copied(t) for t in given]
    added = rule.added(now, start, own, server)
    renewed = rule.renewed(now, own, server) if rule.keeps else {}
    for ours, theirs in zip(given, before, strict=True):
        need_same(ours, theirs, f"{spec} changes what it is given; return new tensors")
    for name, value in (*added.items(), *renewed.items()):
        fits = name in now and value.shape == now[name].shape and value.dtype == now[name].dtype
        need(fits, f"{spec} makes {name} with shape {list(value.shape)}, which fits no gradient")
        need(value.isfinite().all(), f"{spec} makes {name}, which is not finite")
    for name, value in rule.added(start, start, server, server).items():
        need(not value.any(), f"{spec} adds to {name} of a client that stands where the round began")


def _check_run(spec: str, rule: LocalTraining) -> None:
    def run(**settings: Any) -> Record:
        return watch(toy_bench(local=spec, **settings), small_method("fedavg", tune="head", optimizer="sgd"))

    one, again, together = run(), run(), run(together=3)
    for ours, theirs in zip(one.calls, again.calls, strict=True):
        need_same(ours.state, theirs.state, f"{spec} gives another run from the same seed; keep no state")
    for ours, theirs in zip(one.calls, together.calls, strict=True):
        need_same(ours.state, theirs.state, f"{spec} trains otherwise with --together 3", TOGETHER)
    need(not one.result.rejected, f"{spec} has an honest upload turned away")
    sent = {name for call in one.calls for p in call.payloads for name in p if name.startswith(CONTROL)}
    need(bool(sent) == rule.keeps, f"{spec} sends control variates only where keeps is true")
    controls = one.calls[-1].engine.controls
    for name, value in controls.server.items():
        total = torch.stack([tree[name] for tree in controls.clients.values()]).sum(0)
        mean = total / one.bench.partition.clients
        need_same({name: value}, {name: mean}, f"{spec}'s control variates do not add up", TOGETHER)
