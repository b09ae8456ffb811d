"""Client side of an exchange: a function of the server's request and the client state."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fczoo.core.errors import log_place
from fczoo.core.payload import Payload, pack_symmetric
from fczoo.core.seeds import PHASE_KEYS, torch_stream
from fczoo.core.tree import Tree
from fczoo.core.types import Batch, Boundary, Context, EndsTasks, Exchange, HasClientMemory
from fczoo.federation.batches import Client, LocalImages, LocalTrainState, Rows, image_draws
from fczoo.federation.checkpoint import ClientState, contiguous_copy
from fczoo.federation.local_rules import ControlVariates
from fczoo.federation.local_trainer import LocalTrainer
from fczoo.federation.uplink import Uplink


class ClientRequest(NamedTuple):
    """Request of the server in one exchange, the same for all clients."""

    boundary: Boundary | None  # sums at a boundary of the task; None: training in a round
    state: Tree  # what it sends
    control: Tree  # its control variates, see ControlVariates
    ctx: Context

    @property
    def exchange(self) -> Exchange:
        """Return the exchange to which the request belongs."""
        if self.boundary:
            return Exchange(self.ctx.task, boundary=self.boundary)
        return Exchange(self.ctx.task, self.ctx.round, balanced=self.ctx.balanced)


class ClientResponse(NamedTuple):
    """Response of some clients in an exchange."""

    payloads: list[Payload]  # in their order; empty where one has nothing to send
    client_state: ClientState  # what they keep from now on
    losses: dict[
        int, tuple[float, Tensor]
    ]  # client -> mean loss of its training, and of each step [n]


@dataclass(frozen=True)
class ClientRuntime:
    """A method's client functions in one exchange.

    It is stateless: the state of clients is an argument, and part of the response.
    """

    trainer: LocalTrainer
    uplink: Uplink | None = None  # None: uploads are sent as the method computes them

    def answer(
        self, request: ClientRequest, clients: Sequence[Client], client_state: ClientState
    ) -> ClientResponse:
        """Return the response of ``clients``, whose state is ``client_state``; it does not change.

        Clients that train share one forward; those with the most images come first. A client sends
        nothing if its loss or weights become infinite or NaN.
        """
        response = self._respond(request, clients, client_state)
        if self.uplink is None:
            return response
        residuals = dict(response.client_state.residuals)
        sent = self.uplink.send(response.payloads, request.state, request.exchange, residuals)
        return response._replace(
            payloads=sent, client_state=response.client_state._replace(residuals=residuals)
        )

    def _respond(
        self, request: ClientRequest, clients: Sequence[Client], client_state: ClientState
    ) -> ClientResponse:
        """Return the response with uploads that are not yet protected, forged or encoded."""
        if request.boundary is None:
            return self._train(request, clients, client_state)
        if request.boundary == "after_rounds":
            return self._end_task(request, clients, client_state)
        return ClientResponse(
            [self._statistics(request, client) for client in clients], client_state, {}
        )

    @torch.no_grad()
    def statistics_form(self, request: ClientRequest, client: Client) -> Payload:
        """Return the shape of a statistics upload, computed from one image of weight 0."""
        trainer, method = self.trainer, self.trainer.method
        assert request.boundary and request.boundary != "after_rounds"
        draws = torch.zeros(1, method.training().draws) if method.training().draws else None
        client_batch = trainer.batch([Rows(client.index[:1], None, draws, client.number)])
        batch = Batch(*(v[0] for v in client_batch))._replace(w=torch.zeros_like(client_batch.w[0]))
        sums = method.collect(request.boundary, trainer.backbone, request.state, batch, request.ctx)
        return Payload(pack_symmetric(sums, method.training().uploads), client.number)

    def _statistics(self, request: ClientRequest, client: Client) -> Payload:
        """Return the upload with a client's statistics from one pass over its data."""
        trainer, method, phase = self.trainer, self.trainer.method, request.boundary
        assert phase and phase != "after_rounds"

        def sums(_: Tree, batch: Batch) -> Tree:
            return method.collect(phase, trainer.backbone, request.state, batch, request.ctx)

        key = f"survey {PHASE_KEYS[phase]}", trainer.plan.seed, request.ctx.task.index
        training, index, views = method.training(), client.index, None
        if phase == "task_end" and training.collect_view == "train":
            passes, images = training.collect_passes, len(trainer.store.labels)
            # each image has its own draws, whichever client holds it, like the method's draws
            rng = torch_stream(*key, "view")
            views = torch.rand(passes, images, trainer.plan.augment.draws, generator=rng)
            views = views[:, index.cpu()].flatten(0, 1)
            index = index.repeat(passes)
        draws = image_draws(training, len(trainer.store.labels), index, *key)
        collector = trainer if phase == "task_start" else trainer.statistics_trainer()
        totals = collector.one_pass(sums, [{}], [Rows(index, views, draws, client.number)])[0]
        totals = pack_symmetric(totals, method.training().uploads)
        return Payload(_contiguous_tree(totals), client.number, len(client.index))

    def _end_task(
        self, request: ClientRequest, clients: Sequence[Client], client_state: ClientState
    ) -> ClientResponse:
        """Return the uploads of clients that update their memory at the end of a task.

        ``num_samples`` of an upload counts the images of the task and the exemplars.
        """
        trainer, method = self.trainer, self.trainer.method
        memories, payloads = dict(client_state.memories), []
        assert isinstance(method, EndsTasks)
        for client in clients:
            client_ctx = replace(request.ctx, memory=memories.get(client.number, {}))
            with torch.no_grad(), log_place(_location(client, client_ctx)):
                result = method.end_task_client(
                    trainer.backbone, trainer.images_of(client), client_ctx
                )
            memory, upload = map(
                _contiguous_tree, _pair(result, f"{method.name}.end_task_client()")
            )
            memories[client.number] = memory
            images = len(trainer.with_exemplars(client, memory).index)
            payloads.append(Payload(upload, client.number, images))
        return ClientResponse(payloads, client_state._replace(memories=memories), {})

    def _train(
        self, request: ClientRequest, clients: Sequence[Client], client_state: ClientState
    ) -> ClientResponse:
        trainer, method = self.trainer, self.trainer.method
        ctx, memories = request.ctx, dict(client_state.memories)
        controls = ControlVariates(trainer.rule, request.control, dict(client_state.controls))
        data = trainer.images_of(clients[0])
        if isinstance(method, HasClientMemory):  # one client
            ctx = self._before_training(
                method, clients[0], data, ctx, memories.get(clients[0].number, {})
            )
            memories[clients[0].number] = ctx.memory
        learners = []
        for client in clients:
            memory = memories.get(client.number, {})
            index = trainer.training_indices(client, memory, ctx)
            teacher_outputs = dict(client_state.teacher_outputs.get(client.number, {}))
            start = trainer.start_of(request.state, memory)
            learners.append(trainer.learner(start, client, index, teacher_outputs, ctx))
        trainer.steps(learners, controls, ctx)
        losses = {learner.client.number: trainer.mean_loss(learner) for learner in learners}
        finite_learners = [
            o for o in learners if o.finite and math.isfinite(losses[o.client.number][0])
        ]
        trainer.collect_after_training(finite_learners, ctx)
        payloads = {
            client.number: Payload({}, client.number, len(client.index)) for client in clients
        }
        for learner in finite_learners:
            number = learner.client.number
            upload = {**method.make_upload(learner.trained_tensors, learner.sums, ctx)}
            if isinstance(method, HasClientMemory):
                memories[number], extra = self._after_training(method, learner, data, ctx)
                upload |= extra
            upload |= controls.update_client_tree(learner)
            payloads[number] = payloads[number].holding(_contiguous_tree(upload))
        outputs_by_client = {
            learner.client.number: learner.teacher_outputs
            for learner in learners
            if learner.teacher_outputs
        }
        return ClientResponse(
            list(payloads.values()),
            ClientState(
                memories, outputs_by_client, controls.clients, dict(client_state.residuals)
            ),
            losses,
        )

    def _before_training(
        self, method: HasClientMemory, client: Client, data: LocalImages, ctx: Context, memory: Tree
    ) -> Context:
        """Return the context with the client's memory after ``before_training``."""
        with torch.no_grad(), log_place(_location(client, ctx)):
            return replace(
                ctx,
                memory=_contiguous_tree(
                    method.before_training(self.trainer.backbone, data, replace(ctx, memory=memory))
                ),
            )

    def _after_training(
        self, method: HasClientMemory, learner: LocalTrainState, data: LocalImages, ctx: Context
    ) -> tuple[Tree, Tree]:
        """Return the client's memory after training, and its additional upload."""
        with log_place(_location(learner.client, ctx)):
            result = method.after_training(
                self.trainer.backbone, learner.trained_tensors, learner.sums, data, ctx
            )
            memory, upload = _pair(result, f"{self.trainer.method.name}.after_training()")
        return _contiguous_tree(memory), upload


def _contiguous_tree(tree: Tree) -> Tree:
    """Make tensors contiguous, as serialization does, so that later sums do not depend on it."""
    return {name: contiguous_copy(value.detach()) for name, value in tree.items()}


def _location(client: Client, ctx: Context) -> str:
    return f"task {ctx.task.index + 1}, client {client.number}"


def _pair(returned: Any, function: str) -> tuple[Tree, Tree]:
    """Return the result of a method's function as (memory, upload).

    Raises TypeError if it is not a pair.
    """
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise TypeError(
            f"{function} must return two trees: the client's memory and its additional upload"
        )
    memory, upload = returned
    return memory, upload
