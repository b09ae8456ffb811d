"""Random generators seeded by a key, so that the order in which they are made does not matter."""

import zlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


def _entropy(*key: int | str) -> np.random.SeedSequence:
    return np.random.SeedSequence([zlib.crc32(k.encode()) if isinstance(k, str) else k for k in key])


def numpy_stream(*key: int | str) -> np.random.Generator:
    """Generator for a key such as ``("partition", seed, task)``."""
    return np.random.default_rng(_entropy(*key))


def torch_stream(*key: int | str, device: "torch.device | str" = "cpu") -> "torch.Generator":
    """Generator on ``device`` for a key such as ``("shuffle", seed, task, round, client, epoch)``."""
    import torch  # a second that the split of images over clients does without

    return torch.Generator(device).manual_seed(int(_entropy(*key).generate_state(1, np.uint64)[0]) >> 1)
