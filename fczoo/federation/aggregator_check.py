"""Checks of an aggregator: it keeps no state, and what it returns is complete and finite."""

from collections.abc import Sequence

import torch

from fczoo.core.errors import FczooError
from fczoo.core.payload import Payload
from fczoo.core.registry import make_aggregator
from fczoo.core.tree import Tree
from fczoo.core.types import ServerAggregator

MERGES = 20
"""Merges that ``repeats`` makes: state may take effect only after some."""
UPLOADS = 4, 16, 64, 256
"""Numbers of uploads that ``check_stateless`` tries: robust aggregators refuse few."""


def sound(aggregator: ServerAggregator) -> ServerAggregator:
    """Wrap an aggregator to check that it drops no tensor and returns finite ones.

    The wrapper raises FczooError otherwise.
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
            problem = f"aggregator {name} returned {fault} from valid uploads"
            raise FczooError(f"{problem}; fix its code")
        return tree

    return merge


def check_stateless(spec: str) -> None:
    """Raise FczooError where an aggregator keeps state or draws random numbers.

    A checkpoint does not hold either, so a resumed run would end with other numbers.
    """
    aggregator = make_aggregator(spec)
    for count in UPLOADS:
        try:
            if repeats(aggregator, _random_uploads(count)):
                return
        except FczooError:  # too few uploads
            continue
        except Exception:  # it reads tensors of one method only, whose run reports any error
            return
        problem = "keeps state or draws random numbers, so a resumed run would differ"
        raise FczooError(f"aggregator {spec} {problem}; compute its result from the uploads only")


def repeats(aggregator: ServerAggregator, uploads: Sequence[Payload]) -> bool:
    """Return whether an aggregator merges equal uploads to equal trees after other merges."""
    others = [p.holding({k: _changed_copy(v) for k, v in p.items()}) for p in uploads]
    first = aggregator(list(uploads))
    for _ in range(MERGES // 2):
        aggregator(list(others))
        again = aggregator(list(uploads))
        if first.keys() != again.keys() or not all(_same(first[k], again[k]) for k in first):
            return False
    return True


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
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
