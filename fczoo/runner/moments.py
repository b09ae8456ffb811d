"""What a client sends in a task, moment by moment."""

from dataclasses import dataclass, field, replace

import torch

from fczoo.core.method import Concludes, Surveys
from fczoo.core.payload import Payload
from fczoo.core.tree import Tree
from fczoo.core.types import Context, Moment, ServerContext, Task
from fczoo.federation.batches import Client
from fczoo.federation.downlink import broadcast
from fczoo.federation.engine import Engine
from fczoo.federation.sums import gathered

MOMENTS = {
    "begin": "as a task begins, in a survey",
    "round": "in a round",
    "conclude": "once the rounds are over, as a client settles what it keeps",
    "balanced": "in one more round, on exemplars alone",
    "end": "as a task ends, in a survey",
}
"""The moments of a task at which clients act, in their order, in words."""


def uploads(
    engine: Engine, client: Client, task: Task, state: Tree, rng: torch.Generator
) -> tuple[dict[str, Payload], Tree]:
    """What one client sends in a task of one round, by its moments, and the server's state at its end.

    ``state`` is the server's as the task has begun. At a moment that a method uses to settle what is kept
    alone, the upload is empty.
    """
    trial = _Trial(engine, client, task, state, rng)
    trial.run()
    return trial.sent, trial.state


@dataclass
class _Trial:
    engine: Engine
    client: Client
    task: Task
    state: Tree  # the server's, as it is now
    rng: torch.Generator
    sent: dict[str, Payload] = field(default_factory=dict)  # moment -> upload

    def run(self) -> None:
        """All moments of the task, as a run has them."""
        method, client = self.engine.method, self.client
        training = method.training()
        self._survey("begin", client)
        if training.active_optims(self.task, 0):
            self._round("round", 0, client)
        if isinstance(method, Concludes):
            client = self._conclude(method)
        exemplars = self.engine.exemplars(client)
        if training.balanced and self.task.index and len(exemplars):
            self._round("balanced", 1, replace(client, index=exemplars))
        self._survey("end", client)

    def _survey(self, moment: Moment, client: Client) -> None:
        method = self.engine.method
        if not isinstance(method, Surveys) or moment not in method.surveys():
            return
        number = 0 if moment == "begin" else 1
        (upload,) = self.engine.survey(moment, self._broadcast, [client], self._context(number))
        self.sent[moment] = upload
        self.state = method.absorb(moment, self.state, self._sums(upload), self._server(number))

    def _round(self, moment: str, number: int, client: Client) -> None:
        """Nothing has moved, so the server has nothing to merge."""
        (self.sent[moment],) = self.engine.train(self._broadcast, [client], self._context(number))

    def _conclude(self, method: Concludes) -> Client:
        """The client with its images of the task and its exemplars."""
        (upload,) = self.engine.conclude([self.client], self._context(1))
        self.sent["conclude"] = upload
        if upload:
            self.state = method.concluded(self.state, self._sums(upload), self._server(1))
        return self.engine.with_exemplars(self.client)

    @property
    def _broadcast(self) -> Tree:
        return broadcast(self.engine.method, self.state)

    def _sums(self, upload: Payload) -> Tree:
        return gathered([upload], self.engine.method.training().separate)

    def _context(self, number: int) -> Context:
        return Context(self.task, number, 1, self._broadcast)

    def _server(self, number: int) -> ServerContext:
        backbone = self.engine.backbone
        return ServerContext(self.task, number, 1, 1, 1, len(self.client.index), backbone, self.rng)
