"""Rules of local training: terms of gradients or loss, client states, and parts of the merge."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.core.options import check_options, option
from fczoo.core.payload import Payload, Uploads, whole_tensors
from fczoo.core.registry import LOCAL_TRAINING, register_local_training
from fczoo.core.training import Optim, Training
from fczoo.core.tree import Tree
from fczoo.core.types import Batch, ServerAggregator
from fczoo.federation.batches import LocalTrainState

CONTROL = "control_variate."
"""Prefix of what clients and the server send of control variates, before the name of a trained
tensor.
"""
STEPS = "local_steps"
"""Name of the number of a client's local steps in its upload."""
RULE_UPLOADS = CONTROL, STEPS
"""Prefixes of what rules add to uploads; no method sees them."""
OLD_RULE_NAMES = {
    "new_control_variates": "new_client_tree, with uploads_tree = True",
    "keeps": "has_client_tree",
    "shares": "uploads_tree",
}


@dataclass(frozen=True)
class LocalRule:
    """Rule of local training: a term of the gradients or the loss, and a state of each client.

    With ``has_client_tree`` each client and the server store a tree with the names of the trained
    tensors, empty at the start of a task. With ``uploads_tree`` these trees are control variates
    c_i and c: a client uploads the change of its variate in every round, and the server sends c,
    their mean over all clients.
    """

    name: ClassVar[str] = ""
    has_client_tree: ClassVar[bool] = False
    uploads_tree: ClassVar[bool] = False
    reads_features: ClassVar[bool] = False  # true: ``loss_term`` compares features
    corrects_model: ClassVar[bool] = False  # true: the server moves the averaged model further

    def __init_subclass__(cls) -> None:
        """Raise TypeError for an old name of a function or attribute."""
        super().__init_subclass__()
        for old, new in OLD_RULE_NAMES.items():
            if old in vars(cls):
                raise TypeError(f"{cls.__name__}.{old} is now {new}")

    def __post_init__(self) -> None:
        check_options(self)

    def gradient_term(self, current: Tree, start: Tree, client_tree: Tree, server: Tree) -> Tree:
        """Return the term added to the gradients of the tensors ``current``.

        They were ``start`` at the beginning of the round.

        ``client_tree`` and ``server`` are the trees of client and server. Missing tensors are zero;
        both trees are empty for a rule without ``has_client_tree``.
        """
        return {}

    def loss_term(
        self, features: Callable[[Tree], Tensor], train: Tree, previous: Tree, batch: Batch
    ) -> Tensor:
        """Return the term added to the loss, with ``reads_features``.

        ``features`` computes the features [B, D] of the batch under trained tensors, or under the
        broadcast for {}. ``previous`` are the client's tensors after its last round of the task.
        """
        raise TypeError(f"{self.name} reads features but does not define loss_term()")

    def new_client_tree(
        self, current: Tree, start: Tree, gradient: Tree, client_tree: Tree, server: Tree
    ) -> Tree:
        """Return a client's tree after a round that took its tensors from ``start`` to ``current``.

        ``gradient`` is the mean over its steps; empty without ``uploads_tree``.
        """
        return client_tree

    def change_of(self, upload: Payload, start: Tree) -> Tree:
        """Return the change of a client's tree, as the server reads it from the upload."""
        return {}

    def adapt_uploads(
        self, payloads: Sequence[Payload], start: Tree, average: ServerAggregator
    ) -> list[Payload]:
        """Return the uploads as the method merges them; clients started from ``start``."""
        return [payload.drop(*RULE_UPLOADS) for payload in payloads]

    def correct_merged(self, merged: Tree, server: Tree) -> Tree:
        """Return the merged tensors; a rule with ``corrects_model`` moves them further."""
        return merged

    def table_note(self, training: Training) -> str:
        """Return the note below tables for a method that declares ``training``."""
        return ""

    @property
    def uploads(self) -> Uploads:
        """Return the uploads of clients that the rule adds to those of the method."""
        return {CONTROL: whole_tensors("parameters")} if self.uploads_tree else {}


