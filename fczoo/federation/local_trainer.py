"""Local training of clients: every loop over batches.

The code is the same for clients that train one after another and for those that share a batched
forward. Clients are independent, so ``torch.vmap`` of the loss over stacked clients, followed by
one backward of the summed loss, gives each client exactly its own gradient. Each client has
separate leaf tensors, so a client that has no batches left gets no gradient, and its optimizer
state does not change.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.errors import FczooError
from fczoo.core.lr_schedules import LOCAL, SCHEDULES
from fczoo.core.method import Method
from fczoo.core.seeds import torch_stream
from fczoo.core.training import Optim
from fczoo.core.tree import Tree, drop, select
from fczoo.core.types import Batch, Context, HasTeacher
from fczoo.data.views import ImageStore
from fczoo.federation.batches import (
    NO_POSITIONS,
    Client,
    LocalImages,
    LocalTrainState,
    Rows,
    image_draws,
    pad,
    stack_batch,
)
from fczoo.federation.device import Plan, flushed_denormals
from fczoo.federation.local_rules import ControlVariates, LocalRule, frozen_features_message

OptimizerStep = Callable[[list[float], float | None], None]
"""One step of the clients that still train.

Its arguments are the finished part of each client's steps, and the largest norm of a gradient.
"""
MakeOptimizers = Callable[[Mapping[str, Optim], list[Tree], Context], OptimizerStep]
"""(optimizers by prefix, tensors that each client trains, context) -> step."""


def skip_steps(optims: Mapping[str, Optim], leaves: list[Tree], ctx: Context) -> OptimizerStep:
    """Return a step that leaves all tensors unchanged, to measure a round.

    torch's optimizers take a second to import.
    """
    return lambda progress, clip: None


def make_optimizers(optims: Mapping[str, Optim], leaves: list[Tree], ctx: Context) -> OptimizerStep:
    """Create torch's optimizers of every client's leaves, one per kind; return their step."""
    kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    groups = _parameter_groups(optims, leaves)
    optimizers = [kinds[name](members) for name, members in groups.items() if members]

    def step(progress: list[float], clip: float | None) -> None:
        if clip is not None:
            for tree in leaves[: len(progress)]:
                torch.nn.utils.clip_grad_norm_(tree.values(), clip)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                if group["client"] < len(progress):
                    factor = SCHEDULES[group["schedule"]](
                        ctx.round, ctx.rounds, progress[group["client"]]
                    )
                    group["lr"] = group["base"] * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return step


def _parameter_groups(
    optims: Mapping[str, Optim], leaves: list[Tree]
) -> dict[str, list[dict[str, Any]]]:
    """Return the parameter groups of each kind of optimizer, one group per prefix.

    If the rate changes inside a round, there is one group per prefix and client, because clients
    have different numbers of steps.
    """
    groups: dict[str, list[dict[str, Any]]] = {"adam": [], "adamw": [], "sgd": []}
    for prefix, optim in optims.items():
        client_tensors = [
            [v for k, v in tree.items() if owning_prefix(k, optims) == prefix] for tree in leaves
        ]
        if not client_tensors[0]:
            raise TypeError(f"training() trains {prefix!r}, but the state has no such tensor")
        base: dict[str, Any] = {
            "lr": optim.lr,
            "weight_decay": optim.weight_decay,
            "base": optim.lr,
            "schedule": optim.schedule,
        }
        if optim.name == "sgd":
            base["momentum"] = optim.momentum
        if optim.schedule in LOCAL:
            groups[optim.name] += [
                {**base, "params": tensors, "client": i} for i, tensors in enumerate(client_tensors)
            ]
        else:
            tensors = [v for tensors in client_tensors for v in tensors]
            groups[optim.name].append({**base, "params": tensors, "client": 0})
    return groups


def owning_prefix(name: str, optims: Mapping[str, Optim]) -> str:
    """Return the longest prefix of a tensor's name; its optimizer trains the tensor."""
    return max((p for p in optims if name.startswith(p)), key=len)


