"""Places where the uploads of a round wait for the merge: the device, host memory, or a disk."""

import math
import mmap
import tempfile
from typing import IO, Literal

import torch
from torch import Tensor

from fczoo.core.files import home, name_file_in_errors
from fczoo.core.payload import Payload
from fczoo.core.tree import Tree

WaitingPlace = Literal["device", "host", "disk"]
MEMORY_LIMIT = 250_000_000
"""Trained scalars of all clients of a round, above which their uploads wait on a disk: 1 GB in
float32.
"""
ALIGNMENT = 64  # bytes, as torch aligns what it allocates: sums can depend on it in their last bit


def move_upload(upload: Payload, place: WaitingPlace) -> Payload:
    """Move the tensors of an upload to the place where it waits for the merge.

    On disk they are in a private file, which is removed together with them. Raises OSError, e.g. on
    a full disk.
    """
    if place == "device":
        return upload
    if place == "host":
        return upload.holding({name: value.cpu() for name, value in upload.items()})
    folder = home() / "cache"
    folder.mkdir(parents=True, exist_ok=True)
    with name_file_in_errors(folder), tempfile.TemporaryFile(dir=folder) as file:
        starts = {name: _append(file, value) for name, value in upload.items()}
        file.flush()
        if not file.tell():
            return upload
        memory = mmap.mmap(file.fileno(), 0)  # as long as a tensor needs it
    tensors: Tree = {name: _view(memory, start, upload[name]) for name, start in starts.items()}
    return upload.holding(tensors)


def _append(file: IO[bytes], value: Tensor) -> int:
    """Write a tensor at the end of a file and return its offset."""
    start = math.ceil(file.tell() / ALIGNMENT) * ALIGNMENT
    file.write(bytes(start - file.tell()))
    file.write(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return start


def _view(mapped: mmap.mmap, start: int, like: Tensor) -> Tensor:
    if not like.numel():
        return torch.empty_like(like, device="cpu")
    flat = torch.frombuffer(mapped, dtype=like.dtype, count=like.numel(), offset=start)
    return flat.view(like.shape)
