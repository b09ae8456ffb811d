"""Learning-rate factors over a task."""

import math
from collections.abc import Callable


def constant(round: int, rounds: int, progress: float) -> float:
    return 1.0


def cosine(round: int, rounds: int, progress: float) -> float:
    """Half a cosine over the rounds of a task, constant inside a round: (1 + cos(pi r / R)) / 2."""
    return 0.5 * (1 + math.cos(math.pi * round / rounds))


def cosine_late(round: int, rounds: int, progress: float) -> float:
    """``cosine`` one round late, so that the first two rounds use the full rate (PILoRA's released code)."""
    return cosine(max(round - 1, 0), rounds, progress)


def cosine_local(round: int, rounds: int, progress: float) -> float:
    """Half a cosine over the local steps of each round (early released code of HGP)."""
    return 0.5 * (1 + math.cos(math.pi * progress))


SCHEDULES: dict[str, Callable[[int, int, float], float]] = {
    "constant": constant,
    "cosine": cosine,
    "cosine_late": cosine_late,
    "cosine_local": cosine_local,
}
"""Name -> factor of (round, rounds of the task, fraction of the client's steps of the round already done)."""

LOCAL = {"cosine_local"}
"""Schedules whose factor changes inside a round."""
