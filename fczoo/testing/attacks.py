"""The check of an attack."""

from typing import Any

import torch

from fczoo.core.registry import ATTACKS
from fczoo.core.seeds import torch_stream
from fczoo.federation.observer import Silent
from fczoo.security.attacks import Attack
from fczoo.testing.trials import Draw, need, need_documented, tried
from fczoo.testing.world import small_method, toy_bench


def check_attack(spec: str) -> None:
    """Raise AssertionError, in one sentence, where an attack breaks a rule.

    ``spec`` is a registered name with its options, such as ``scale:10``. Checked on random changes: what is
    uploaded in place of an honest change has its shape and type and is finite, the honest change stays as
    it is, and the same generator forges the same, also of a tensor without elements. Checked in the toy
    world: one attacker of three changes the run, in the same way each time. The class and each of its
    options say what they mean.
    """
    attack = ATTACKS.create(spec)
    need(isinstance(attack, Attack), f"{spec} is no Attack; derive it from fczoo.security.attacks.Attack")
    need_documented(type(attack), spec)

    def case(draw: Draw) -> None:
        shape = [draw(0, 4) for _ in range(draw(0, 3))]
        _check_forged(spec, attack, shape, (torch.float32, torch.float64)[draw(0, 1)], draw(0, 2**31))

    tried(case)
    _check_run(spec)


def _check_forged(spec: str, attack: Attack, shape: list[int], dtype: torch.dtype, seed: int) -> None:
    change = torch.randn(shape, generator=torch_stream("change", seed), dtype=dtype)
    before = change.clone()
    first = attack.forge(change, torch_stream("attack", seed))
    need(torch.equal(change, before), f"{spec} changes the honest change in place; return a new tensor")
    again = attack.forge(change, torch_stream("attack", seed))
    need(
        first.shape == change.shape and first.dtype == change.dtype,
        f"{spec} makes {first.dtype} {list(first.shape)} of {dtype} {shape}; the server would turn it "
        "away unseen",
    )
    need(first.isfinite().all(), f"{spec} forges what is not finite; the server would turn it away unseen")
    need(torch.equal(first, again), f"{spec} forges differently from the same generator; draw from rng alone")


class _Losses(Silent):
    """The loss of every round."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def round(self, record: dict[str, Any]) -> None:
        self.values.append(record["loss"])


def _check_run(spec: str) -> None:
    def losses(**settings: Any) -> list[float]:
        seen = _Losses()
        toy_bench(**settings).run(small_method("fedavg", tune="head"), 0, seen)
        return seen.values

    attacked, again, honest = (
        losses(attack=spec, attackers=0.34),
        losses(attack=spec, attackers=0.34),
        losses(),
    )
    need(
        attacked == again,
        f"{spec} gives another run from the same seed; draw from rng alone and keep no state",
    )
    need(
        attacked != honest, f"{spec} changes nothing in a run; change what forge returns, or set flips = True"
    )
