"""Participation: which clients take part in a round, and which of them drop out."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fczoo.core.seeds import numpy_stream
from fczoo.core.training import Scope
from fczoo.core.types import Exchange, Task
from fczoo.federation.batches import Client
from fczoo.federation.scenario import Scenario
from fczoo.federation.settings import Settings
from fczoo.security.privacy import Draw


@dataclass(frozen=True)
class Participation:
    """Sampling of clients in one run; every draw depends only on the seed and its position.

    Attributes:
        scenario: Data and their partition over clients.
        seed: Seed of the run.
        scope: The images on which the method trains, see ``Training.data_scope``.
    """

    scenario: Scenario
    seed: int
    scope: Scope

    @property
    def settings(self) -> Settings:
        """Return the settings of the run."""
        return self.scenario.settings

    def candidates(self, joined: Sequence[Client]) -> list[Client]:
        """Return the joined clients among which the participants of a round are sampled."""
        if self.settings.draw_among == "joined":
            return list(joined)
        return [client for client in joined if len(client.index)]

    def sample(self, candidates: Sequence[Client], task: Task, number: int) -> list[Client]:
        """Sample the clients of round ``number`` of a task, at least one.

        With ``--client-devices`` they are sampled among those that are available.
        """
        drawing = number if self.settings.client_draw == "round" else 0
        rng = numpy_stream("participation", self.seed, task.index, drawing)
        size = self.settings.sampled_count(len(candidates))
        if self.scenario.devices:
            candidates = self.scenario.devices.available_clients(
                candidates, self.seed, task.index, drawing
            )
            size = min(size, len(candidates))
        chosen = rng.choice(len(candidates), size, replace=False)
        return [candidates[i] for i in sorted(chosen)]

    def responding(self, clients: Sequence[Client], exchange: Exchange) -> list[Client]:
        """Return the clients of a round that do not drop out."""
        rate, task, number = self.settings.drop_rate, exchange.task.index, exchange.round
        if not rate:
            return list(clients)
        draws = [
            numpy_stream("drop-out", self.seed, task, number, client.number).random()
            for client in clients
        ]
        return [client for client, draw in zip(clients, draws, strict=True) if draw >= rate]

    def training_clients(self, task: Task, rounds: int) -> set[int]:
        """Return the numbers of the clients that train in any of the rounds of a task."""
        numbers: set[int] = set()
        candidates = self.candidates(self.scenario.clients(task, self.scope, idle=True))
        for number in range(rounds):
            holders = [c for c in self.sample(candidates, task, number) if len(c.index)]
            numbers |= {c.number for c in self.responding(holders, Exchange(task, number))}
        return numbers

    def draws(self, exchanges: Sequence[Sequence[Exchange]]) -> Iterator[Draw]:
        """Yield the random draws of clients in a run, for the privacy accountant.

        All clients take part in a round on exemplars. Tasks that the start model has learned do not
        count.

        Args:
            exchanges: The exchanges of each task, see ``task_exchanges``.
        """
        stream = self.scenario.stream
        new_tasks = list(zip(stream.tasks, exchanges, strict=True))[stream.learned_count :]
        for task, of_task in new_tasks:
            clients = len(self.candidates(self.scenario.clients(task, self.scope, idle=True)))
            rounds = sum(exchange.is_training_round for exchange in of_task)
            once = self.settings.client_draw == "task"
            times, uploads = (1, rounds) if once else (rounds, 1)
            yield Draw(clients, self.settings.sampled_count(clients), uploads, times)
            yield Draw(clients, clients, 1, sum(exchange.balanced for exchange in of_task))
