"""Aggregators that a few hostile clients cannot lead astray. They stand in for a method's averaging (``--aggregator``).

A client's word is not taken for its number of samples: all clients count the same. What a method merges otherwise, such
as prototypes and Gaussians side by side, stays as it is; ``fczoo.outliers`` sees to that.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fczoo.core.errors import FczooError
from fczoo.core.options import check_options, option
from fczoo.core.payload import ENVELOPE
from fczoo.core.registry import register_aggregator
from fczoo.core.tree import Tree, drop


@register_aggregator("median")
def median(payloads: Sequence[Tree]) -> Tree:
    """Median of every coordinate; right while more than half of the clients are (Yin et al., ICML 2018)."""
    return _by_coordinate(payloads, lambda rows: _trimmed(rows, (len(rows) - 1) // 2))


@register_aggregator("trimmed_mean")
@dataclass(frozen=True)
class TrimmedMean:
    """Mean of every coordinate without its largest and smallest values (Yin et al., ICML 2018)."""

    trim: int = option(1, "values K left out at either end; bears K hostile clients", low=0)

    def __post_init__(self) -> None:
        check_options(self)

    def __call__(self, payloads: Sequence[Tree]) -> Tree:
        _need(payloads, 2 * self.trim + 1, f"trimmed_mean:{self.trim}")
        return _by_coordinate(payloads, lambda rows: _trimmed(rows, self.trim))


@register_aggregator("krum")
@dataclass(frozen=True)
class Krum:
    """The one upload that is closest to its neighbours (Blanchard et al., NeurIPS 2017).

    An upload's score is the sum of squared distances to the K - f - 2 nearest others of K clients.
    """

    hostile: int = option(1, "hostile clients f to bear; proven for K >= 2f + 3", low=0)

    def __post_init__(self) -> None:
        check_options(self)

    def __call__(self, payloads: Sequence[Tree]) -> Tree:
        return drop(_by_score(payloads, self.hostile, "krum")[0], *ENVELOPE)


@register_aggregator("multi_krum")
@dataclass(frozen=True)
class MultiKrum:
    """Mean of the K - f uploads with the best scores of Krum (Blanchard et al., NeurIPS 2017)."""

    hostile: int = option(1, "hostile clients f to bear; proven for K >= 2f + 3", low=0)

    def __post_init__(self) -> None:
        check_options(self)

    def __call__(self, payloads: Sequence[Tree]) -> Tree:
        best = _by_score(payloads, self.hostile, "multi_krum")[: len(payloads) - self.hostile]
        return _by_coordinate(best, lambda rows: rows.mean(0))


@register_aggregator("norm_clip")
@dataclass(frozen=True)
class NormClip:
    """Mean after every upload is drawn towards the coordinate-wise median, to a distance of at most factor x the median distance.

    Centred clipping (Karimireddy et al., ICML 2021) with the median as centre, since an aggregator does not see what was sent.
    """

    factor: float = option(1.0, "largest distance, median distances", low=0)

    def __post_init__(self) -> None:
        check_options(self)

    def __call__(self, payloads: Sequence[Tree]) -> Tree:
        centre = median(payloads)
        distance = torch.stack(
            [sum((_gap(p[k], centre[k]) for k in centre), torch.zeros(())).sqrt() for p in _ordered(payloads)]
        )
        limit = self.factor * distance.sort().values[(len(distance) - 1) // 2]
        share = torch.where(distance > limit, limit / distance, 1.0)

        def drawn(rows: Tensor) -> Tensor:
            middle = _trimmed(rows, (len(rows) - 1) // 2)
            return middle + (share.to(rows).view(-1, *[1] * middle.dim()) * (rows - middle)).mean(0)

        return _by_coordinate(payloads, drawn)


def _by_coordinate(payloads: Sequence[Tree], merge: Callable[[Tensor], Tensor]) -> Tree:
    """``merge`` of every tensor, stacked [K, ...] over the clients in float64, in the tensor's own type."""
    ordered = _ordered(payloads)
    return {
        k: merge(torch.stack([p[k].double() for p in ordered])).to(v.dtype)
        for k, v in drop(ordered[0], *ENVELOPE).items()
    }


def _ordered(payloads: Sequence[Tree]) -> list[Tree]:
    """By client, so that not even a sum's last bit depends on who was first."""
    return sorted(payloads, key=lambda p: int(p["client"]))


def _trimmed(rows: Tensor, trim: int) -> Tensor:
    return rows.sort(0).values[trim : len(rows) - trim].mean(0)


def _gap(a: Tensor, b: Tensor) -> Tensor:
    return (a.double() - b.double()).square().sum().cpu()


def _by_score(payloads: Sequence[Tree], hostile: int, name: str) -> list[Tree]:
    """Uploads by Krum's score, best first."""
    _need(payloads, hostile + 3, f"{name}:{hostile}")
    ordered, count = _ordered(payloads), len(payloads)
    distance = torch.zeros(count, count, dtype=torch.float64)
    for name in drop(ordered[0], *ENVELOPE):
        rows = torch.stack([p[name].double().flatten() for p in ordered])
        distance += torch.stack([(rows - row).square().sum(1) for row in rows]).cpu()
    nearest = distance.sort(1).values[:, 1 : count - hostile - 1]  # without itself
    return [ordered[i] for i in nearest.sum(1).argsort(stable=True)]


def _need(payloads: Sequence[Tree], count: int, name: str) -> None:
    if len(payloads) < count:
        raise FczooError(
            f"{name} needs {count} uploads, this round has {len(payloads)}; bear fewer hostile clients or let more take part"
        )
