"""Aggregators and merges on plain trees, without a run."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from fczoo.core.errors import FczooError
from fczoo.core.payload import Payload
from fczoo.core.registry import MERGES, make_aggregator
from fczoo.core.tree import Tree
from fczoo.core.types import ServerAggregator


def merge(
    aggregator: str, trees: Sequence[Mapping[str, Tensor]], num_samples: Sequence[int] | None = None
) -> Tree:
    """What a server makes of its clients' tensors: ``fczoo.merge("median", [{"w": tensor}, ...])``.

    ``aggregator`` is what ``--aggregator`` takes, or the name of a method's merge; each tree is one
    client's, name -> tensor, or a ``Payload``. ``num_samples`` are the clients' images, else one each.
    Raises FczooError for trees that do not fit each other or the aggregator.
    """
    own = aggregator.partition(":")[0] in MERGES.names()
    chosen: ServerAggregator = MERGES.create(aggregator) if own else make_aggregator(aggregator)
    if not trees:
        raise FczooError(f"{aggregator} has nothing to merge; give at least one tree of tensors")
    counts = num_samples or [getattr(tree, "num_samples", 1) for tree in trees]
    if len(counts) != len(trees) or min(counts) < 1:
        raise FczooError(
            f"num_samples is {list(counts)}; give {len(trees)} whole numbers above 0, one a tree"
        )
    for number, tree in enumerate(trees[1:], 1):
        _check(number, tree, trees[0], shapes=not own)
    payloads = [Payload(dict(tree), i, n) for i, (tree, n) in enumerate(zip(trees, counts, strict=True))]
    try:
        return chosen(payloads)
    except KeyError as error:
        known = ", ".join(trees[0])
        raise FczooError(
            f"{aggregator} reads {error}, which the trees do not have; they have {known}"
        ) from error


def _check(number: int, tree: Mapping[str, Tensor], first: Mapping[str, Tensor], shapes: bool) -> None:
    """Raise FczooError where a tree has other names than the first or, with ``shapes``, other shapes."""
    if odd := sorted(tree.keys() ^ first.keys()):
        here, there = (number, 0) if odd[0] in tree else (0, number)
        raise FczooError(f"tree {here} has {odd[0]!r}, tree {there} has not; all need the same names")
    for name in first if shapes else ():
        if tree[name].shape != first[name].shape:
            sizes = f"{tuple(tree[name].shape)}, in tree 0 {tuple(first[name].shape)}"
            raise FczooError(f"{name!r} of tree {number} has shape {sizes}; all need the same")
