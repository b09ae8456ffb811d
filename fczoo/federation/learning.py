"""How clients learn: every loop over batches.

One code path, whether clients train one after another or share a batched forward. Clients are independent, so
``torch.vmap`` of the loss over stacked clients, followed by one ordinary backward of the summed loss, gives
each client exactly its own gradient. Every client's tensors are leaves of their own, so a client that has run
out of batches gets no gradient and its optimizer state stands still.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.method import Distils, Method
from fczoo.core.seeds import torch_stream
from fczoo.core.tree import Tree, select
from fczoo.core.types import Batch, Context, Optim
from fczoo.data.views import DRAWS, ImageStore
from fczoo.federation.batches import NOWHERE, Client, Learner, Rows, image_draws, pad, stacked_batch
from fczoo.federation.controls import Controls
from fczoo.federation.device import flushed_denormals
from fczoo.federation.local_images import LocalImages
from fczoo.federation.local_training import LocalTraining
from fczoo.federation.optimizers import Optimizers, Steps
from fczoo.federation.plan import Plan
from fczoo.federation.stacking import accumulate, over_clients

LOSS = "loss of the step"  # a name that no method gives to a sum

MakeSteps = Callable[[Mapping[str, Optim], list[Tree], Context], Steps]


@dataclass(frozen=True)
class Learning:
    """Passes of a method's client functions over the images of a store. It remembers nothing itself."""

    method: Method
    backbone: Backbone
    store: ImageStore
    plan: Plan
    rule: LocalTraining
    make_steps: MakeSteps = Optimizers

    def images_of(self, client: Client) -> LocalImages:
        """What a method sees of a client's images besides batches."""
        return LocalImages(self.method, self.store, client.index, client.earlier, self.plan.pass_size)

    def exemplars(self, memory: Tree) -> Tensor:
        """Positions of the images that a client with this memory keeps of finished tasks."""
        return memory.get(self.method.training().exemplars, NOWHERE)

    def with_exemplars(self, client: Client, memory: Tree) -> Client:
        """The client with its images of the task and its exemplars, each once."""
        return replace(client, index=torch.cat([client.index, self.exemplars(memory)]).unique())

    def learned(self, client: Client, memory: Tree, ctx: Context) -> Tensor:
        """Positions of the images on which a client trains in a round."""
        if ctx.balanced:
            return client.index  # exemplars alone
        kept, trains_on = self.exemplars(memory), self.method.training().trains_on
        if trains_on is None:
            return torch.cat([client.index, kept])
        return trains_on(self.images_of(client), kept)

    def batch(self, rows: Sequence[Rows]) -> Batch:
        """The images of some clients, stacked [k, B, ...]."""
        return stacked_batch(self.method, self.store, rows, self.plan.augment, self.plan.cache_queries)

    def learner(
        self, state: Tree, client: Client, index: Tensor, taught: dict[int, Tensor], ctx: Context
    ) -> Learner:
        """A client as a round begins, which trains on the images at ``index``."""
        start = select(state, *self._optims(ctx))
        leaves = {k: v.detach().clone().requires_grad_() for k, v in start.items()}
        labels = self.store.labels[index.to(self.store.labels.device)]
        counts = torch.bincount(labels, minlength=ctx.task.classes)
        return Learner(client, leaves, start, list(self._epochs(client.number, index, ctx)), counts, taught)

    def _optims(self, ctx: Context) -> Mapping[str, Optim]:
        return self.method.training().active_optims(ctx.task, ctx.round, ctx.balanced)

    @flushed_denormals()
    def steps(self, learners: Sequence[Learner], controls: Controls, ctx: Context) -> None:
        """All steps of a round: one batched forward, one backward, one optimizer step each."""
        training = self.method.training()
        optimizers = self.make_steps(self._optims(ctx), [learner.leaves for learner in learners], ctx)
        counts = torch.stack([learner.counts for learner in learners])

        def loss(train: Tree, batch: Batch) -> Tree:
            value, extra = loss_and_sums(self.method.loss(self.backbone, train, batch, ctx), self.method.name)
            return {**extra, LOSS: value}

        for step in range(len(learners[0].queue)):
            active = [learner for learner in learners if step < len(learner.queue)]
            rows = [learner.queue[step] for learner in active]
            batch = self._with_teacher(self.batch(rows), active, rows, ctx)
            batch = batch._replace(class_count=counts[: len(rows)])
            out = over_clients(loss, [learner.leaves for learner in active], batch)
            if not out[LOSS].requires_grad:
                name = self.method.name
                raise TypeError(f"{name}.loss does not depend on what it trains; look for a detach()")
            out[LOSS].sum().backward()
            for learner, of_step in zip(active, out[LOSS].detach(), strict=True):
                learner.losses.append(of_step)
            for learner in active:
                controls.correct(learner)
            optimizers.step([step / len(learner.queue) for learner in active], training.clip_norm)
            accumulate([learner.sums for learner in learners], out)

    def stats(self, learners: Sequence[Learner], ctx: Context) -> None:
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

        after = self.one_pass(sums, [learner.trained for learner in learners], rows)
        for learner, found in zip(learners, after, strict=True):
            learner.sums |= found

    @torch.no_grad()
    def _with_teacher(
        self, batch: Batch, active: Sequence[Learner], rows: Sequence[Rows], ctx: Context
    ) -> Batch:
        """The batch with the outputs of the method's teacher, if any; all clients share the teacher."""
        if not isinstance(self.method, Distils):
            return batch
        index: list[list[int]] = []
        if self.plan.augment.fixed:
            index = torch.stack([pad(r.positions, batch.w.shape[1]) for r in rows]).tolist()
            told = [(learner.taught, i) for learner, own in zip(active, index, strict=True) for i in own]
            if all(i in taught for taught, i in told):
                outputs = torch.stack([taught[i] for taught, i in told])
                return batch._replace(teacher=outputs.unflatten(0, batch.w.shape))
        flat = Batch(*(v.flatten(0, 1) for v in batch))
        outputs = self.method.teach(self.backbone, ctx.shared, flat, ctx.task).unflatten(0, batch.w.shape)
        for learner, own, said in zip(active, index, outputs, strict=False):  # where the view is fixed
            learner.taught.update(zip(own, said, strict=True))
        return batch._replace(teacher=outputs)

    @torch.no_grad()
    def one_pass(
        self, fn: Callable[[Tree, Batch], Tree], trees: list[Tree], rows: Sequence[Rows]
    ) -> list[Tree]:
        """Sums of ``fn`` over every client's images, in order; longest first."""
        sums: list[Tree] = [{} for _ in rows]
        size = self.plan.pass_size
        for start in range(0, len(rows[0].positions), size):
            active = [r.part(start, start + size) for r in rows if start < len(r.positions)]
            accumulate(sums, over_clients(fn, trees[: len(active)], self.batch(active)))
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

    def mean_loss(self, learner: Learner) -> tuple[float, Tensor]:
        """A client's mean loss, and those of its steps [n], once it has trained; its sums lose it."""
        return float(learner.sums.pop(LOSS)) / len(learner.queue), torch.stack(learner.losses)


def loss_and_sums(returned: Any, method: str) -> tuple[Tensor, Tree]:
    """What a method's ``loss`` returned. Raises TypeError where it is not one number and sums by name."""
    if not isinstance(returned, tuple) or len(returned) != 2 or not isinstance(returned[1], Mapping):
        raise TypeError(f"{method}.loss returns {type(returned).__name__}, expected (loss, sums by name)")
    loss, sums = returned
    if not isinstance(loss, Tensor) or loss.ndim:
        found = f"of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise TypeError(f"{method}.loss gives a loss {found}, expected a tensor that is one number")
    if odd := [name for name, value in sums.items() if not isinstance(value, Tensor)]:
        raise TypeError(
            f"{method}.loss gives the sum {odd[0]!r} as {type(sums[odd[0]]).__name__}, expected a tensor"
        )
    return loss, dict(sums)
