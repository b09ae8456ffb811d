"""Merges of plain trees by an aggregator, without a run, and checks of aggregators."""

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from fczoo.core.errors import FczooError
from fczoo.core.options import plain, quote
from fczoo.core.payload import Payload
from fczoo.core.registry import MERGES, make_aggregator
from fczoo.core.tree import Tree
from fczoo.core.types import ServerAggregator, to_tensor

REPEATED_MERGES = 20
"""Merges that ``is_stateless`` makes: state may take effect only after some."""
UPLOAD_COUNTS = 4, 16, 64, 256
"""Numbers of uploads that ``check_stateless`` tries: robust aggregators refuse few."""


def merge(
    aggregator: str, trees: Sequence[Mapping[str, Tensor]], num_samples: Sequence[int] | None = None
) -> Tree:
    """Merge the tensors of several clients as a server does.

    Example: ``fczoo.merge("median", [{"w": tensor}, ...])``. Means are floating-point numbers:
    integers that an aggregator averages become float64.

    Args:
        aggregator: Name that ``--aggregator`` takes, or name of a method's merge.
        trees: One per client, name -> tensor of any shape, or a ``Payload``.
        num_samples: Images of each client. Default: 1 each.

    Returns:
        The merged tensors, name -> tensor.

    Raises:
        FczooError: The trees do not fit each other or the aggregator, or a value is not finite.
    """
    if not isinstance(aggregator, str):
        raise FczooError(
            f"{quote(aggregator)} is not the name of an aggregator; give a string such as 'median'"
        )
    if isinstance(trees, Mapping | str) or not isinstance(trees, Iterable):
        raise FczooError(
            f"trees is {quote(trees)}; give a list of dicts, name -> tensor, one per client"
        )
    trees = [_tree(number, tree) for number, tree in enumerate(trees)]
    is_method_merge = MERGES.find(aggregator.partition(":")[0]) is not None
    chosen: ServerAggregator = (
        MERGES.create(aggregator) if is_method_merge else make_aggregator(aggregator)
    )
    if not trees:
        raise FczooError(f"{aggregator} has nothing to merge; give at least one tree of tensors")
    counts = plain(num_samples)
    if counts is None:
        counts = [getattr(tree, "num_samples", 1) for tree in trees]
    if not isinstance(counts, Sequence) or isinstance(counts, str):
        raise FczooError(
            f"num_samples is {quote(counts)}; give a list of {len(trees)} whole numbers"
        )
    counts = [plain(count) for count in counts]
    are_counts = all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in counts)
    if len(counts) != len(trees) or not are_counts:
        raise FczooError(
            f"num_samples is {list(counts)}; give {len(trees)} whole numbers above 0, one per tree"
        )
    for number, tree in enumerate(trees[1:], 1):
        _check(number, tree, trees[0], shapes=not is_method_merge)
    _check_finite(trees)
    tensors = [dict(tree) for tree in trees] if is_method_merge else _same_types(trees)
    payloads = [
        Payload(tree, i, n) for i, (tree, n) in enumerate(zip(tensors, counts, strict=True))
    ]
    try:
        return chosen(payloads)
    except KeyError as error:
        names = ", ".join(trees[0])
        raise FczooError(
            f"{aggregator} reads {error}, which the trees do not have; they have {names}"
        ) from error


def _tree(number: int, tree: Any) -> Payload | dict[str, Tensor]:
    """Return a client's tensors; convert NumPy arrays, lists and numbers to tensors."""
    if isinstance(tree, Payload):
        return tree
    if not isinstance(tree, Mapping):
        raise FczooError(f"tree {number} is {quote(tree)}; give a dict, name -> tensor")
    return {
        str(name): to_tensor(value, f"{name!r} of tree {number}") for name, value in tree.items()
    }


