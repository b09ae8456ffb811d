"""How clients train, of all that a run's settings say."""

from dataclasses import dataclass
from typing import Literal

import torch

from fczoo.data.views import Augment, get_augment
from fczoo.federation.settings import Settings

TOGETHER_LIMIT = 4_000_000
"""Trained scalars a client, above which clients train one at a time unless told otherwise."""
MEMORY_LIMIT = 250_000_000
"""Trained scalars of all clients of a round, above which their uploads wait on a disk: 1 GB in float32."""


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
    # where payloads wait for the merge: elsewhere than on the device, that holds one client at a time
    waiting: Literal["device", "host", "disk"] = "device"


def plan_of(settings: Settings, seed: int, device: torch.device, clients: int, trained_scalars: int) -> Plan:
    """The plan of a run of ``clients`` clients, each of which trains so many numbers."""
    s, accelerated = settings, device.type == "cuda"
    waiting: Literal["device", "host", "disk"] = "device"
    if s.drawn(clients) * trained_scalars > MEMORY_LIMIT:
        waiting = "disk"
    elif accelerated and trained_scalars > TOGETHER_LIMIT:
        waiting = "host"
    return Plan(
        s.epochs,
        s.batch_size,
        get_augment(s.augment),
        seed,
        group_size(s, device, clients, trained_scalars),
        s.cache_queries,
        256 if accelerated else 64,
        waiting,
    )


def group_size(settings: Settings, device: torch.device, clients: int, trained_scalars: int) -> int:
    """Clients that share a forward."""
    if settings.together == "auto":
        return clients if device.type == "cuda" and trained_scalars <= TOGETHER_LIMIT else 1
    return settings.together
