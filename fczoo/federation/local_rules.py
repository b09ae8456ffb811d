"""Rules of local training, which add a term to the gradients of every step."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from fczoo.core.options import check_options, option
from fczoo.core.payload import Payload, Uploads, whole_tensors
from fczoo.core.registry import LOCAL_TRAINING, register_local_training
from fczoo.core.training import Optim, Training
from fczoo.core.tree import Tree
from fczoo.core.types import ServerAggregator
from fczoo.federation.batches import LocalTrainState

CONTROL = "control_variate."
"""Prefix of what clients and the server send of control variates, before the name of a trained
tensor.
"""


@dataclass(frozen=True)
class LocalRule:
    """Rule of local training: a term of the gradients, and a client state for the next round.

    A client may keep control variates c_i, one for each tensor that it trains, zero at a task's
    beginning, and the server c, their mean over all clients; a client uploads the change of its
    variates in every round.
    """

    name: ClassVar[str] = ""
    keeps: ClassVar[bool] = False  # true: there are control variates

    def __post_init__(self) -> None:
        check_options(self)

    def gradient_term(self, now: Tree, start: Tree, own: Tree, server: Tree) -> Tree:
        """Return the term added to the gradients of the tensors ``now``.

        They were ``start`` at the beginning of the round.

        ``own`` and ``server``: control variates of the same names and shapes; empty without them.
        """
        return {}

    def new_control_variates(self, gradient: Tree, own: Tree, server: Tree) -> Tree:
        """Return a client's control variates after a round.

        ``gradient`` is the mean over its steps.
        """
        return own

    def table_note(self, training: Training) -> str:
        """Return the note below tables for a method that declares ``training``."""
        return ""

    @property
    def uploads(self) -> Uploads:
        """Return the uploads of clients that the rule adds to those of the method."""
        return {CONTROL: whole_tensors("parameters")} if self.keeps else {}


@register_local_training("fedprox")
@dataclass(frozen=True)
class FedProx(LocalRule):
    """FedProx (Li et al., MLSys 2020).

    mu/2 |y - x|^2 is added to the loss; x is what the server sent. All that a client trains counts.
    The loss that is shown is the method's own.
    """

    mu: float = option(0.01, "mu, weight of the squared distance; 0 changes nothing", low=0)

    def gradient_term(self, now: Tree, start: Tree, own: Tree, server: Tree) -> Tree:
        return {name: self.mu * (value - start[name]) for name, value in now.items()}


@register_local_training("scaffold")
@dataclass(frozen=True)
class Scaffold(LocalRule):
    """SCAFFOLD (Karimireddy et al., ICML 2020), option II.

    c - c_i is added to a client's gradients. After a round c_i is the mean of the client's
    gradients as they were before that. For K steps of plain gradient descent at rate lr from x to y
    this is the paper's c_i - c + (x - y) / (K lr); in this form it also holds for momentum, weight
    decay, clipping and Adam, which get the changed gradients and for which the paper promises
    nothing. The method itself merges what is trained; c grows by |S|/N times the mean change over
    the |S| responding clients of N. Twice the bytes both ways.
    """

    keeps = True

    def gradient_term(self, now: Tree, start: Tree, own: Tree, server: Tree) -> Tree:
        return {name: server[name] - own[name] for name in now}

    def new_control_variates(self, gradient: Tree, own: Tree, server: Tree) -> Tree:
        return gradient

    def table_note(self, training: Training) -> str:
        others = {
            o.name for o in (*training.optims.values(), *training.balanced.values()) if not plain(o)
        }
        return (
            f"control variates with {', '.join(sorted(others))}, made for plain descent"
            if others
            else ""
        )


def plain(optim: Optim) -> bool:
    """Return whether the rule is gradient descent without momentum."""
    return optim.name == "sgd" and not optim.momentum


def make_local_training(spec: str | None) -> LocalRule:
    """Create a rule from ``NAME`` or ``NAME:VALUE``; without a spec, one that changes nothing.

    Raises FczooError for an unknown name and for a value that does not fit.
    """
    rule: LocalRule = LOCAL_TRAINING.create(spec) if spec else LocalRule()
    return rule


@dataclass
class ControlVariates:
    """A rule of local training with the control variates of the server and of each client.

    They are kept by the names of trained tensors; one that is not there is zero.
    """

    rule: LocalRule = field(default_factory=LocalRule)
    server: Tree = field(default_factory=dict)
    clients: dict[int, Tree] = field(default_factory=dict)

    def clear(self) -> None:
        """Set all control variates to zero at the start of a task."""
        self.server, self.clients = {}, {}

    @property
    def broadcast(self) -> Tree:
        """Return the control variates that the server sends; empty while all are zero."""
        return {f"{CONTROL}{name}": value for name, value in self.server.items()}

    @torch.no_grad()
    def correct(self, learner: LocalTrainState) -> None:
        """Add the rule's term to the gradients of a client's step.

        Tensors without a gradient stay as they are.
        """
        gradients = {
            name: leaf.grad for name, leaf in learner.leaves.items() if leaf.grad is not None
        }
        if self.rule.keeps:
            for name, gradient in gradients.items():
                total = learner.gradients.get(name)
                learner.gradients[name] = gradient.clone() if total is None else total + gradient
        tensors = {name: learner.leaves[name].detach() for name in gradients}
        for name, value in self.rule.gradient_term(
            tensors, learner.start, *self._variates(learner, tensors)
        ).items():
            gradients[name].add_(value)

    @torch.no_grad()
    def renew(self, learner: LocalTrainState) -> Tree:
        """Update the variates of a trained client and return the change, which it uploads."""
        if not self.rule.keeps:
            return {}
        steps = len(learner.queue)
        gradient = {
            name: learner.gradients[name] / steps
            if name in learner.gradients
            else torch.zeros_like(value)
            for name, value in learner.trained_tensors.items()
        }
        client_variates, server = self._variates(learner, gradient)
        changes = {
            name: new - client_variates[name]
            for name, new in self.rule.new_control_variates(
                gradient, client_variates, server
            ).items()
        }
        variates = {
            name: client_variates[name] + change for name, change in changes.items()
        }  # as the server adds them up
        number = learner.client.number
        self.clients[number] = {**self.clients.get(number, {}), **variates}
        return {f"{CONTROL}{name}": change for name, change in changes.items()}

    def absorb(self, payloads: Sequence[Payload], clients: int, average: ServerAggregator) -> None:
        """Add the clients' changes at the server: |S|/N of their mean over the |S| uploads."""
        changes = [
            Payload(p.only(CONTROL).tensors, p.client) for p in payloads
        ]  # each counts as one
        if not self.rule.keeps or not payloads:
            return
        server = dict(self.server)
        for name, change in average(changes).items():
            name, part = name.removeprefix(CONTROL), len(payloads) / clients * change
            server[name] = server[name] + part.to(server[name]) if name in server else part
        self.server = server

    def _variates(self, learner: LocalTrainState, like: Tree) -> tuple[Tree, Tree]:
        """Return the client's and the server's variates for some tensors."""
        if not self.rule.keeps:
            return {}, {}
        client_variates = self.clients.get(learner.client.number, {})
        pair = [
            {k: _or_zero(tree.get(k), v) for k, v in like.items()}
            for tree in (client_variates, self.server)
        ]
        return pair[0], pair[1]


def _or_zero(variate: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(like) if variate is None else variate.to(like)
