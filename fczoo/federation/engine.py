"""Client training: one code path, whether clients train one after another or share a batched forward.

Clients are independent, so ``torch.vmap`` of the loss over stacked clients, followed by one ordinary
backward of the summed loss, gives each client exactly its own gradient. Every client's tensors are leaves
of their own, so a client that has run out of batches gets no gradient and its optimizer state stands still.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.method import Concludes, Distils, Method, Remembers, Surveys
from fczoo.core.payload import Payload
from fczoo.core.place import at
from fczoo.core.seeds import torch_stream
from fczoo.core.tree import Tree, select
from fczoo.core.types import Batch, Context, Moment, Optim
from fczoo.data.views import DRAWS, Augment, ImageStore
from fczoo.federation.batches import (
    NOWHERE,
    Client,
    Learner,
    Rows,
    image_draws,
    pad,
    stacked_batch,
)
from fczoo.federation.controls import Controls
from fczoo.federation.local_images import LocalImages
from fczoo.federation.optimizers import Optimizers, Steps
from fczoo.federation.stacking import accumulate, over_clients

_LOSS = "loss of the step"  # a name that no method gives to a sum

Tick = Callable[[int, float, list[Tensor]], None]
"""Is told a client's number, its mean loss and those of its steps when its training ends."""


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
    offload: bool = False  # payloads wait in host memory, so that the device holds one client at a time


