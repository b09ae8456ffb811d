"""Flat trees of tensors: the form of states, broadcasts, uploads and checkpoints."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

Tree = dict[str, Tensor]
"""Flat, with dotted names such as ``lora.0.q.a``: state, broadcast, upload and checkpoint are all
this.
"""


def select(tree: Tree, *prefixes: str) -> Tree:
    """Select the entries whose name starts with one of the prefixes.

    Args:
        tree: Tensors by name.
        *prefixes: Starts of names.
    """
    return {k: v for k, v in tree.items() if k.startswith(prefixes)}


def drop(tree: Tree, *prefixes: str) -> Tree:
    """Drop the entries whose name starts with one of the prefixes.

    Args:
        tree: Tensors by name.
        *prefixes: Starts of names.
    """
    return {k: v for k, v in tree.items() if not k.startswith(prefixes)}


def strip_prefix(tree: Tree, prefix: str) -> Tree:
    """Select the entries whose name starts with a prefix, and name them without it.

    Args:
        tree: Tensors by name.
        prefix: Start of names, such as ``teacher.``.
    """
    return {k.removeprefix(prefix): v for k, v in select(tree, prefix).items()}


def nbytes(tree: Tree) -> int:
    """Return the size of all tensors in bytes.

    Args:
        tree: Tensors by name.
    """
    return sum(v.numel() * v.element_size() for v in tree.values())


def bytes_of(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor's values, as they are in memory.

    Args:
        tensor: Tensor of any shape, type and device.
    """
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def sha256_of(tensors: Mapping[str, Tensor], *texts: str) -> str:
    """Hash tensors by name, with their types and shapes, and further text.

    The order of the tensors does not matter.

    Args:
        tensors: Tensors by name.
        *texts: Text hashed before the tensors.

    Returns:
        SHA-256 in hexadecimal digits.
    """
    digest = hashlib.sha256("".join(texts).encode())
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode())
        digest.update(bytes_of(tensors[name]))
    return digest.hexdigest()


def stack_past(state: Tree, now: str, past: str) -> Tree:
    """Append the current task's tensors to the stacks of earlier tasks.

    Args:
        state: State with ``NOW X`` tensors, and ``PAST X`` [t - 1, ...] of earlier tasks, if any.
        now: Prefix of the current names, such as ``lora.``.
        past: Prefix of the stacks' names, such as ``past.``.

    Returns:
        ``PAST X`` [t, ...] for each ``NOW X``, with the current task last.
    """
    stacks: Tree = {}
    for name, value in select(state, now).items():
        earlier = past + name.removeprefix(now)
        stacks[earlier] = (
            torch.cat([state[earlier], value[None]]) if earlier in state else value[None]
        )
    return stacks
