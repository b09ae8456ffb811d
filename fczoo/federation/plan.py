"""How clients train, of all that a run's settings say."""

from dataclasses import dataclass

import torch

from fczoo.data.views import Augment, get_augment
from fczoo.federation.settings import Settings

TOGETHER_LIMIT = 4_000_000
"""Trained scalars a client, above which clients train one at a time unless told otherwise."""


@dataclass(frozen=True)
class Plan:
    """How clients train."""

    epochs: int
    batch_size: int
    augment: Augment
    seed: int
    together: int = 1  # clients that share one forward
    cache_queries: bool = False  # query features of the test view, also where training views are random
    pass_size: int = 64  # batch of passes without training
    offload: bool = False  # payloads wait in host memory, so that the device holds one client at a time


def plan_of(settings: Settings, seed: int, device: torch.device, clients: int, trained_scalars: int) -> Plan:
    """The plan of a run of ``clients`` clients, each of which trains so many numbers."""
    s, accelerated = settings, device.type == "cuda"
    return Plan(
        s.epochs,
        s.batch_size,
        get_augment(s.augment),
        seed,
        group_size(s, device, clients, trained_scalars),
        s.cache_queries,
        256 if accelerated else 64,
        accelerated and trained_scalars > TOGETHER_LIMIT,
    )


def group_size(settings: Settings, device: torch.device, clients: int, trained_scalars: int) -> int:
    """Clients that share a forward."""
    if settings.together == "auto":
        return clients if device.type == "cuda" and trained_scalars <= TOGETHER_LIMIT else 1
    return settings.together
