"""Flat trees of tensors: state, broadcast, upload and checkpoint are all one."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

Tree = dict[str, Tensor]
"""Flat, with dotted names such as ``lora.0.q.a``: state, broadcast, upload and checkpoint are all this."""


def select(tree: Tree, *prefixes: str) -> Tree:
    """The entries whose name starts with one of the prefixes."""
    return {k: v for k, v in tree.items() if k.startswith(prefixes)}


def drop(tree: Tree, *prefixes: str) -> Tree:
    """The entries whose name starts with none of the prefixes."""
    return {k: v for k, v in tree.items() if not k.startswith(prefixes)}


def nbytes(tree: Tree) -> int:
    """Size of all tensors, bytes."""
    return sum(v.numel() * v.element_size() for v in tree.values())


def bytes_of(tensor: Tensor) -> bytes:
    """The numbers of a tensor as they lie in memory."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def sha256_of(tensors: Mapping[str, Tensor], *said: str) -> str:
    """Hash of tensors by name, with their types and shapes, and of what else is said.

    The order of the tensors does not matter.
    """
    digest = hashlib.sha256("".join(said).encode())
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode())
        digest.update(bytes_of(tensors[name]))
    return digest.hexdigest()
