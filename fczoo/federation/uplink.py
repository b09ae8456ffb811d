"""The way from the clients to the server.

Who is heard of, what honest clients protect, what hostile ones forge, and what is admitted.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

from fczoo.core.errors import FczooError
from fczoo.core.method import Method
from fczoo.core.payload import Payload, content_of, contents
from fczoo.core.seeds import numpy_stream
from fczoo.core.tree import Tree, select
from fczoo.core.types import Exchange, Training
from fczoo.federation.batches import Client
from fczoo.federation.local_training import LocalTraining, make_local_training
from fczoo.federation.settings import Settings
from fczoo.federation.sums import Total
from fczoo.security.attacks import Attackers
from fczoo.security.guard import Guard
from fczoo.security.outliers import far_apart, leave_out, with_means
from fczoo.security.privacy import Privacy, bytes_by_content
from fczoo.security.statistics import centred, check_centre


class Arrival(NamedTuple):
    """What reaches the server in a round or a survey."""

    payloads: list[Payload]  # the sound ones
    rejected: list[dict[str, Any]]  # task, moment, client, reason: what was turned away, in whole or in part
    bytes: dict[str, int]  # of all uploads, by content
    uploads: int
    far: list[int]  # clients whose class statistics are far from the others' and are used all the same


@dataclass(frozen=True)
class Uplink:
    """The way up in one run with ``clients`` clients."""

    method: Method
    settings: Settings
    seed: int
    clients: int

    def check(self) -> None:
        """Raises FczooError where what is asked of the way cannot be had for the method."""
        uploads, rule = self.method.training().uploads, self.rule
        if self.settings.local and not self.training.trained:
            raise FczooError(
                f"--local {self.settings.local} is about training, and {self.method.name} trains nothing; "
                f"leave it out"
            )
        if self.settings.dp_clip is not None and rule.keeps:
            raise FczooError(
                f"--dp-clip covers updates of parameters, but --local {self.settings.local} also uploads "
                f"control variates; leave one out"
            )
        _ = self.attackers, self.privacy
        if self.settings.outliers is not None and "second moments" in contents(uploads):
            raise FczooError(
                f"--outliers cannot look into the second moments over all classes that {self.method.name} "
                f"uploads; leave it out"
            )
        if self.settings.outliers is not None and not with_means(uploads):
            raise FczooError(
                f"--outliers looks at class means, of which {self.method.name} uploads none; "
                f"leave it out, or see --aggregator"
            )

        if self.settings.merge_statistics is not None:
            uploads = self.method.training().uploads
            check_centre(self.settings.merge_statistics, self.method.name, uploads)

    @cached_property
    def rule(self) -> LocalTraining:
        """How clients train. Raises FczooError for an unknown rule."""
        return make_local_training(self.settings.local)

    @cached_property
    def training(self) -> Training:
        """What the method declares, with what clients upload besides for the rule of local training."""
        training = self.method.training()
        return replace(training, uploads={**training.uploads, **self.rule.uploads})

    @cached_property
    def attackers(self) -> Attackers:
        """The hostile clients. Raises FczooError for an unknown attack."""
        return Attackers.draw(
            self.settings.attack, self.settings.attackers, self.clients, self.training, self.seed
        )

    @cached_property
    def privacy(self) -> Privacy:
        """What honest clients do before they send. Raises FczooError where the method does not allow it."""
        s = self.settings
        privacy = Privacy(
            self.seed, s.min_class_count, s.dp_clip, s.dp_noise, s.dp_delta, s.dp_secure, s.dp_subsampling
        )
        privacy.check(self.method)
        return privacy

    def heard(self, asked: Sequence[Client], exchange: Exchange) -> list[Client]:
        """Those of a round's clients that do not drop out."""
        rate, task = self.settings.drop_rate, exchange.task.index
        if not rate:
            return list(asked)
        draws = [numpy_stream("drop-out", self.seed, task, exchange.round, c.number).random() for c in asked]
        return [client for client, draw in zip(asked, draws, strict=True) if draw >= rate]

    def arrive(
        self,
        sent: Sequence[Payload],
        asked: Sequence[Client],
        shared: Tree,
        exchange: Exchange,
        losses: Mapping[int, float] = MappingProxyType({}),
    ) -> Arrival:
        """What reaches the server of what clients sent. Raises Stopped when too few uploads are sound."""
        training, trained = self.training, self._trained(shared, exchange)
        sent = self._sent(sent, shared, exchange)
        guard = Guard(self.method.name, training, self.settings.min_clients)
        by_client = {payload.client: payload for payload in sent}
        images = {c.number: len(c.index) for c in asked}
        sound, rejected = guard.admit(by_client, images, trained, exchange, losses)
        if self.settings.outliers is not None:
            sound, left = leave_out(sound, training.uploads, self.settings.outliers, exchange.task)
            for client, classes in left.items():
                named = ", ".join(map(str, classes))
                reason = f"statistics of classes {named} are far from the other clients'"
                about = {"task": exchange.task.index, "moment": exchange.moment}
                rejected.append({**about, "client": client, "reason": reason})
        far = far_apart(sound, training.uploads, exchange.task)
        if self.settings.merge_statistics is not None:
            sound = centred(sound, training.uploads, self.settings.merge_statistics, exchange.task)
        return Arrival(sound, rejected, bytes_by_content(training, sent), sum(1 for p in sent if p), far)

    @property
    def folds(self) -> bool:
        """Whether a survey's second moments, which are large, are added up as they arrive.

        They are not where the server keeps clients apart, or compares them before it adds them up.
        """
        compares = self.settings.outliers is not None or self.settings.merge_statistics is not None
        return "second moments" in contents(self.training.uploads) and not (
            self.training.separate or compares
        )

    def collect(
        self,
        sent: Iterable[Payload],
        asked: Sequence[Client],
        shared: Tree,
        exchange: Exchange,
        form: Payload,
    ) -> tuple[Arrival, Tree]:
        """As ``arrive``, client by client: what reaches the server but second moments, and their total.

        Each upload is compared with ``form``, one that nobody sends, and not with the others.
        """
        training, guard = self.training, Guard(self.method.name, self.training, self.settings.min_clients)
        large = [n for n in form if content_of(n, training.trained, training.uploads) == "second moments"]
        images, total = {c.number: len(c.index) for c in asked}, Total()
        size, sound, reasons = Counter[str](), list[Payload](), dict[int, str]()
        uploads = 0
        for payload in sent:
            (arrived,) = self._sent([payload], shared, exchange)
            size.update(bytes_by_content(training, [arrived]))
            uploads += bool(arrived)
            if reason := guard.fault(arrived, payload.client, images[payload.client], form, exchange.task):
                reasons[payload.client] = reason
            else:
                total.add(arrived.only(*large).tensors)
                sound.append(arrived.drop(*large))
            del payload, arrived  # before the next one is made
        rejected = guard.turned_away(len(sound), reasons, exchange)
        far = far_apart(sound, training.uploads, exchange.task)
        return Arrival(sound, rejected, dict(size), uploads, far), total.tree

    def protected(self, made: Sequence[Payload], shared: Tree, exchange: Exchange) -> list[Payload]:
        """What honest clients send of what they have made, the server having sent ``shared``."""
        return self.privacy.protect(made, self._trained(shared, exchange), self.training, exchange)

    def _sent(self, made: Sequence[Payload], shared: Tree, exchange: Exchange) -> list[Payload]:
        """What clients send of what they have made, the hostile ones included."""
        return self.attackers.forge(self.protected(made, shared, exchange), shared, exchange)

    def _trained(self, shared: Tree, exchange: Exchange) -> Tree:
        """What clients train in an exchange, as it begins."""
        if exchange.survey:
            return {}
        optims = self.training.active_optims(exchange.task, exchange.round, exchange.balanced)
        return select(shared, *optims)
