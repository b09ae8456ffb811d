"""Flat trees of tensors: state, broadcast, upload and checkpoint are all one."""

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
