"""The optimizers of a group of clients."""

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from fczoo.core.schedules import LOCAL, SCHEDULES
from fczoo.core.tree import Tree
from fczoo.core.types import Context, Optim


class Steps(Protocol):
    """What moves the tensors that a group of clients trains."""

    def step(self, progress: list[float], clip: float | None) -> None: ...


class Still:
    """Leaves all tensors as they are, for measuring a step: torch's optimizers take a second to import."""

    def __init__(self, optims: Mapping[str, Optim], leaves: list[Tree], ctx: Context):
        pass

    def step(self, progress: list[float], clip: float | None) -> None:
        """Nothing moves."""


class Optimizers:
    """torch.optim over every client's leaves: one optimizer a kind, one group a prefix.

    Where the rate changes inside a round, one group a prefix and client, since clients go through their
    epochs at different speeds.
    """

    def __init__(self, optims: Mapping[str, Optim], leaves: list[Tree], ctx: Context):
        self.leaves, self.ctx = leaves, ctx
        groups: dict[str, list[dict[str, Any]]] = {"adam": [], "adamw": [], "sgd": []}
        for prefix, optim in optims.items():
            own = [[v for k, v in tree.items() if owner(k, optims) == prefix] for tree in leaves]
            if not own[0]:
                raise TypeError(f"training() trains {prefix!r}, but the state has no such tensor")
            base = {
                "lr": optim.lr,
                "weight_decay": optim.weight_decay,
                "base": optim.lr,
                "schedule": optim.schedule,
            }
            if optim.name == "sgd":
                base["momentum"] = optim.momentum
            if optim.schedule in LOCAL:
                groups[optim.name] += [
                    {**base, "params": tensors, "client": i} for i, tensors in enumerate(own)
                ]
            else:
                groups[optim.name].append(
                    {**base, "params": [v for tensors in own for v in tensors], "client": 0}
                )
        kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
        self.optimizers = [kinds[name](members) for name, members in groups.items() if members]

    def step(self, progress: list[float], clip: float | None) -> None:
        """One step of the clients that still train; ``progress`` is the part of their steps that is done."""
        if clip is not None:
            for tree in self.leaves[: len(progress)]:
                torch.nn.utils.clip_grad_norm_(tree.values(), clip)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                if group["client"] < len(progress):
                    factor = SCHEDULES[group["schedule"]](
                        self.ctx.round, self.ctx.rounds, progress[group["client"]]
                    )
                    group["lr"] = group["base"] * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def owner(name: str, optims: Mapping[str, Optim]) -> str:
    """The longest prefix of a tensor's name, whose optimizer trains it."""
    return max((p for p in optims if name.startswith(p)), key=len)
