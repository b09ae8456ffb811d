"""How clients train, whatever the method: rules that add something to the gradients of every step."""

from dataclasses import dataclass
from typing import ClassVar

from fczoo.core.options import check_options, option
from fczoo.core.payload import Uploads, whole
from fczoo.core.registry import LOCAL_TRAINING, register_local_training
from fczoo.core.tree import Tree
from fczoo.core.types import Optim, Training

CONTROL = "control_variate."
"""Prefix of what clients and the server send of control variates, before the name of a trained tensor."""


@dataclass(frozen=True)
class LocalTraining:
    """What is added to a client's gradients, and what it keeps of them for the next round.

    A client may keep control variates c_i, one for each tensor that it trains, zero at a task's beginning,
    and the server c, their mean over all clients; each round a client uploads how much its own have changed.
    """

    name: ClassVar[str] = ""
    keeps: ClassVar[bool] = False  # true: there are control variates

    def __post_init__(self) -> None:
        check_options(self)

    def added(self, now: Tree, start: Tree, own: Tree, server: Tree) -> Tree:
        """What is added to the gradients of the tensors ``now``, which were ``start`` as the round began.

        ``own`` and ``server``: control variates of the same names and shapes; empty without them.
        """
        return {}

    def renewed(self, gradient: Tree, own: Tree, server: Tree) -> Tree:
        """A client's control variates after a round; ``gradient`` is the mean of its steps' gradients."""
        return own

    def remark(self, training: Training) -> str:
        """What a reader of the results of a method that declares ``training`` must know."""
        return ""

    @property
    def uploads(self) -> Uploads:
        """What clients upload besides what their method declares."""
        return {CONTROL: whole("parameters")} if self.keeps else {}


@register_local_training("fedprox")
@dataclass(frozen=True)
class FedProx(LocalTraining):
    """FedProx (Li et al., MLSys 2020): mu/2 |y - x|^2 is added to the loss, x being what the server sent.

    All that a client trains counts. The loss that is shown is the method's own.
    """

    mu: float = option(0.01, "mu, weight of the squared distance; 0 changes nothing", low=0)

    def added(self, now: Tree, start: Tree, own: Tree, server: Tree) -> Tree:
        return {name: self.mu * (value - start[name]) for name, value in now.items()}


@register_local_training("scaffold")
@dataclass(frozen=True)
class Scaffold(LocalTraining):
    """SCAFFOLD (Karimireddy et al., ICML 2020), option II: c - c_i is added to a client's gradients.

    After a round c_i is the mean of the client's gradients as they were before that. For K steps of plain
    gradient descent at rate lr from x to y this is the paper's c_i - c + (x - y) / (K lr); said so, it also
    holds for momentum, weight decay, clipping and Adam, which get the changed gradients and for which the
    paper promises nothing. The method itself merges what is trained; c grows by |S|/N times the mean change
    over the |S| clients heard of N. Twice the bytes both ways.
    """

    keeps = True

    def added(self, now: Tree, start: Tree, own: Tree, server: Tree) -> Tree:
        return {name: server[name] - own[name] for name in now}

    def renewed(self, gradient: Tree, own: Tree, server: Tree) -> Tree:
        return gradient

    def remark(self, training: Training) -> str:
        others = {o.name for o in (*training.optims.values(), *training.balanced.values()) if not plain(o)}
        return f"control variates with {', '.join(sorted(others))}, made for plain descent" if others else ""


def plain(optim: Optim) -> bool:
    """Whether it is gradient descent without momentum."""
    return optim.name == "sgd" and not optim.momentum


def make_local_training(spec: str | None) -> LocalTraining:
    """A rule by ``NAME`` or ``NAME:VALUE``; one that changes nothing without a spec.

    Raises FczooError for an unknown name and for a value that does not fit.
    """
    rule: LocalTraining = LOCAL_TRAINING.create(spec) if spec else LocalTraining()
    return rule