def _check(
    number: int, tree: Mapping[str, Tensor], first: Mapping[str, Tensor], shapes: bool
) -> None:
    """Check that a tree has the names of the first tree and, with ``shapes``, its shapes.

    Raises:
        FczooError: Its names or shapes differ.
    """
    if differences := sorted(tree.keys() ^ first.keys()):
        tree_with, tree_without = (number, 0) if differences[0] in tree else (0, number)
        problem = f"tree {tree_with} has {differences[0]!r}, but tree {tree_without} does not"
        raise FczooError(f"{problem}; give all trees the same names")
    for name in first if shapes else ():
        if tree[name].shape != first[name].shape:
            sizes = f"{tuple(tree[name].shape)}, but {tuple(first[name].shape)} in tree 0"
            problem = f"{name!r} of tree {number} has shape {sizes}"
            raise FczooError(f"{problem}; give tensors of the same shape")


def _check_finite(trees: Sequence[Mapping[str, Tensor]]) -> None:
    """Raise FczooError for the first tensor that holds NaN or infinity, with its client."""
    for number, tree in enumerate(trees):
        for name, value in tree.items():
            if not value.isfinite().all():
                client = getattr(tree, "client", number)
                problem = f"{name!r} of client {client} has values that are not finite"
                raise FczooError(f"{problem}; leave this client out, or train it again")


def _same_types(trees: Sequence[Mapping[str, Tensor]]) -> list[Tree]:
    """Convert each tensor to the type to which PyTorch promotes those of all trees."""
    types = {n: reduce(torch.promote_types, (tree[n].dtype for tree in trees)) for n in trees[0]}
    return [{name: value.to(types[name]) for name, value in tree.items()} for tree in trees]


def wrap_with_checks(aggregator: ServerAggregator) -> ServerAggregator:
    """Wrap an aggregator to check that it drops no tensor and returns finite ones.

    The wrapper raises FczooError otherwise.

    Args:
        aggregator: Aggregator to wrap.
    """
    name = getattr(aggregator, "name", type(aggregator).__name__)

    def merge(payloads: Sequence[Payload]) -> Tree:
        tree = aggregator(payloads)
        fault = ""
        for tensor in payloads[0] if payloads else ():
            if tensor not in tree:
                fault = f"no {tensor}"
            elif not tree[tensor].isfinite().all() and all(
                p[tensor].isfinite().all() for p in payloads
            ):
                fault = f"a {tensor} that is not finite"
        if fault:
            problem = f"from valid uploads, aggregator {name} returned {fault}"
            raise FczooError(f"{problem}; fix its code")
        return tree

    return merge


def check_stateless(spec: str) -> None:
    """Raise FczooError if an aggregator keeps state or draws random numbers.

    A checkpoint does not hold either, so a resumed run would end with other numbers.

    Args:
        spec: Name of the aggregator, with its options.
    """
    aggregator = make_aggregator(spec)
    for count in UPLOAD_COUNTS:
        try:
            if is_stateless(aggregator, _random_uploads(count)):
                return
        except FczooError:  # too few uploads
            continue
        except Exception:  # it reads tensors of one method only, whose run reports any error
            return
        problem = "keeps state or draws random numbers, so a resumed run would differ"
        raise FczooError(f"aggregator {spec} {problem}; compute its result from the uploads only")


def is_stateless(aggregator: ServerAggregator, uploads: Sequence[Payload]) -> bool:
    """Return whether an aggregator merges equal uploads to equal trees after other merges.

    Args:
        aggregator: Aggregator to try.
        uploads: Uploads that it merges several times, with others in between.
    """
    others = [p.holding({k: _changed_copy(v) for k, v in p.items()}) for p in uploads]
    first = aggregator(list(uploads))
    for _ in range(REPEATED_MERGES // 2):
        aggregator(list(others))
        again = aggregator(list(uploads))
        if first.keys() != again.keys() or not all(_is_equal(first[k], again[k]) for k in first):
            return False
    return True


def _is_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    alike = a.shape == b.shape and a.dtype == b.dtype
    return alike and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def _changed_copy(value: torch.Tensor) -> torch.Tensor:
    return 3 * value + 1 if value.is_floating_point() else value.clone()


def _random_uploads(count: int) -> list[Payload]:
    """Create small uploads of clients 0, 1, ...: a matrix and a vector, for 1, 2, ... images."""
    rng = torch.Generator().manual_seed(0)
    return [
        Payload(
            {"head": torch.randn(4, 3, generator=rng), "bias": torch.randn(5, generator=rng)},
            n,
            n + 1,
        )
        for n in range(count)
    ]
