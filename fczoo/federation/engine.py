"""Client training: one code path, whether clients train one after another or share a batched forward.

Clients are independent, so ``torch.vmap`` of the loss over stacked clients, followed by one ordinary backward of the
summed loss, gives each client exactly its own gradient. Every client's tensors are leaves of their own, so a client
that has run out of batches gets no gradient and its optimizer state stands still.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.method import Method, overrides
from fczoo.core.seeds import torch_stream
from fczoo.core.tree import Tree, select
from fczoo.core.types import Batch, Context, Moment
from fczoo.data.views import DRAWS, Augment, ImageStore
from fczoo.federation.batches import Client, make_inputs, pad
from fczoo.federation.optimizers import Optimizers

_LOSS = "loss of the step"  # a name that no method gives to a sum


@dataclass(frozen=True)
class Plan:
    """How clients train."""

    epochs: int
    batch_size: int
    augment: Augment
    seed: int
    together: int = 1  # clients that share one forward
    cache_queries: bool = False  # query features of the test view, also where training views are random
    pass_size: int = 64  # batch of passes without training
    offload: bool = (
        False  # payloads wait for the server in host memory, so that the device holds one client at a time
    )


@dataclass(frozen=True)
class Engine:
    """Runs a method's client functions on the images of a training store, during one task."""

    method: Method
    backbone: Backbone
    store: ImageStore
    plan: Plan
    memories: dict[int, Tree] = field(default_factory=dict)  # client -> what it keeps from round to round
    taught: dict[int, Tensor] = field(
        default_factory=dict
    )  # position -> the teacher's output, where the view is fixed

    def train(
        self,
        state: Tree,
        clients: Sequence[Client],
        ctx: Context,
        tick: Callable[[int, float], None] = lambda client, loss: None,
    ) -> list[Tree]:
        """Payloads of ``clients``, in their order. ``tick`` gets each client's number and mean loss as its training ends.

        A client whose loss or weights are not finite any more has nothing to say: its payload is empty.
        """
        ordered = sorted(
            range(len(clients)), key=lambda i: -len(clients[i].index)
        )  # similar lengths share a group
        payloads: dict[int, Tree] = {}
        together = 1 if self._remembers() else self.plan.together
        for start in range(0, len(ordered), together):
            group = ordered[start : start + together]
            trained = self._train_group(state, [clients[i] for i in group], ctx, tick)
            payloads |= zip(
                group, [_to_host(p) for p in trained] if self.plan.offload else trained, strict=True
            )
        return [payloads[i] for i in range(len(clients))]

    def survey(self, moment: Moment, state: Tree, clients: Sequence[Client], ctx: Context) -> list[Tree]:
        """Sums of the method's survey over one pass of each client's data."""
        out = []
        for client in clients:
            sums = self._pass(
                lambda _, batch: self.method.survey(moment, self.backbone, state, batch, ctx.task),
                [{}],
                [(client.index, None)],
            )[0]
            out.append({**sums, **_envelope(client)})
        return out

    def _train_group(
        self, state: Tree, clients: list[Client], ctx: Context, tick: Callable[[int, float], None]
    ) -> list[Tree]:
        optims = self.method.optims()
        start = select(state, *optims)
        learned = [client.index for client in clients]
        if self._remembers():
            data = LocalImages(self, clients[0].index)
            ctx, learned = self._recall(clients[0], data, ctx)
        leaves = [{k: v.detach().clone().requires_grad_() for k, v in start.items()} for _ in clients]
        optimizers = Optimizers(optims, leaves, ctx)
        counts = torch.stack(
            [
                torch.bincount(self.store.labels[i.to(self.store.labels.device)], minlength=ctx.task.classes)
                for i in learned
            ]
        )
        queues = [
            list(self._epochs(client.number, index, ctx))
            for client, index in zip(clients, learned, strict=True)
        ]  # longest first
        sums: list[Tree] = [{} for _ in clients]

        def loss(train: Tree, batch: Batch) -> Tree:
            value, extra = self.method.loss(self.backbone, train, batch, ctx)
            return {**extra, _LOSS: value}

        for step in range(len(queues[0])):
            rows = [queue[step] for queue in queues if step < len(queue)]
            active = range(len(rows))
            batch = self._with_teacher(self._batch(rows), rows, ctx)._replace(n=counts[: len(rows)])
            out = _over_clients(loss, [leaves[i] for i in active], batch)
            out[_LOSS].sum().backward()
            optimizers.step([step / len(queues[i]) for i in active], self.method.clip_norm())
            _accumulate(sums, out)

        payloads: list[Tree] = [{} for _ in clients]
        sound = []
        for i, client in enumerate(clients):
            mean = float(sums[i].pop(_LOSS)) / len(queues[i])
            tick(client.number, mean)
            if math.isfinite(mean) and all(v.isfinite().all() for v in leaves[i].values()):
                sound.append(i)
        if not sound:
            return payloads
        clients, sums, trained = (
            [clients[i] for i in sound],
            [sums[i] for i in sound],
            [{k: v.detach() for k, v in leaves[i].items()} for i in sound],
        )
        if overrides(self.method, "stats"):
            ordered = [self._ordered(client, ctx) for client in clients]
            after = self._pass(
                lambda train, batch: self.method.stats(self.backbone, train, batch, ctx), trained, ordered
            )
            sums = [{**a, **b} for a, b in zip(sums, after, strict=True)]
        extra = self.method.finish(self.backbone, trained[0], data, ctx) if self._remembers() else {}
        for i, client, train, own in zip(sound, clients, trained, sums, strict=True):
            payloads[i] = {**self.method.pack(train, own, ctx), **extra, **_envelope(client)}
        return payloads

    def _remembers(self) -> bool:
        return overrides(self.method, "prepare") or overrides(self.method, "finish")

    def _recall(self, client: Client, data: "LocalImages", ctx: Context) -> tuple[Context, list[Tensor]]:
        """The context with the client's memory, brought up to date, and the images that it trains on."""
        with torch.no_grad():
            memory = self.method.prepare(
                self.backbone, data, replace(ctx, memory=self.memories.get(client.number, {}))
            )
        self.memories[client.number] = memory
        return replace(ctx, memory=memory), [
            torch.cat([client.index, memory["exemplar.index"]])
            if "exemplar.index" in memory
            else client.index
        ]

    @torch.no_grad()
    def _with_teacher(
        self, batch: Batch, rows: Sequence[tuple[Tensor, Tensor | None]], ctx: Context
    ) -> Batch:
        """The batch with the outputs of the method's teacher, if it has one; all clients share the teacher."""
        if not overrides(self.method, "teach"):
            return batch
        flat, places = (
            Batch(*(v.flatten(0, 1) for v in batch)),
            [pad(positions, batch.w.shape[1]) for positions, _ in rows],
        )
        index = torch.cat(places).tolist()
        if self.plan.augment.fixed and all(i in self.taught for i in index):
            return batch._replace(t=torch.stack([self.taught[i] for i in index]).unflatten(0, batch.w.shape))
        outputs = self.method.teach(self.backbone, ctx.shared, flat, ctx.task)
        if self.plan.augment.fixed:
            self.taught.update(zip(index, outputs, strict=True))
        return batch._replace(t=outputs.unflatten(0, batch.w.shape))

    @torch.no_grad()
    def _pass(
        self,
        fn: Callable[[Tree, Batch], Tree],
        trees: list[Tree],
        rows: Sequence[tuple[Tensor, Tensor | None]],
    ) -> list[Tree]:
        """Sums of ``fn`` over every client's images, in order; ``rows`` are positions and augmentation draws a client."""
        sums: list[Tree] = [{} for _ in rows]
        size = self.plan.pass_size
        for start in range(0, len(rows[0][0]), size):
            active = [
                (i[start : start + size], d if d is None else d[start : start + size])
                for i, d in rows
                if start < len(i)
            ]
            _accumulate(sums, _over_clients(fn, trees[: len(active)], self._batch(active)))
        return sums

    def _ordered(self, client: Client, ctx: Context) -> tuple[Tensor, Tensor | None]:
        if self.method.stats_view() == "test":
            return client.index, None
        rng = torch_stream("stats", self.plan.seed, ctx.task.index, ctx.round, client.number)
        return client.index, torch.rand(len(client.index), DRAWS, generator=rng)

    def _epochs(self, client: int, index: Tensor, ctx: Context) -> Iterator[tuple[Tensor, Tensor]]:
        """(positions, augmentation draws) of every step of a round; they depend on the client, not on the schedule."""
        for epoch in range(self.plan.epochs):
            rng = torch_stream("client", self.plan.seed, ctx.task.index, ctx.round, client, epoch)
            order = torch.randperm(len(index), generator=rng)
            draws = torch.rand(len(order), DRAWS, generator=rng)
            yield from zip(
                index[order].split(self.plan.batch_size), draws.split(self.plan.batch_size), strict=True
            )

    def _batch(self, rows: Sequence[tuple[Tensor, Tensor | None]]) -> Batch:
        """One batch a client, stacked [k, B, ...] and padded to the longest; without draws in the test view."""
        width = max(len(positions) for positions, _ in rows)
        index = torch.stack([pad(positions, width) for positions, _ in rows])
        weight = torch.stack([(torch.arange(width) < len(positions)).float() for positions, _ in rows])
        draws = None
        if not self.plan.augment.fixed and rows[0][1] is not None:
            draws = torch.cat([pad(d, width) for _, d in rows if d is not None])
        x, q = make_inputs(
            self.method, self.store, index.flatten(), self.plan.augment, draws, self.plan.cache_queries
        )
        y = self.store.labels[index.to(self.store.labels.device)]
        none = q.new_empty(*index.shape, 0)
        return Batch(
            x.unflatten(0, index.shape), y, weight.to(q), q.unflatten(0, index.shape), none, none[:, 0]
        )