@register_local_training("fedprox")
@dataclass(frozen=True)
class FedProx(LocalRule):
    """FedProx (Li et al., MLSys 2020).

    mu/2 |y - x|^2 is added to the loss; y are all tensors that a client trains, x their values when
    the server sent them. The reported loss is without this term.
    """

    mu: float = option(0.01, "mu, weight of the squared distance; 0 changes nothing", low=0)

    def gradient_term(self, current: Tree, start: Tree, client_tree: Tree, server: Tree) -> Tree:
        return {name: self.mu * (value - start[name]) for name, value in current.items()}


@register_local_training("scaffold")
@dataclass(frozen=True)
class Scaffold(LocalRule):
    """SCAFFOLD (Karimireddy et al., ICML 2020), option II.

    c - c_i is added to a client's gradients. After a round c_i is the mean of the client's
    gradients without this term. For K steps of plain gradient descent at rate lr from x to y it is
    the paper's c_i - c + (x - y) / (K lr). The mean of gradients is also defined for momentum,
    weight decay, clipping and Adam, which the paper does not cover. The method merges the trained
    tensors; c grows by |S|/N times the mean change of c_i, where S are those of the N clients that
    respond. Uploads and broadcasts have twice the bytes.
    """

    has_client_tree = True
    uploads_tree = True

    def gradient_term(self, current: Tree, start: Tree, client_tree: Tree, server: Tree) -> Tree:
        return {name: server[name] - client_tree[name] for name in current}

    def new_client_tree(
        self, current: Tree, start: Tree, gradient: Tree, client_tree: Tree, server: Tree
    ) -> Tree:
        return gradient

    def change_of(self, upload: Payload, start: Tree) -> Tree:
        return {k.removeprefix(CONTROL): v for k, v in upload.only(CONTROL).items()}

    def table_note(self, training: Training) -> str:
        return _optimizer_note("control variates", training)


@register_local_training("fednova")
@dataclass(frozen=True)
class FedNova(LocalRule):
    """FedNova (Wang et al., NeurIPS 2020): the change of each client counts per local step.

    The change d_k of a client with tau_k steps is merged as tau_eff / tau_k d_k. tau_eff is the
    mean of tau_k, with the weights that the method's average gives the clients. So clients with
    more steps no longer pull the model to their own optimum; with equal numbers of steps nothing
    changes. A client uploads its number of steps.
    """

    def adapt_uploads(
        self, payloads: Sequence[Payload], start: Tree, average: ServerAggregator
    ) -> list[Payload]:
        mean_steps = average([payload.only(STEPS) for payload in payloads])[STEPS]
        uploads = []
        for payload in payloads:
            factor = float(mean_steps.clamp(min=1) / payload[STEPS].clamp(min=1))
            changes = {
                name: start[name].to(value) + factor * (value - start[name].to(value))
                for name, value in payload.items()
                if name in start and factor != 1
            }
            uploads.append(payload.holding({**payload.drop(STEPS).tensors, **changes}))
        return uploads

    def table_note(self, training: Training) -> str:
        return _optimizer_note("normalisation by steps", training)

    @property
    def uploads(self) -> Uploads:
        return {STEPS: whole_tensors("counts")}


