"""The check of an attack."""

from typing import Any

import torch

from fczoo.core.registry import ATTACKS
from fczoo.core.seeds import torch_stream
from fczoo.federation.callbacks import Callback
from fczoo.security.attacks import Attack
from fczoo.testing.runs import Draw, check_random_cases, need, need_documented
from fczoo.testing.world import small_method, toy_bench


def check_attack(spec: str) -> None:
    """Raise AssertionError, in one sentence, where an attack breaks a rule.

    Checked on random changes: a forged change has the shape and type of the honest one and is
    finite, the honest change stays as it is, and the same generator forges the same, also of a
    tensor without elements. Checked in the toy world: one attacker of three changes the run, in the
    same way each time. The class and each of its options have a description.

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
    _check_run(spec)


def _check_forged(
    spec: str, attack: Attack, shape: list[int], dtype: torch.dtype, seed: int
) -> None:
    change = torch.randn(shape, generator=torch_stream("change", seed), dtype=dtype)
    original = change.clone()
    first = attack.forge(change, torch_stream("attack", seed))
    need(
        torch.equal(change, original),
        f"{spec} changes the honest change in place; return a new tensor",
    )
    second = attack.forge(change, torch_stream("attack", seed))
    need(
        first.shape == change.shape and first.dtype == change.dtype,
        f"{spec} makes {first.dtype} {list(first.shape)} of {dtype} {shape}; the server would "
        "reject it",
    )
    need(
        first.isfinite().all(),
        f"{spec} forges what is not finite; the server would reject it",
    )
    need(
        torch.equal(first, second),
        f"{spec} forges differently from the same generator; draw only from rng",
    )


class _Losses(Callback):
    """The loss of every round."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def round(self, record: dict[str, Any]) -> None:
        self.values.append(record["loss"])


def _check_run(spec: str) -> None:
    def losses(**settings: Any) -> list[float]:
        recorder = _Losses()
        toy_bench(**settings).run(small_method("fedavg", tune="head"), 0, recorder)
        return recorder.values

    attacked_losses, second_losses, honest_losses = (
        losses(attack=spec, attackers=0.34),
        losses(attack=spec, attackers=0.34),
        losses(),
    )
    need(
        attacked_losses == second_losses,
        f"{spec} gives another run from the same seed; draw only from rng and keep no state",
    )
    need(
        attacked_losses != honest_losses,
        f"{spec} changes nothing in a run; change what forge returns, or set flips = True",
    )