def map_over_clients(fn: Callable[[Tree, Batch], Tree], trees: list[Tree], batch: Batch) -> Tree:
    """Map ``fn`` over every client's tree and batch; results are stacked [k, ...]."""
    if len(trees) == 1:
        return {k: v[None] for k, v in fn(trees[0], Batch(*(v[0] for v in batch))).items()}
    stacks = {k: torch.stack([tree[k] for tree in trees]) for k in trees[0]}
    return torch.vmap(fn)(stacks, batch)


def accumulate(sums: list[Tree], new: Tree) -> None:
    """Add stacked results to every client's sums."""
    for name, values in new.items():
        for tree, value in zip(sums, values.detach(), strict=False):  # finished clients add nothing
            tree[name] = tree[name] + value if name in tree else value


# names that no method gives to a sum or a tensor
LOSS, TERM, PREVIOUS = "loss of the step", "term of the local rule", "previous round: "


@dataclass(frozen=True)
class LocalTrainer:
    """Passes of a method's client functions over the images of a store.

    It is stateless.
    """

    method: Method
    backbone: Backbone
    store: ImageStore
    plan: Plan
    rule: LocalRule
    make_optimizers: MakeOptimizers = make_optimizers

    def images_of(self, client: Client) -> LocalImages:
        """Return a client's images as a method accesses them outside of batches."""
        return LocalImages(
            self.method, self.store, client.index, client.earlier, self.plan.pass_size
        )

    def exemplars(self, memory: Tree) -> Tensor:
        """Return positions of the exemplars of finished tasks in a client's memory."""
        return memory.get(self.method.training().exemplars, NO_POSITIONS)

    def with_exemplars(self, client: Client, memory: Tree) -> Client:
        """Return the client with its images of the task and its exemplars, each once."""
        return replace(client, index=torch.cat([client.index, self.exemplars(memory)]).unique())

    def training_indices(self, client: Client, memory: Tree, ctx: Context) -> Tensor:
        """Return positions of the images on which a client trains in a round."""
        if ctx.balanced:
            return client.index  # exemplars only
        exemplars, trains_on = self.exemplars(memory), self.method.training().trains_on
        if trains_on is None:
            return torch.cat([client.index, exemplars])
        return trains_on(self.images_of(client), exemplars)

    def start_of(self, state: Tree, memory: Tree) -> Tree:
        """Return the tensors from which a client starts: the broadcast, or its own model."""
        return {**state, **memory} if self.method.training().own_models else state

    def batch(self, rows: Sequence[Rows]) -> Batch:
        """Load the images of some clients, stacked [k, B, ...]."""
        return stack_batch(
            self.method, self.store, rows, self.plan.augment, self.plan.cache_queries
        )

    def learner(
        self,
        state: Tree,
        client: Client,
        index: Tensor,
        teacher_outputs: dict[int, Tensor],
        ctx: Context,
    ) -> LocalTrainState:
        """Create the state of a client at the start of a round on the images at ``index``."""
        start = select(state, *self._optims(ctx))
        leaves = {k: v.detach().clone().requires_grad_() for k, v in start.items()}
        labels = self.store.labels[index.to(self.store.labels.device)]
        counts = torch.bincount(labels, minlength=ctx.task.classes)
        return LocalTrainState(
            client,
            leaves,
            start,
            list(self._epochs(client.number, index, ctx)),
            counts,
            teacher_outputs,
        )

    def _optims(self, ctx: Context) -> Mapping[str, Optim]:
        return self.method.training().active_optims(ctx.task, ctx.round, ctx.balanced)

    @flushed_denormals()
    def steps(
        self, learners: Sequence[LocalTrainState], controls: ControlVariates, ctx: Context
    ) -> None:
        """Run all steps of a round: one batched forward, one backward, one optimizer step each."""
        training = self.method.training()
        take_step = self.make_optimizers(
            self._optims(ctx), [learner.leaves for learner in learners], ctx
        )
        counts = torch.stack([learner.counts for learner in learners])
        previous = [
            {f"{PREVIOUS}{name}": value for name, value in controls.previous(learner).items()}
            for learner in learners
        ]

        def loss(tree: Tree, batch: Batch) -> Tree:
            train = drop(tree, PREVIOUS)
            value, extra = check_loss_result(
                self.method.loss(self.backbone, train, batch, ctx), self.method.name
            )
            if not controls.rule.reads_features:
                return {**extra, LOSS: value}

            def features(tensors: Tree) -> Tensor:
                return self.method.features(self.backbone, {**ctx.shared, **tensors}, batch)

            past = {k.removeprefix(PREVIOUS): v for k, v in select(tree, PREVIOUS).items()}
            term = controls.rule.loss_term(features, train, past, batch)
            return {**extra, LOSS: value, TERM: term}

        for step in range(len(learners[0].queue)):
            active = [learner for learner in learners if step < len(learner.queue)]
            rows = [learner.queue[step] for learner in active]
            batch = self._with_teacher(self.batch(rows), active, rows, ctx)
            batch = batch._replace(class_count=counts[: len(rows)])
            trees = [o.leaves | past for o, past in zip(active, previous, strict=False)]
            out = map_over_clients(loss, trees, batch)
            term = out.pop(TERM, None)
            if not out[LOSS].requires_grad:
                name = self.method.name
                raise TypeError(
                    f"{name}.loss does not depend on the trained tensors; look for a detach()"
                )
            if term is not None and not term.requires_grad:
                raise FczooError(frozen_features_message(controls.rule.name, self.method.name))
            (out[LOSS] if term is None else out[LOSS] + term).sum().backward()
            for learner, step_loss in zip(active, out[LOSS].detach(), strict=True):
                learner.losses.append(step_loss)
            for learner in active:
                controls.correct(learner)
            take_step([step / len(learner.queue) for learner in active], training.clip_norm)
            accumulate([learner.sums for learner in learners], out)

    def statistics_trainer(self) -> "LocalTrainer":
        """Return the trainer with the test view that the method's statistics use."""
        whole = self.method.training().collect_view == "whole"
        return replace(self, store=self.store.without_test_crop()) if whole else self

    def collect_after_training(self, learners: Sequence[LocalTrainState], ctx: Context) -> None:
        """Add the method's sums after training, if it collects any, to the sums of the loss."""
        training = self.method.training()
        if "after_training" not in training.collect_at or not learners:
            return
        rows = []
        for learner in learners:
            index = learner.client.index
            if training.collect_view == "train":
                index = index.repeat(training.collect_passes)
            key = ("stats", self.plan.seed, ctx.task.index, ctx.round, learner.client.number)
            view_draws = (
                torch.rand(len(index), self.plan.augment.draws, generator=torch_stream(*key))
                if training.collect_view == "train"
                else None
            )
            method_draws = image_draws(training, len(self.store.labels), index, *key, "own")
            rows.append(Rows(index, view_draws, method_draws, learner.client.number))

        def sums(train: Tree, batch: Batch) -> Tree:
            return self.method.collect("after_training", self.backbone, train, batch, ctx)

        all_sums = self.statistics_trainer().one_pass(
            sums, [learner.trained_tensors for learner in learners], rows
        )
        for learner, client_sums in zip(learners, all_sums, strict=True):
            learner.sums |= client_sums

    @torch.no_grad()
    def _with_teacher(
        self, batch: Batch, active: Sequence[LocalTrainState], rows: Sequence[Rows], ctx: Context
    ) -> Batch:
        """Add the outputs of the method's teacher, if any, to a batch.

        All clients share the teacher.
        """
        if not isinstance(self.method, HasTeacher):
            return batch
        index: list[list[int]] = []
        if self.plan.augment.is_fixed:
            index = torch.stack([pad(r.positions, batch.w.shape[1]) for r in rows]).tolist()
            lookups = [
                (learner.teacher_outputs, i)
                for learner, positions in zip(active, index, strict=True)
                for i in positions
            ]
            if all(i in cache for cache, i in lookups):
                outputs = torch.stack([cache[i] for cache, i in lookups])
                return batch._replace(teacher=outputs.unflatten(0, batch.w.shape))
        flat = Batch(*(v.flatten(0, 1) for v in batch))
        outputs = self.method.teacher_outputs(self.backbone, ctx.shared, flat, ctx.task).unflatten(
            0, batch.w.shape
        )
        for learner, positions, client_outputs in zip(
            active, index, outputs, strict=False
        ):  # where the view is fixed
            learner.teacher_outputs.update(zip(positions, client_outputs, strict=True))
        return batch._replace(teacher=outputs)

    @torch.no_grad()
    def one_pass(
        self, fn: Callable[[Tree, Batch], Tree], trees: list[Tree], rows: Sequence[Rows]
    ) -> list[Tree]:
        """Return the sums of ``fn`` over each client's images; the first client has the most."""
        sums: list[Tree] = [{} for _ in rows]
        size = self.plan.pass_size
        for start in range(0, len(rows[0].positions), size):
            active = [r.part(start, start + size) for r in rows if start < len(r.positions)]
            accumulate(sums, map_over_clients(fn, trees[: len(active)], self.batch(active)))
        return sums

    def _epochs(self, client: int, index: Tensor, ctx: Context) -> Iterator[Rows]:
        """Yield the images of every step of a round; they do not depend on other clients.

        They are on the device from the start: a copy in each step would make the host wait for the
        device.
        """
        size, draw_count = self.plan.batch_size, self.method.training().draws
        for epoch in range(self.plan.epochs):
            rng = torch_stream("client", self.plan.seed, ctx.task.index, ctx.round, client, epoch)
            order = torch.randperm(len(index), generator=rng)
            draws = torch.rand(len(order), self.plan.augment.draws, generator=rng)
            draws = draws.to(self.backbone.device)
            method_draws = (
                torch.rand(len(order), draw_count, generator=rng).to(draws.device)
                if draw_count
                else None
            )
            positions = index[order].to(self.store.pixels.device)
            rows = Rows(positions, draws, method_draws, client, epoch)
            for start in range(0, len(order), size):
                yield rows.part(start, start + size)

    def mean_loss(self, learner: LocalTrainState) -> tuple[float, Tensor]:
        """Return a client's mean loss and its steps' losses [n]; remove the loss from its sums."""
        return float(learner.sums.pop(LOSS)) / len(learner.queue), torch.stack(learner.losses)


def check_loss_result(returned: Any, method: str) -> tuple[Tensor, Tree]:
    """Check the result of a method's ``loss``.

    Raises TypeError unless it is one number and sums by name.
    """
    if (
        not isinstance(returned, tuple)
        or len(returned) != 2
        or not isinstance(returned[1], Mapping)
    ):
        raise TypeError(
            f"{method}.loss returns {type(returned).__name__}, expected (loss, sums by name)"
        )
    loss, sums = returned
    if not isinstance(loss, Tensor) or loss.ndim:
        description = (
            f"of shape {tuple(loss.shape)}"
            if isinstance(loss, Tensor)
            else f"a {type(loss).__name__}"
        )
        raise TypeError(f"{method}.loss returns a loss {description}, expected a scalar tensor")
    if invalid_names := [name for name, value in sums.items() if not isinstance(value, Tensor)]:
        raise TypeError(
            f"{method}.loss returns the sum {invalid_names[0]!r} as "
            f"{type(sums[invalid_names[0]]).__name__}, expected a tensor"
        )
    return loss, dict(sums)
