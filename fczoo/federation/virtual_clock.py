"""Virtual clock: hours that a run would take on its clients' devices, counted and not measured.

The time of a client in an exchange is that of the bytes that it receives, of its floating-point
operations, and of the bytes that it sends. No figure depends on the machine of the simulation.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fczoo.core.backbone import Backbone
from fczoo.core.payload import Payload
from fczoo.core.tree import nbytes
from fczoo.data.views import ConstantFeatures
from fczoo.federation.batches import Client
from fczoo.federation.client import ClientRequest, ClientRuntime
from fczoo.federation.client_devices import ClientDevices
from fczoo.federation.client_engine import ClientEngine
from fczoo.federation.local_trainer import skip_steps
from fczoo.federation.result import Result
from fczoo.federation.settings import Settings
from fczoo.federation.uplink import Arrival
from fczoo.security.upload_validation import LATE


class RoundClose(NamedTuple):
    """End of a round on the virtual clock."""

    uploads: list[Payload]  # those that the server takes
    sampled: list[Client]  # without those whose uploads the server does not need
    late: dict[int, str]  # client -> reason why its upload is left out
    seconds: float  # of the round


@dataclass(frozen=True)
class VirtualClock:
    """Clock of a run; without ``devices`` it counts nothing and leaves no client out."""

    settings: Settings
    devices: ClientDevices | None
    backbone: Backbone

    def work(
        self, engine: ClientEngine, request: ClientRequest, clients: Sequence[Client]
    ) -> dict[int, float]:
        """Count the floating-point operations of each client in an exchange that begins.

        One image of the first client is measured, and multiplied by the images of each client, so
        that groups and devices of the simulation do not matter. Only products count, as in a dry
        run. The query feature of an image, which clients cache, counts once per exchange.

        Args:
            engine: Engine of the task's clients; it does not change.
            request: Request of the exchange.
            clients: Clients that respond to it.
        """
        if self.devices is None or not clients:
            return {}
        sample = replace(clients[0], index=clients[0].index[:1])
        trainer = replace(
            engine.trainer,
            store=ConstantFeatures.like(engine.store),
            plan=replace(engine.plan, batch_size=1),
            make_optimizers=skip_steps,
        )
        runtime = ClientRuntime(trainer)
        with _count_operations() as counter:
            runtime.answer(request, [sample], engine.client_state.select([sample.number]))
        per_image = counter.get_total_flops() / _image_count(engine, request, sample)
        if "query" in engine.method.training().inputs:
            per_image += self._query_flops
        return {c.number: per_image * _image_count(engine, request, c) for c in clients}

    @cached_property
    def _query_flops(self) -> int:
        """Return the operations of one image in the frozen backbone."""
        side = self.backbone.config.image_size
        image = torch.zeros(
            1, 3, side, side, dtype=self.backbone.dtype, device=self.backbone.device
        )
        with _count_operations() as counter:
            self.backbone(image)
        return int(counter.get_total_flops())

    def seconds(
        self, work: Mapping[int, float], down: Mapping[int, int], up: Mapping[int, int]
    ) -> dict[int, float]:
        """Return the seconds of each client from its operations and bytes.

        Args:
            work: Operations of each client, see ``work``.
            down: Bytes that each client receives.
            up: Bytes that each client sends.
        """
        if self.devices is None:
            return {}
        return {
            client: self.devices.device_of(client).seconds(
                flops, down.get(client, 0), up.get(client, 0)
            )
            for client, flops in work.items()
        }

    def wait(
        self,
        result: Result,
        work: Mapping[int, float],
        down: Mapping[int, int],
        arrival: Arrival | None,
    ) -> None:
        """Add the seconds of the slowest client at a task boundary; None: no client sends."""
        seconds = self.seconds(work, down, arrival.by_client if arrival else {})
        result.virtual_seconds += max(seconds.values(), default=0.0)

    def record(self, result: Result) -> dict[str, float]:
        """Return the time of the clock for a round's record; empty without devices."""
        return {"virtual_seconds": result.virtual_seconds} if self.devices else {}

    def close_round(
        self,
        work: Mapping[int, float],
        down: Mapping[int, int],
        uploads: list[Payload],
        sampled: list[Client],
        needed: int,
    ) -> RoundClose:
        """Close a round when ``needed`` clients have finished, or at the deadline.

        Without a deadline the server waits for the first ``needed`` clients that respond. With a
        deadline it also waits for clients that drop out, until the deadline.
        """
        up = {upload.client: nbytes(upload.tensors) for upload in uploads}
        seconds, deadline = self.seconds(work, down, up), self.settings.deadline or math.inf
        in_time = sorted((s, client) for client, s in seconds.items() if s <= deadline)
        first = {client: s for s, client in in_time[:needed]}
        surplus = {client for _, client in in_time[needed:]}
        late = {
            client: f"{LATE}: {s:.4g} s, the deadline is {deadline:g} s"
            for client, s in seconds.items()
            if s > deadline
        }
        waits_for_deadline = len(first) < min(needed, len(sampled)) and deadline < math.inf
        return RoundClose(
            [u for u in uploads if u.client not in late and u.client not in surplus],
            [client for client in sampled if client.number not in surplus],
            late,
            deadline if waits_for_deadline else max(first.values(), default=0.0),
        )


@contextmanager
def _count_operations() -> Iterator[FlopCounterMode]:
    """Count operations, by the attention kernel whose operations torch counts on every device."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        yield counter


def _image_count(engine: ClientEngine, request: ClientRequest, client: Client) -> int:
    """Return the number of images of a client's pass, or of each of its epochs."""
    if request.boundary:
        return len(client.index)
    memory = engine.memories.get(client.number, {})
    return len(engine.trainer.training_indices(client, memory, request.ctx))
