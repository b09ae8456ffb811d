"""Clients, and the batches on which they train and are tested.

Every ``Batch`` of a run is created here.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from fczoo.core.method import Method
from fczoo.core.seeds import torch_stream
from fczoo.core.training import Training
from fczoo.core.tree import Tree
from fczoo.core.types import Batch
from fczoo.data.views import Augment, ImageStore

NO_POSITIONS = torch.empty(0, dtype=torch.int64)  # positions of no image


def _no_positions() -> Tensor:
    return NO_POSITIONS


@dataclass(frozen=True)
class Client:
    """A client of one task: its number and where its images are in the training store."""

    number: int
    index: Tensor  # [n] positions
    # computes ``earlier`` on demand, since few methods read it
    find_earlier: Callable[[], Tensor] = _no_positions

    @property
    def earlier(self) -> Tensor:
        """Return positions [m] of the client's images of earlier tasks; scope "task" only."""
        return self.find_earlier()


class Rows(NamedTuple):
    """Images of one client: positions in the store, and random draws of their training view."""

    positions: Tensor  # [n]
    draws: Tensor | None = None  # [n, augment.draws]; None: the test view
    method_draws: Tensor | None = None  # [n, d] draws of the method; None: it has none here
    client: int = -1  # number of the client; -1: test images
    epoch: int = 0  # local epoch of the round

    def part(self, start: int, stop: int) -> "Rows":
        """Return the rows from ``start`` up to ``stop``."""
        draws = None if self.draws is None else self.draws[start:stop]
        return Rows(
            self.positions[start:stop],
            draws,
            None if self.method_draws is None else self.method_draws[start:stop],
            self.client,
            self.epoch,
        )


@dataclass
class LocalTrainState:
    """State of one client during its training in a round."""

    client: Client
    leaves: Tree  # what it trains
    start: Tree  # the same as the round began
    queue: list[Rows]  # its batches of the round
    counts: Tensor  # [C] images of each class among them
    teacher_outputs: dict[int, Tensor] = field(
        default_factory=dict
    )  # position -> teacher's output of a fixed view
    sums: Tree = field(default_factory=dict)  # what ``loss`` and ``collect`` have summed up so far
    losses: list[Tensor] = field(default_factory=list)  # of its steps
    gradients: Tree = field(
        default_factory=dict
    )  # of the loss, summed up, where local training asks for it

    @property
    def trained_tensors(self) -> Tree:
        """Return the trained tensors without gradients."""
        return {name: leaf.detach() for name, leaf in self.leaves.items()}

    @property
    def finite(self) -> bool:
        """Return whether all trained tensors are finite."""
        return all(bool(leaf.isfinite().all()) for leaf in self.leaves.values())


def stack_batch(
    method: Method,
    store: ImageStore,
    rows: Sequence[Rows],
    augment: Augment,
    cache_queries: bool = False,
) -> Batch:
    """Stack one batch per client to [k, B, ...], padded to the longest.

    The test view has no draws.
    """
    width = max(len(r.positions) for r in rows)
    index = torch.stack([pad(r.positions, width) for r in rows])
    column = torch.arange(width, device=store.backbone.device)
    weight = torch.stack([(column < len(r.positions)).float() for r in rows])
    draws = None
    if not augment.is_fixed and rows[0].draws is not None:
        draws = torch.cat([pad(r.draws, width) for r in rows if r.draws is not None])
    x, query = _inputs(method, store, index.flatten(), augment, draws, cache_queries)
    y = store.labels[index.to(store.labels.device)]
    none = query.new_empty(*index.shape, 0)
    method_draws = [pad(r.method_draws, width) for r in rows if r.method_draws is not None]
    return Batch(
        x.unflatten(0, index.shape),
        y,
        weight.to(query),
        query.unflatten(0, index.shape),
        none,
        none[:, 0],
        index.to(y.device),
        torch.stack(method_draws).to(query) if method_draws else none,
        torch.stack([column.new_full((width,), r.epoch) for r in rows]),
        torch.stack([column.new_full((width,), r.client) for r in rows]),
    )


def view_batches(method: Method, store: ImageStore, index: Tensor, size: int) -> Iterator[Batch]:
    """Yield the test view of some images [n], in order, in batches of ``size``."""
    for part in index.split(size) if len(index) else ():
        yield Batch(*(v[0] for v in stack_batch(method, store, [Rows(part)], Augment())))


def image_draws(training: Training, images: int, index: Tensor, *key: int | str) -> Tensor | None:
    """Return the method's draws [n, d] for images ``index`` [n] of a store of ``images``.

    The stream of ``key`` gives draws to every image of the store, so that they do not depend on the
    client. ``stratified_draws`` replaces them by their ranks among the images of ``index``.
    """
    if not training.draws:
        return None
    draws = torch.rand(images, training.draws, generator=torch_stream(*key))[index.cpu()]
    return (draws.argsort(0).argsort(0) + 0.5) / len(draws) if training.stratified_draws else draws


def pad(rows: Tensor, width: int) -> Tensor:
    """Pad rows [n, ...] with the first row to [width, ...]."""
    return torch.cat([rows, rows[:1].expand(width - len(rows), *rows.shape[1:])])


def _inputs(
    method: Method,
    store: ImageStore,
    index: Tensor,
    augment: Augment,
    draws: Tensor | None,
    cache_queries: bool,
) -> tuple[Tensor, Tensor]:
    """Return images and query features that ``method`` needs, flat over clients; else [B, 0]."""
    inputs = method.training().inputs
    state_dtype = torch.promote_types(store.backbone.dtype, torch.float32)
    from_cache = "query" in inputs and (draws is None or cache_queries)
    x = query = torch.empty(len(index), 0, dtype=state_dtype, device=store.backbone.device)
    if "images" in inputs or ("query" in inputs and not from_cache):
        x = store.view(index) if draws is None else store.training_view(index, augment, draws)
    if from_cache:
        query = store.query(index)
    elif "query" in inputs:
        with torch.no_grad():
            query = store.backbone(x)
    return (x if "images" in inputs else x.new_empty(len(index), 0)), query


@dataclass(frozen=True)
class LocalImages:
    """A client's images as ``HasClientMemory`` and ``EndsTasks`` access them."""

    method: Method
    store: ImageStore
    index: Tensor  # [n] positions of the images of the current task
    earlier: Tensor = NO_POSITIONS  # [m] of earlier tasks
    pass_size: int = 64  # images of a batch

    def labels(self, index: Tensor) -> Tensor:
        """Return the labels [n] of some images in order of arrival."""
        return self.store.labels[index.to(self.store.labels.device)]

    def batches(self, index: Tensor) -> Iterator[Batch]:
        """Yield the test view of some images, in order."""
        return view_batches(self.method, self.store, index, self.pass_size)