@dataclass(frozen=True)
class Engine:
    """Runs a method's client functions on the images of a training store, during one task."""

    method: Method
    backbone: Backbone
    store: ImageStore
    plan: Plan
    memories: dict[int, Tree] = field(default_factory=dict)  # client -> what it keeps from round to round
    taught: dict[int, Tensor] = field(default_factory=dict)  # position -> teacher's output of a fixed view
    controls: Controls = field(default_factory=Controls)  # of the rule of local training, if any
    make_steps: Callable[[Mapping[str, Optim], list[Tree], Context], Steps] = Optimizers

    def train(
        self, state: Tree, clients: Sequence[Client], ctx: Context, tick: Tick = lambda *_: None
    ) -> list[Payload]:
        """Payloads of ``clients``, in their order.

        A client whose loss or weights are not finite any more sends nothing: its payload is empty.
        """
        # similar lengths share a group
        by_length = sorted(range(len(clients)), key=lambda i: -len(self._learned(clients[i], ctx)))
        payloads: dict[int, Payload] = {}
        together = 1 if isinstance(self.method, Remembers) else self.plan.together
        for start in range(0, len(by_length), together):
            group = by_length[start : start + together]
            sent = self._train_group(state, [clients[i] for i in group], ctx, tick)
            if self.plan.offload:
                sent = [p.holding({k: v.cpu() for k, v in p.items()}) for p in sent]
            payloads |= zip(group, sent, strict=True)
        return [payloads[i] for i in range(len(clients))]

    def survey(
        self, moment: Moment, state: Tree, clients: Sequence[Client], ctx: Context
    ) -> Iterator[Payload]:
        """Sums of the method's survey over one pass of each client's data, made when they are asked for."""
        method = self.method
        assert isinstance(method, Surveys)

        def sums(_: Tree, batch: Batch) -> Tree:
            return method.survey(moment, self.backbone, state, batch, ctx.task)

        key = f"survey {moment}", self.plan.seed, ctx.task.index
        for client in clients:
            own = image_draws(method.training(), len(self.store.labels), client.index, *key)
            rows = [Rows(client.index, own=own)]
            yield Payload(self._pass(sums, [{}], rows)[0], client.number, len(client.index))

    @torch.no_grad()
    def survey_form(self, moment: Moment, state: Tree, client: Client, ctx: Context) -> Payload:
        """What uploads of a survey look like, from one image that counts for nothing."""
        method = self.method
        assert isinstance(method, Surveys)
        own = torch.zeros(1, method.training().draws) if method.training().draws else None
        stacked = self._batch([Rows(client.index[:1], own=own)])
        batch = Batch(*(v[0] for v in stacked))._replace(w=torch.zeros_like(stacked.w[0]))
        return Payload(method.survey(moment, self.backbone, state, batch, ctx.task), client.number)

    def conclude(self, clients: Sequence[Client], ctx: Context) -> list[Payload]:
        """Uploads of clients that settle what they keep of a task, empty where one sends nothing.

        Behind an upload are the images of the task and the exemplars.
        """
        method = self.method
        assert isinstance(method, Concludes)
        out = []
        for client in clients:
            known = replace(ctx, memory=self.memories.get(client.number, {}))
            with torch.no_grad(), at(f"task {ctx.task.index + 1}, client {client.number}"):
                settled = method.conclude(self.backbone, self.images_of(client), known)
            self.memories[client.number], upload = _pair(settled, f"{method.name}.conclude()")
            out.append(Payload(upload, client.number, len(self.with_exemplars(client).index)))
        return out

    def images_of(self, client: Client) -> LocalImages:
        """What a method sees of a client's images besides batches."""
        return LocalImages(self.method, self.store, client.index, client.earlier, self.plan.pass_size)

    def exemplars(self, client: Client) -> Tensor:
        """Positions of the images that a client keeps of finished tasks."""
        memory = self.memories.get(client.number, {})
        return memory.get(self.method.training().exemplars, NOWHERE)

    def with_exemplars(self, client: Client) -> Client:
        """The client with its images of the task and its exemplars, each once."""
        return replace(client, index=torch.cat([client.index, self.exemplars(client)]).unique())

    def _train_group(self, state: Tree, clients: list[Client], ctx: Context, tick: Tick) -> list[Payload]:
        """Payloads of clients that train in one batched forward; longest first."""
        data = self.images_of(clients[0])
        if isinstance(self.method, Remembers):
            ctx = self._recall(self.method, clients[0], data, ctx)
        learned = [self._learned(client, ctx) for client in clients]
        learners = [self._learner(state, *of, ctx) for of in zip(clients, learned, strict=True)]
        self._steps(learners, ctx)
        sound = [learner for learner in learners if self._finite(learner, tick)]
        self._stats(sound, ctx)
        payloads = {client.number: Payload({}, client.number, len(client.index)) for client in clients}
        for learner in sound:
            upload = {**self.method.pack(learner.trained, learner.sums, ctx)}
            if isinstance(self.method, Remembers):
                upload |= self._finish(self.method, learner, data, ctx)
            upload |= self.controls.renew(learner)
            payloads[learner.client.number] = payloads[learner.client.number].holding(upload)
        return list(payloads.values())

    def _learned(self, client: Client, ctx: Context) -> Tensor:
        """Positions of the images on which a client trains in a round."""
        if ctx.balanced:
            return client.index  # exemplars alone
        kept, trains_on = self.exemplars(client), self.method.training().trains_on
        if trains_on is None:
            return torch.cat([client.index, kept])
        return trains_on(self.images_of(client), kept)

    def _recall(self, method: Remembers, client: Client, data: LocalImages, ctx: Context) -> Context:
        """The context with the client's memory, brought up to date."""
        place = f"task {ctx.task.index + 1}, client {client.number}"
        with torch.no_grad(), at(place):
            memory = method.prepare(
                self.backbone, data, replace(ctx, memory=self.memories.get(client.number, {}))
            )
        self.memories[client.number] = memory
        return replace(ctx, memory=memory)

    def _finish(self, method: Remembers, learner: Learner, data: LocalImages, ctx: Context) -> Tree:
        """What a client uploads besides ``pack``; its memory is as it is after training."""
        number = learner.client.number
        with at(f"task {ctx.task.index + 1}, client {number}"):
            done = method.finish(self.backbone, learner.trained, learner.sums, data, ctx)
            self.memories[number], upload = _pair(done, f"{self.method.name}.finish()")
        return upload

    def _learner(self, state: Tree, client: Client, index: Tensor, ctx: Context) -> Learner:
        start = select(state, *self._optims(ctx))
        leaves = {k: v.detach().clone().requires_grad_() for k, v in start.items()}
        labels = self.store.labels[index.to(self.store.labels.device)]
        counts = torch.bincount(labels, minlength=ctx.task.classes)
        return Learner(client, leaves, start, list(self._epochs(client.number, index, ctx)), counts)

    def _optims(self, ctx: Context) -> Mapping[str, Optim]:
        return self.method.training().active_optims(ctx.task, ctx.round, ctx.balanced)

    def _steps(self, learners: Sequence[Learner], ctx: Context) -> None:
        """All steps of a round: one batched forward, one backward, one optimizer step each."""
        training = self.method.training()
        optimizers = self.make_steps(self._optims(ctx), [learner.leaves for learner in learners], ctx)
        counts = torch.stack([learner.counts for learner in learners])

        def loss(train: Tree, batch: Batch) -> Tree:
            value, extra = self.method.loss(self.backbone, train, batch, ctx)
            return {**extra, _LOSS: value}

        for step in range(len(learners[0].queue)):
            active = [learner for learner in learners if step < len(learner.queue)]
            rows = [learner.queue[step] for learner in active]
            batch = self._with_teacher(self._batch(rows), rows, ctx)._replace(class_count=counts[: len(rows)])
            out = over_clients(loss, [learner.leaves for learner in active], batch)
            out[_LOSS].sum().backward()
            for learner, of_step in zip(active, out[_LOSS].detach(), strict=True):
                learner.losses.append(of_step)
            for learner in active:
                self.controls.correct(learner)
            optimizers.step([step / len(learner.queue) for learner in active], training.clip_norm)
            accumulate([learner.sums for learner in learners], out)

    def _finite(self, learner: Learner, tick: Tick) -> bool:
        """Whether a client's training has gone well; tells its mean loss."""
        mean = float(learner.sums.pop(_LOSS)) / len(learner.queue)
        tick(learner.client.number, mean, learner.losses)
        return math.isfinite(mean) and all(bool(v.isfinite().all()) for v in learner.leaves.values())

    def _stats(self, learners: Sequence[Learner], ctx: Context) -> None:
        """The pass after training, if the method asks for one."""
        view = self.method.training().stats
        if view == "none" or not learners:
            return
        rows = []
        for learner in learners:
            index = learner.client.index
            key = ("stats", self.plan.seed, ctx.task.index, ctx.round, learner.client.number)
            drawn = torch.rand(len(index), DRAWS, generator=torch_stream(*key)) if view == "train" else None
            own = image_draws(self.method.training(), len(self.store.labels), index, *key, "own")
            rows.append(Rows(index, drawn, own))

        def sums(train: Tree, batch: Batch) -> Tree:
            return self.method.stats(self.backbone, train, batch, ctx)

        after = self._pass(sums, [learner.trained for learner in learners], rows)
        for learner, found in zip(learners, after, strict=True):
            learner.sums |= found

    @torch.no_grad()
    def _with_teacher(self, batch: Batch, rows: Sequence[Rows], ctx: Context) -> Batch:
        """The batch with the outputs of the method's teacher, if any; all clients share the teacher."""
        if not isinstance(self.method, Distils):
            return batch
        index: list[int] = []
        if self.plan.augment.fixed:
            index = torch.cat([pad(r.positions, batch.w.shape[1]) for r in rows]).tolist()
            if all(i in self.taught for i in index):
                outputs = torch.stack([self.taught[i] for i in index])
                return batch._replace(teacher=outputs.unflatten(0, batch.w.shape))
        flat = Batch(*(v.flatten(0, 1) for v in batch))
        outputs = self.method.teach(self.backbone, ctx.shared, flat, ctx.task)
        self.taught.update(zip(index, outputs, strict=False))  # where the view is fixed
        return batch._replace(teacher=outputs.unflatten(0, batch.w.shape))

    @torch.no_grad()
    def _pass(self, fn: Callable[[Tree, Batch], Tree], trees: list[Tree], rows: Sequence[Rows]) -> list[Tree]:
        """Sums of ``fn`` over every client's images, in order; longest first."""
        sums: list[Tree] = [{} for _ in rows]
        size = self.plan.pass_size
        for start in range(0, len(rows[0].positions), size):
            active = [r.part(start, start + size) for r in rows if start < len(r.positions)]
            accumulate(sums, over_clients(fn, trees[: len(active)], self._batch(active)))
        return sums

    def _epochs(self, client: int, index: Tensor, ctx: Context) -> Iterator[Rows]:
        """The images of every step of a round; they depend on the client, not on the schedule.

        They are on the device from the start: a copy a step would make the host wait for the device.
        """
        size, own_draws = self.plan.batch_size, self.method.training().draws
        for epoch in range(self.plan.epochs):
            rng = torch_stream("client", self.plan.seed, ctx.task.index, ctx.round, client, epoch)
            order = torch.randperm(len(index), generator=rng)
            draws = torch.rand(len(order), DRAWS, generator=rng).to(self.backbone.device)
            own = torch.rand(len(order), own_draws, generator=rng).to(draws.device) if own_draws else None
            rows = Rows(index[order].to(self.store.pixels.device), draws, own)
            for start in range(0, len(order), size):
                yield rows.part(start, start + size)

    def _batch(self, rows: Sequence[Rows]) -> Batch:
        return stacked_batch(self.method, self.store, rows, self.plan.augment, self.plan.cache_queries)


def _pair(returned: Any, function: str) -> tuple[Tree, Tree]:
    """What a function of a method returns as (memory, upload). Raises TypeError where it is no pair."""
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise TypeError(f"{function} must return two trees: what the client remembers, and what it uploads")
    memory, upload = returned
    return memory, upload
