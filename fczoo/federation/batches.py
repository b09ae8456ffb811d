"""Clients, and the batches on which they train and are tested: every ``Batch`` of a run is made here."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from fczoo.core.method import Method
from fczoo.core.seeds import torch_stream
from fczoo.core.tree import Tree
from fczoo.core.types import Batch, Training
from fczoo.data.views import Augment, ImageStore

NOWHERE = torch.empty(0, dtype=torch.int64)  # positions of no image


def _none() -> Tensor:
    return NOWHERE


@dataclass(frozen=True)
class Client:
    """A client of one task: its number and where its images are in the training store."""

    number: int
    index: Tensor  # [n] positions
    before: Callable[[], Tensor] = _none  # gives ``earlier``, which few ask for, and never of all clients

    @property
    def earlier(self) -> Tensor:
        """Positions [m] of its images of earlier tasks; scope "task" only."""
        return self.before()


class Rows(NamedTuple):
    """Images of one client: positions in the store, and random draws of their training view."""

    positions: Tensor  # [n]
    draws: Tensor | None = None  # [n, DRAWS]; None: the test view
    own: Tensor | None = None  # [n, d] draws of the method; None: it has none here

    def part(self, start: int, stop: int) -> "Rows":
        """The rows from ``start`` up to ``stop``."""
        draws = None if self.draws is None else self.draws[start:stop]
        return Rows(self.positions[start:stop], draws, None if self.own is None else self.own[start:stop])


@dataclass
class Learner:
    """One client while it trains."""

    client: Client
    leaves: Tree  # what it trains
    start: Tree  # the same as the round began
    queue: list[Rows]  # its batches of the round
    counts: Tensor  # [C] images of each class among them
    taught: dict[int, Tensor] = field(default_factory=dict)  # position -> teacher's output of a fixed view
    sums: Tree = field(default_factory=dict)  # what ``loss`` and ``stats`` have summed up so far
    losses: list[Tensor] = field(default_factory=list)  # of its steps
    gradients: Tree = field(default_factory=dict)  # of the loss, summed up, where local training asks for it

    @property
    def trained(self) -> Tree:
        """What it has trained, without gradients."""
        return {name: leaf.detach() for name, leaf in self.leaves.items()}

    @property
    def finite(self) -> bool:
        """Whether all that it has trained is."""
        return all(bool(leaf.isfinite().all()) for leaf in self.leaves.values())


def stacked_batch(
    method: Method, store: ImageStore, rows: Sequence[Rows], augment: Augment, cache_queries: bool = False
) -> Batch:
    """One batch a client, stacked [k, B, ...] and padded to the longest; without draws in the test view."""
    width = max(len(r.positions) for r in rows)
    index = torch.stack([pad(r.positions, width) for r in rows])
    place = torch.arange(width, device=store.backbone.device)
    weight = torch.stack([(place < len(r.positions)).float() for r in rows])
    draws = None
    if not augment.fixed and rows[0].draws is not None:
        draws = torch.cat([pad(r.draws, width) for r in rows if r.draws is not None])
    x, query = _inputs(method, store, index.flatten(), augment, draws, cache_queries)
    y = store.labels[index.to(store.labels.device)]
    none = query.new_empty(*index.shape, 0)
    own = [pad(r.own, width) for r in rows if r.own is not None]
    return Batch(
        x.unflatten(0, index.shape),
        y,
        weight.to(query),
        query.unflatten(0, index.shape),
        none,
        none[:, 0],
        index.to(y.device),
        torch.stack(own).to(query) if own else none,
    )


def view_batches(method: Method, store: ImageStore, index: Tensor, size: int) -> Iterator[Batch]:
    """The test view of some images [n], in order, in batches of ``size``."""
    for part in index.split(size) if len(index) else ():
        yield Batch(*(v[0] for v in stacked_batch(method, store, [Rows(part)], Augment())))


def image_draws(training: Training, images: int, index: Tensor, *key: int | str) -> Tensor | None:
    """The method's draws [n, d] for the images at ``index`` [n] of a store of ``images``.

    The stream of ``key`` gives each image of the store its own, so that they do not depend on who holds it;
    only where draws lie evenly does their rank count, among the images asked for.
    """
    if not training.draws:
        return None
    own = torch.rand(images, training.draws, generator=torch_stream(*key))[index.cpu()]
    return (own.argsort(0).argsort(0) + 0.5) / len(own) if training.even_draws else own


def pad(rows: Tensor, width: int) -> Tensor:
    """Rows [n, ...] as [width, ...], filled up with the first."""
    return torch.cat([rows, rows[:1].expand(width - len(rows), *rows.shape[1:])])


def _inputs(
    method: Method,
    store: ImageStore,
    index: Tensor,
    augment: Augment,
    draws: Tensor | None,
    cache_queries: bool,
) -> tuple[Tensor, Tensor]:
    """Images and query features that ``method`` asks for, flat over clients; what it does not: [B, 0]."""
    wanted = method.training().inputs
    state_dtype = torch.promote_types(store.backbone.dtype, torch.float32)
    from_cache = "query" in wanted and (draws is None or cache_queries)
    x = query = torch.empty(len(index), 0, dtype=state_dtype, device=store.backbone.device)
    if "images" in wanted or ("query" in wanted and not from_cache):
        x = store.view(index) if draws is None else store.augmented(index, augment, draws)
    if from_cache:
        query = store.query(index)
    elif "query" in wanted:
        with torch.no_grad():
            query = store.backbone(x)
    return (x if "images" in wanted else x.new_empty(len(index), 0)), query
