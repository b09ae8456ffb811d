"""The control variates of one run, and how a rule of local training changes gradients by them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from fczoo.core.payload import Payload
from fczoo.core.tree import Tree
from fczoo.core.types import ServerAggregator
from fczoo.federation.batches import Learner
from fczoo.federation.local_training import CONTROL, LocalTraining


@dataclass
class Controls:
    """A rule of local training with the control variates of the server and of each client.

    They are kept by the names of trained tensors; one that is not there is zero.
    """

    rule: LocalTraining = field(default_factory=LocalTraining)
    server: Tree = field(default_factory=dict)
    clients: dict[int, Tree] = field(default_factory=dict)

    def clear(self) -> None:
        """A task begins: all are zero."""
        self.server, self.clients = {}, {}

    @property
    def broadcast(self) -> Tree:
        """What the server sends of them; nothing while all are zero."""
        return {f"{CONTROL}{name}": value for name, value in self.server.items()}

    @torch.no_grad()
    def correct(self, learner: Learner) -> None:
        """Add the rule's part to the gradients of a client's step; a tensor without a gradient stands."""
        found = {name: leaf.grad for name, leaf in learner.leaves.items() if leaf.grad is not None}
        if self.rule.keeps:
            for name, gradient in found.items():
                total = learner.gradients.get(name)
                learner.gradients[name] = gradient.clone() if total is None else total + gradient
        now = {name: learner.leaves[name].detach() for name in found}
        for name, value in self.rule.added(now, learner.start, *self._variates(learner, now)).items():
            found[name].add_(value)

    @torch.no_grad()
    def renew(self, learner: Learner) -> Tree:
        """What a client that has trained uploads of its control variates: how much they have changed."""
        if not self.rule.keeps:
            return {}
        steps = len(learner.queue)
        gradient = {
            name: learner.gradients[name] / steps if name in learner.gradients else torch.zeros_like(value)
            for name, value in learner.trained.items()
        }
        own, server = self._variates(learner, gradient)
        changes = {name: new - own[name] for name, new in self.rule.renewed(gradient, own, server).items()}
        kept = {name: own[name] + change for name, change in changes.items()}  # as the server adds them up
        number = learner.client.number
        self.clients[number] = {**self.clients.get(number, {}), **kept}
        return {f"{CONTROL}{name}": change for name, change in changes.items()}

    def absorb(self, payloads: Sequence[Payload], clients: int, average: ServerAggregator) -> None:
        """Server: add the clients' changes, |S|/N of their mean over the |S| that arrived."""
        changes = [Payload(p.only(CONTROL).tensors, p.client) for p in payloads]  # each counts as one
        if not self.rule.keeps or not payloads:
            return
        server = dict(self.server)
        for name, change in average(changes).items():
            name, part = name.removeprefix(CONTROL), len(payloads) / clients * change
            server[name] = server[name] + part.to(server[name]) if name in server else part
        self.server = server

    def _variates(self, learner: Learner, like: Tree) -> tuple[Tree, Tree]:
        """The client's and the server's for some tensors."""
        if not self.rule.keeps:
            return {}, {}
        own = self.clients.get(learner.client.number, {})
        pair = [{k: _or_zero(tree.get(k), v) for k, v in like.items()} for tree in (own, self.server)]
        return pair[0], pair[1]


def _or_zero(variate: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(like) if variate is None else variate.to(like)
