"""The way from the clients to the server: who is heard of, what honest clients protect, what hostile ones forge, what is admitted."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

from fczoo.core.errors import FczooError
from fczoo.core.method import Method
from fczoo.core.seeds import numpy_stream
from fczoo.core.tree import Tree, nbytes, select
from fczoo.core.types import Task
from fczoo.federation.batches import Client
from fczoo.federation.settings import Settings
from fczoo.security.attacks import Attackers
from fczoo.security.guard import Guard
from fczoo.security.outliers import leave_out
from fczoo.security.privacy import Privacy, disclosed


class Arrival(NamedTuple):
    """What reaches the server in a round or a survey."""

    payloads: list[Tree]  # the sound ones
    rejected: list[
        dict[str, Any]
    ]  # task, moment, client and reason of the others, and of what was left out of sound ones
    bytes: dict[str, int]  # of all uploads, by content
    uploads: int


@dataclass(frozen=True)
class Uplink:
    """The way up in one run with ``clients`` clients."""

    method: Method
    settings: Settings
    seed: int
    clients: int

    def check(self) -> None:
        """Raises FczooError where what is asked of the way cannot be had for the method."""
        _ = self.attackers, self.privacy
        if self.settings.outliers is not None and "class means" not in self.method.uploads.values():
            raise FczooError(
                f"--outliers looks at class means, of which {self.method.name} uploads none; leave it out, or see --aggregator"
            )

    @cached_property
    def attackers(self) -> Attackers:
        """The hostile clients. Raises FczooError for an unknown attack."""
        return Attackers.draw(
            self.settings.attack, self.settings.attackers, self.clients, self.method, self.seed
        )

    @cached_property
    def privacy(self) -> Privacy:
        """What honest clients do before they send. Raises FczooError where that cannot be kept for the method."""
        s = self.settings
        privacy = Privacy(self.seed, s.min_class_count, s.dp_clip, s.dp_noise, s.dp_delta)
        privacy.check(self.method)
        return privacy

    def heard(self, asked: Sequence[Client], task: Task, number: int) -> list[Client]:
        """Those of a round's clients that do not drop out."""
        rate = self.settings.drop_rate
        return [
            c
            for c in asked
            if not rate or numpy_stream("drop-out", self.seed, task.index, number, c.number).random() >= rate
        ]

    def arrive(
        self,
        sent: Sequence[Tree],
        heard: Sequence[Client],
        asked: Sequence[Client],
        shared: Tree,
        task: Task,
        moment: int | str,
        losses: Mapping[int, float] = MappingProxyType({}),
    ) -> Arrival:
        """What reaches the server of what ``heard`` sent; ``moment`` is the round's number or the survey's name.

        Raises Stopped when too few uploads are sound.
        """
        number = moment if isinstance(moment, int) else -1
        trained = select(shared, *self.method.optims()) if isinstance(moment, int) else {}
        sent = self.attackers.forge(self.privacy.protect(sent, trained, task, number), shared, task, number)
        by_number = {client.number: payload for client, payload in zip(heard, sent, strict=True)}
        sound, rejected = Guard(self.method, self.settings.min_clients).admit(
            by_number, [c.number for c in asked], trained, task, moment, losses
        )
        if self.settings.outliers is not None:
            sound, left = leave_out(sound, self.method.uploads, self.settings.outliers, task)
            said = {
                c: f"statistics of classes {', '.join(map(str, classes))} are far from the other clients'"
                for c, classes in left.items()
            }
            rejected += [
                {"task": task.index, "moment": moment, "client": c, "reason": reason}
                for c, reason in said.items()
            ]
        size = Counter[str]()
        for payload in sent:
            for content, names, _ in disclosed(self.method, payload):
                size[content] += nbytes({name: payload[name] for name in names})
        return Arrival(sound, rejected, dict(size), sum(1 for p in sent if p))