@dataclass(frozen=True)
class LocalImages:
    """What ``Method.prepare`` and ``Method.finish`` see of a client's images."""

    engine: Engine
    index: Tensor  # [n] positions of the images of the current task

    def labels(self, index: Tensor) -> Tensor:
        """Labels [n] in order of arrival."""
        return self.engine.store.labels[index.to(self.engine.store.labels.device)]

    def batches(self, index: Tensor) -> Iterator[Batch]:
        """The test view of some images, in order."""
        for part in index.split(self.engine.plan.pass_size):
            yield Batch(*(v[0] for v in self.engine._batch([(part, None)])))


def _over_clients(fn: Callable[[Tree, Batch], Tree], trees: list[Tree], batch: Batch) -> Tree:
    """``fn`` on every client's tree and batch; results are stacked [k, ...]."""
    if len(trees) == 1:
        return {k: v[None] for k, v in fn(trees[0], Batch(*(v[0] for v in batch))).items()}
    stacked = {k: torch.stack([tree[k] for tree in trees]) for k in trees[0]}
    return torch.vmap(fn)(stacked, batch)


def _accumulate(sums: list[Tree], new: Tree) -> None:
    for name, values in new.items():
        for tree, value in zip(sums, values.detach(), strict=False):  # finished clients add nothing
            tree[name] = tree[name] + value if name in tree else value


def _to_host(tree: Tree) -> Tree:
    return {k: v.cpu() for k, v in tree.items()}


def _envelope(client: Client) -> Tree:
    return {"num_samples": torch.tensor(len(client.index)), "client": torch.tensor(client.number)}
