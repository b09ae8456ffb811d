"""Learning-rate schedules: factors on the rate of an optimizer, by round or local step."""

import math
from collections.abc import Callable


def constant(round: int, rounds: int, progress: float) -> float:
    """Return 1, a constant rate.

    Args:
        round: Not used.
        rounds: Not used.
        progress: Not used.
    """
    return 1.0


def cosine(round: int, rounds: int, progress: float) -> float:
    """Return half a cosine over the rounds of a task: (1 + cos(pi r / R)) / 2.

    It is constant inside a round.

    Args:
        round: Number r of the round in its task, from 0.
        rounds: Rounds R per task.
        progress: Not used.
    """
    return 0.5 * (1 + math.cos(math.pi * round / rounds))


def cosine_late(round: int, rounds: int, progress: float) -> float:
    """Return ``cosine`` one round late: the first two rounds use the full rate (PILoRA's code).

    Args:
        round: Number of the round in its task, from 0.
        rounds: Rounds per task.
        progress: Not used.
    """
    return cosine(max(round - 1, 0), rounds, progress)


def cosine_local(round: int, rounds: int, progress: float) -> float:
    """Return half a cosine over the local steps of each round (early released code of HGP).

    Args:
        round: Not used.
        rounds: Not used.
        progress: Fraction of the client's steps of the round that are done.
    """
    return 0.5 * (1 + math.cos(math.pi * progress))


SCHEDULES: dict[str, Callable[[int, int, float], float]] = {
    "constant": constant,
    "cosine": cosine,
    "cosine_late": cosine_late,
    "cosine_local": cosine_local,
}
"""Name -> factor of (round, rounds of the task, fraction of the client's steps of the round already
done).
"""

LOCAL = {"cosine_local"}
"""Schedules whose factor changes inside a round."""
