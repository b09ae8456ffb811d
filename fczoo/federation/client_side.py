"""What clients do in an exchange: a function of what the server sends and of what they keep."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fczoo.core.method import Concludes, Remembers, Surveys
from fczoo.core.payload import Payload
from fczoo.core.place import at
from fczoo.core.tree import Tree
from fczoo.core.types import Batch, Boundary, Context
from fczoo.federation.batches import Client, Learner, Rows, image_draws
from fczoo.federation.carried import Kept
from fczoo.federation.checkpoint import settled
from fczoo.federation.controls import Controls
from fczoo.federation.learning import Learning
from fczoo.federation.local_images import LocalImages


class Asked(NamedTuple):
    """What the server asks in one exchange, of all clients alike."""

    boundary: Boundary | None  # sums at a boundary of the task; None: training in a round
    state: Tree  # what it sends
    control: Tree  # its control variates, see Controls
    ctx: Context


class Answer(NamedTuple):
    """What some clients have done in an exchange."""

    payloads: list[Payload]  # in their order; empty where one has nothing to send
    kept: Kept  # what they keep from now on
    losses: dict[int, tuple[float, Tensor]]  # client -> mean loss of its training, and of each step [n]


class ClientSide(Learning):
    """A method's client functions in one exchange; what a client remembers is given and returned."""

    def answer(self, asked: Asked, clients: Sequence[Client], kept: Kept) -> Answer:
        """What ``clients`` answer, of whom ``kept`` is what they keep; it is not changed.

        Those who train share one forward and come with the most images first. A client whose loss or weights
        are not finite any more sends nothing.
        """
        if asked.boundary is None:
            return self._train(asked, clients, kept)
        if asked.boundary == "conclude":
            return self._conclude(asked, clients, kept)
        return Answer([self._survey(asked, client) for client in clients], kept, {})

    @torch.no_grad()
    def survey_form(self, asked: Asked, client: Client) -> Payload:
        """What uploads of a survey look like, from one image that counts for nothing."""
        method = self.method
        assert isinstance(method, Surveys) and asked.boundary in ("begin", "end")
        own = torch.zeros(1, method.training().draws) if method.training().draws else None
        stacked = self.batch([Rows(client.index[:1], own=own)])
        batch = Batch(*(v[0] for v in stacked))._replace(w=torch.zeros_like(stacked.w[0]))
        sums = method.survey(asked.boundary, self.backbone, asked.state, batch, asked.ctx.task)
        return Payload(sums, client.number)

    def _survey(self, asked: Asked, client: Client) -> Payload:
        """Sums of the method's survey over one pass of a client's data."""
        method, moment, task = self.method, asked.boundary, asked.ctx.task
        assert isinstance(method, Surveys) and moment in ("begin", "end")

        def sums(_: Tree, batch: Batch) -> Tree:
            return method.survey(moment, self.backbone, asked.state, batch, task)

        key = f"survey {moment}", self.plan.seed, task.index
        own = image_draws(method.training(), len(self.store.labels), client.index, *key)
        found = self.one_pass(sums, [{}], [Rows(client.index, own=own)])[0]
        return Payload(_settled(found), client.number, len(client.index))

    def _conclude(self, asked: Asked, clients: Sequence[Client], kept: Kept) -> Answer:
        """Uploads of clients that settle what they keep of a task.

        Behind an upload are the images of the task and the exemplars.
        """
        method, memories, payloads = self.method, dict(kept.memories), []
        assert isinstance(method, Concludes)
        for client in clients:
            known = replace(asked.ctx, memory=memories.get(client.number, {}))
            with torch.no_grad(), at(_place(client, known)):
                settling = method.conclude(self.backbone, self.images_of(client), known)
            memory, upload = map(_settled, _pair(settling, f"{method.name}.conclude()"))
            memories[client.number] = memory
            images = len(self.with_exemplars(client, memory).index)
            payloads.append(Payload(upload, client.number, images))
        return Answer(payloads, kept._replace(memories=memories), {})

    def _train(self, asked: Asked, clients: Sequence[Client], kept: Kept) -> Answer:
        ctx, memories = asked.ctx, dict(kept.memories)
        controls = Controls(self.rule, asked.control, dict(kept.controls))
        data = self.images_of(clients[0])
        if isinstance(self.method, Remembers):  # one client
            ctx = self._recall(self.method, clients[0], data, ctx, memories.get(clients[0].number, {}))
            memories[clients[0].number] = ctx.memory
        learners = []
        for client in clients:
            index = self.learned(client, memories.get(client.number, {}), ctx)
            told = dict(kept.taught.get(client.number, {}))
            learners.append(self.learner(asked.state, client, index, told, ctx))
        self.steps(learners, controls, ctx)
        losses = {learner.client.number: self.mean_loss(learner) for learner in learners}
        sound = [o for o in learners if o.finite and math.isfinite(losses[o.client.number][0])]
        self.stats(sound, ctx)
        payloads = {client.number: Payload({}, client.number, len(client.index)) for client in clients}
        for learner in sound:
            number = learner.client.number
            upload = {**self.method.pack(learner.trained, learner.sums, ctx)}
            if isinstance(self.method, Remembers):
                memories[number], more = self._finish(self.method, learner, data, ctx)
                upload |= more
            upload |= controls.renew(learner)
            payloads[number] = payloads[number].holding(_settled(upload))
        taught = {learner.client.number: learner.taught for learner in learners if learner.taught}
        return Answer(list(payloads.values()), Kept(memories, taught, controls.clients), losses)

    def _recall(
        self, method: Remembers, client: Client, data: LocalImages, ctx: Context, memory: Tree
    ) -> Context:
        """The context with the client's memory, brought up to date."""
        with torch.no_grad(), at(_place(client, ctx)):
            return replace(
                ctx, memory=_settled(method.prepare(self.backbone, data, replace(ctx, memory=memory)))
            )

    def _finish(
        self, method: Remembers, learner: Learner, data: LocalImages, ctx: Context
    ) -> tuple[Tree, Tree]:
        """The client's memory after training, and what it uploads besides ``pack``."""
        with at(_place(learner.client, ctx)):
            done = method.finish(self.backbone, learner.trained, learner.sums, data, ctx)
            memory, upload = _pair(done, f"{self.method.name}.finish()")
        return _settled(memory), upload


def _settled(tree: Tree) -> Tree:
    """The tree as it is once it has been bytes, so that no later sum depends on whether it has."""
    return {name: settled(value.detach()) for name, value in tree.items()}


def _place(client: Client, ctx: Context) -> str:
    return f"task {ctx.task.index + 1}, client {client.number}"


def _pair(returned: Any, function: str) -> tuple[Tree, Tree]:
    """What a function of a method returns as (memory, upload). Raises TypeError where it is no pair."""
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise TypeError(f"{function} must return two trees: what the client remembers, and what it uploads")
    memory, upload = returned
    return memory, upload
