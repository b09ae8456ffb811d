"""Server optimizers (``--server-optimizer``): steps along the average change of the clients.

The pseudo-gradient of a round is the averaged trained tensors minus those that the server sent
(Reddi et al., ICLR 2021, algorithm 2). Statistics have no pseudo-gradient and are merged as usual.
In each task the moments start again, because its data differ and tensors may have been replaced:
the first moment at 0, the second moment of the adaptive optimizers at tau^2.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fczoo.core.errors import FczooError
from fczoo.core.options import check_options, option
from fczoo.core.registry import SERVER_OPTIMIZERS, register_server_optimizer
from fczoo.core.tree import Tree

MOMENTS = "server_optimizer."
"""Prefix of the moments in the server's state on disk."""


@dataclass(frozen=True)
class ServerOptimizer:
    """Optimizer of the server: a pure function of the average change and the moments."""

    name: ClassVar[str] = ""

    def __post_init__(self) -> None:
        check_options(self)

    def step(self, change: Tensor, moments: Tree) -> tuple[Tensor, Tree]:
        """Return the step to add to a tensor, and the new moments by name.

        ``change`` is the average change of the tensor. ``moments`` are those after the previous
        round of the task; empty in the first.
        """
        raise TypeError(f"{self.name} does not define step()")


@register_server_optimizer("fedavgm")
@dataclass(frozen=True)
class FedAvgM(ServerOptimizer):
    """FedAvgM (Hsu et al., 2019): momentum m = beta m + change; the model moves by lr m."""

    momentum: float = option(0.9, "beta, momentum; 0 with lr=1: plain average", low=0, high=1)
    lr: float = option(1.0, "learning rate of the server", low=0)

    def step(self, change: Tensor, moments: Tree) -> tuple[Tensor, Tree]:
        m = self.momentum * moments["m"] + change if moments else change
        return self.lr * m, {"m": m}


@dataclass(frozen=True)
class AdaptiveOptimizer(ServerOptimizer):
    """Algorithm 2 of Reddi et al. (2021), without bias correction.

    m = beta1 m + (1 - beta1) change starts at 0, and v at tau^2. The model moves by
    lr m / (sqrt(v) + tau).
    """

    lr: float = option(0.01, "learning rate of the server", low=0)
    beta1: float = option(0.9, "decay of the first moment", low=0, high=1)
    tau: float = option(1e-3, "tau, degree of adaptivity; v starts at its square", low=1e-12)

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        """Return the new v for the square of the average change."""
        raise TypeError(f"{self.name} does not define second_moment()")

    def step(self, change: Tensor, moments: Tree) -> tuple[Tensor, Tree]:
        m = moments["m"] if moments else torch.zeros_like(change)
        v = moments["v"] if moments else torch.full_like(change, self.tau**2)
        m = self.beta1 * m + (1 - self.beta1) * change
        v = self.second_moment(v, change.square())
        return self.lr * m / (v.sqrt() + self.tau), {"m": m, "v": v}


@register_server_optimizer("fedadam")
@dataclass(frozen=True)
class FedAdam(AdaptiveOptimizer):
    """FedAdam (Reddi et al., ICLR 2021): v = beta2 v + (1 - beta2) change^2."""

    beta2: float = option(0.99, "decay of the second moment", low=0, high=1)

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * square


@register_server_optimizer("fedyogi")
@dataclass(frozen=True)
class FedYogi(FedAdam):
    """FedYogi (Reddi et al., ICLR 2021): v = v - (1 - beta2) change^2 sign(v - change^2)."""

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return v - (1 - self.beta2) * square * (v - square).sign()


@register_server_optimizer("fedadagrad")
@dataclass(frozen=True)
class FedAdagrad(AdaptiveOptimizer):
    """FedAdagrad (Reddi et al., ICLR 2021): v = v + change^2, without momentum by default."""

    beta1: float = option(0.0, "decay of the first moment", low=0, high=1)

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return v + square


def make_server_optimizer(spec: str | None) -> ServerOptimizer | None:
    """Create a server optimizer from ``NAME`` or ``NAME:VALUE``; None without a spec.

    Raises FczooError for an unknown name and for a value that does not fit.
    """
    optimizer: ServerOptimizer | None = SERVER_OPTIMIZERS.create(spec) if spec else None
    return optimizer


def step_server(
    optimizer: ServerOptimizer | None, moments: Tree, merged: Tree, sent: Tree, method: str
) -> tuple[Tree, Tree]:
    """Return the merged tensors after the server's step, and the moments after it.

    Only trained tensors have a step. ``sent`` are the trained tensors as the server sent them, and
    ``moments`` are ``m.NAME`` and ``v.NAME`` of each. Raises FczooError for a method that does not
    average them.
    """
    if optimizer is None:
        return merged, moments
    out, moments = dict(merged), dict(moments)
    for name, start in sent.items():
        if name not in merged or merged[name].shape != start.shape:
            raise FczooError(
                f"--server-optimizer needs averages of the trained tensors, but {method} does not "
                f"average {name}; leave it out"
            )
        own = {k: moments[f"{k}.{name}"] for k in ("m", "v") if f"{k}.{name}" in moments}
        step, new = optimizer.step(merged[name].to(start) - start, own)
        out[name] = start + step
        moments |= {f"{key}.{name}": value for key, value in new.items()}
    return out, moments
