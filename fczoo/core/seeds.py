"""Random generators seeded by a key, so that the order in which they are made does not matter."""

import zlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from fczoo.core.errors import FczooError
from fczoo.core.options import MAX_INTEGER, plain, quote

if TYPE_CHECKING:
    import torch


PHASE_KEYS = {
    "task_start": "begin",
    "before_exemplars": "before exemplars",
    "after_rounds": "conclude",
    "task_end": "end",
}
"""Words of a task's phases in the keys of seeds. Recorded results depend on them."""


def _entropy(*key: int | str) -> np.random.SeedSequence:
    return np.random.SeedSequence(
        [zlib.crc32(k.encode()) if isinstance(k, str) else k for k in key]
    )


def check_seed(seed: Any) -> int:
    """Return a seed as an int.

    Args:
        seed: Seed of the user.

    Raises:
        FczooError: It is not a whole number from 0 to 2^63 - 1.
    """
    value = plain(seed)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_INTEGER:
        raise FczooError(
            f"seed is {quote(seed)}; it must be a whole number from 0 to {MAX_INTEGER}"
        )
    return value


def check_seeds(seeds: Any) -> tuple[int, ...]:
    """Return several seeds as ints.

    Args:
        seeds: Iterable of seeds.

    Raises:
        FczooError: It is not a list of distinct seeds, or it is empty.
    """
    if isinstance(seeds, str) or not isinstance(seeds, Iterable):
        raise FczooError(f"seeds is {quote(seeds)}; give a list such as [0, 1] or range(3)")
    numbers = tuple(map(check_seed, seeds))
    if not numbers or len(set(numbers)) < len(numbers):
        raise FczooError(f"seeds is {quote(list(numbers))}; give one or more distinct seeds")
    return numbers


def numpy_stream(*key: int | str) -> np.random.Generator:
    """Create a generator for a key such as ``("partition", seed, task)``.

    Args:
        *key: Words and numbers that identify the generator.
    """
    return np.random.default_rng(_entropy(*key))


def torch_stream(*key: int | str, device: "torch.device | str" = "cpu") -> "torch.Generator":
    """Create a generator for a key such as ``("shuffle", seed, task, round, client)``.

    Args:
        *key: Words and numbers that identify the generator.
        device: Device of the generator.
    """
    import torch  # a second that the split of images over clients does without

    return torch.Generator(device).manual_seed(
        int(_entropy(*key).generate_state(1, np.uint64)[0]) >> 1
    )