@register_local_training("feddyn")
@dataclass(frozen=True)
class FedDyn(LocalRule):
    """FedDyn (Acar et al., ICLR 2021): local losses that have the global optimum in common.

    alpha/2 |y - x|^2 - <h_k, y> is added to the loss of client k; y are the tensors that it trains,
    x their values when the server sent them. After a round h_k falls by alpha (y - x). The server's
    h falls by alpha/N times the sum of y - x over the clients that respond, of N in all, and its
    model is the method's average minus h / alpha. All h start at zero in each task. No additional
    bytes are sent.
    """

    has_client_tree = True
    corrects_model = True

    alpha: float = option(0.01, "alpha, weight of the squared distance", low=1e-12)

    def gradient_term(self, current: Tree, start: Tree, client_tree: Tree, server: Tree) -> Tree:
        return {k: self.alpha * (value - start[k]) - client_tree[k] for k, value in current.items()}

    def new_client_tree(
        self, current: Tree, start: Tree, gradient: Tree, client_tree: Tree, server: Tree
    ) -> Tree:
        return {k: client_tree[k] - self.alpha * (value - start[k]) for k, value in current.items()}

    def change_of(self, upload: Payload, start: Tree) -> Tree:
        return {
            k: -self.alpha * (upload[k] - v.to(upload[k])) for k, v in start.items() if k in upload
        }

    def correct_merged(self, merged: Tree, server: Tree) -> Tree:
        correction = {k: h / self.alpha for k, h in server.items() if k in merged}
        return {**merged, **{k: merged[k] - v.to(merged[k]) for k, v in correction.items()}}


@register_local_training("moon")
@dataclass(frozen=True)
class Moon(LocalRule):
    """MOON (Li et al., CVPR 2021): features like the global model's, unlike the client's last.

    mu times -log(e^(s_glob/tau) / (e^(s_glob/tau) + e^(s_prev/tau))) is added to the loss of each
    image. s_glob and s_prev are cosines of its feature to those under the server's model and under
    the client's own model, as it was after its previous round of the task. In a client's first
    round both are the server's model, and nothing is added to the gradient. The features are the
    method's, without the paper's projection head. The reported loss is without this term.
    """

    has_client_tree = True
    reads_features = True

    mu: float = option(1.0, "mu, weight of the contrastive loss; 0 changes nothing", low=0)
    temperature: float = option(0.5, "tau, temperature of the cosines", low=1e-6)

    def loss_term(
        self, features: Callable[[Tree], Tensor], train: Tree, previous: Tree, batch: Batch
    ) -> Tensor:
        with torch.no_grad():
            z_global, z_previous = features({}), features(previous)
        z = features(train)
        gap = F.cosine_similarity(z, z_previous) - F.cosine_similarity(z, z_global)
        return self.mu * batch.mean(F.softplus(gap / self.temperature))

    def new_client_tree(
        self, current: Tree, start: Tree, gradient: Tree, client_tree: Tree, server: Tree
    ) -> Tree:
        return dict(current)


def _optimizer_note(rule: str, training: Training) -> str:
    """Note that a rule is for plain gradient descent, if clients train with other optimizers."""
    optims = (*training.optims.values(), *training.balanced.values())
    others = {o.name.replace("sgd", "sgd with momentum") for o in optims if not is_plain_sgd(o)}
    note = f"{rule}: for plain gradient descent, but clients train with {', '.join(sorted(others))}"
    return note if others else ""


def is_plain_sgd(optim: Optim) -> bool:
    """Return whether an optimizer is gradient descent without momentum."""
    return optim.name == "sgd" and not optim.momentum


def frozen_features_message(rule: str, method: str) -> str:
    """Return the message that a rule which reads features does not work with a method."""
    return (
        f"--local {rule} compares features that clients train, "
        f"but those of {method} are frozen; leave out --local"
    )


def make_local_training(spec: str | None) -> LocalRule:
    """Create a rule from ``NAME`` or ``NAME:VALUE``; without a spec, one that changes nothing.

    Raises FczooError for an unknown name and for a value that does not fit.
    """
    rule: LocalRule = LOCAL_TRAINING.create(spec) if spec else LocalRule()
    return rule


