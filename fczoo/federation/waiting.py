"""Uploads that wait for the merge on a disk, where a round's would not fit in memory.

The server merges when all have arrived: the guard compares their norms, and robust aggregators look at all of
them. So a sum that grows as they arrive would not do; but each can wait in a file, from which the merge reads
what it is about to add. Their bits are the same as in memory.
"""

import math
import mmap
import tempfile
from typing import IO

import torch
from torch import Tensor

from fczoo.core.files import home, naming
from fczoo.core.payload import Payload
from fczoo.core.tree import Tree

ALIGNED = 64  # bytes, as torch aligns what it allocates: sums can depend on it in their last bit


def on_disk(payload: Payload) -> Payload:
    """The payload with its tensors in a file that nobody else sees and that ends with it.

    Raises OSError, e.g. on a full disk.
    """
    folder = home() / "cache"
    folder.mkdir(parents=True, exist_ok=True)
    with naming(folder), tempfile.TemporaryFile(dir=folder) as file:
        starts = {name: _append(file, value) for name, value in payload.items()}
        file.flush()
        if not file.tell():
            return payload
        mapped = mmap.mmap(file.fileno(), 0)  # as long as a tensor needs it
    tensors: Tree = {name: _view(mapped, start, payload[name]) for name, start in starts.items()}
    return payload.holding(tensors)


def _append(file: IO[bytes], value: Tensor) -> int:
    """Write a tensor at the end of a file; returns where it begins."""
    start = math.ceil(file.tell() / ALIGNED) * ALIGNED
    file.write(bytes(start - file.tell()))
    file.write(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return start


def _view(mapped: mmap.mmap, start: int, like: Tensor) -> Tensor:
    if not like.numel():
        return torch.empty_like(like, device="cpu")
    flat = torch.frombuffer(mapped, dtype=like.dtype, count=like.numel(), offset=start)
    return flat.view(like.shape)