@dataclass
class ControlVariates:
    """A rule of local training with the trees of the server and of each client.

    The trees have the names of trained tensors; a missing tensor is zero.
    """

    rule: LocalRule = field(default_factory=LocalRule)
    server: Tree = field(default_factory=dict)
    clients: dict[int, Tree] = field(default_factory=dict)

    def clear(self) -> None:
        """Set all trees to zero at the start of a task."""
        self.server, self.clients = {}, {}

    @property
    def shared(self) -> Tree:
        """Return the server's tree where clients receive it, by names of trained tensors."""
        return self.server if self.rule.uploads_tree else {}

    @property
    def broadcast(self) -> Tree:
        """Return the control variates that the server sends; empty while all are zero."""
        return {f"{CONTROL}{name}": value for name, value in self.shared.items()}

    def previous(self, learner: LocalTrainState) -> Tree:
        """Return the client's tensors for ``loss_term``; those that the server sent at first."""
        if not self.rule.reads_features:
            return {}
        return {**learner.start, **self.clients.get(learner.client.number, {})}

    @torch.no_grad()
    def correct(self, learner: LocalTrainState) -> None:
        """Add the rule's term to the gradients of a client's step.

        Tensors without a gradient get no term.
        """
        gradients = {
            name: leaf.grad for name, leaf in learner.leaves.items() if leaf.grad is not None
        }
        if self.rule.uploads_tree:
            for name, gradient in gradients.items():
                total = learner.gradients.get(name)
                learner.gradients[name] = gradient.clone() if total is None else total + gradient
        tensors = {name: learner.leaves[name].detach() for name in gradients}
        for name, value in self.rule.gradient_term(
            tensors, learner.start, *self._trees(learner, tensors)
        ).items():
            gradients[name].add_(value)

    @torch.no_grad()
    def update_client_tree(self, learner: LocalTrainState) -> Tree:
        """Update the tree of a trained client and return the rule's part of its upload."""
        steps, number = len(learner.queue), learner.client.number
        upload: Tree = {}
        if STEPS in self.rule.uploads:
            upload[STEPS] = torch.tensor(float(steps), device=_device(learner.start))
        if not self.rule.has_client_tree:
            return upload
        current, gradient = learner.trained_tensors, Tree()
        if self.rule.uploads_tree:
            gradient = {
                name: learner.gradients[name] / steps
                if name in learner.gradients
                else torch.zeros_like(value)
                for name, value in current.items()
            }
        client_tree, server = self._trees(learner, current)
        new = self.rule.new_client_tree(current, learner.start, gradient, client_tree, server)
        if self.rule.uploads_tree:
            changes = {name: value - client_tree[name] for name, value in new.items()}
            upload |= {f"{CONTROL}{name}": change for name, change in changes.items()}
            # as the server adds them
            new = {k: client_tree[k] + change for k, change in changes.items()}
        self.clients[number] = {**self.clients.get(number, {}), **new}
        return upload

    def update_server_tree(
        self, payloads: Sequence[Payload], start: Tree, clients: int, average: ServerAggregator
    ) -> None:
        """Add the clients' changes at the server: |S|/N of their mean over the |S| uploads.

        ``start`` are the tensors from which the clients trained. All clients have equal weights.
        """
        changes = [Payload(self.rule.change_of(p, start), p.client) for p in payloads]
        if not changes or not changes[0]:
            return
        server = dict(self.server)
        for name, change in average(changes).items():
            part = len(payloads) / clients * change
            server[name] = server[name] + part.to(server[name]) if name in server else part
        self.server = server

    def _trees(self, learner: LocalTrainState, like: Tree) -> tuple[Tree, Tree]:
        """Return the client's and the server's tree for some tensors."""
        if not self.rule.has_client_tree:
            return {}, {}
        pair = [
            {k: _or_zero(tree.get(k), v) for k, v in like.items()}
            for tree in (self.clients.get(learner.client.number, {}), self.server)
        ]
        return pair[0], pair[1]


def _device(tree: Tree) -> torch.device:
    return next(iter(tree.values())).device


def _or_zero(value: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if value is None else value.to(like)
