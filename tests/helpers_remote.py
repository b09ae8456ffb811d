"""Runs with clients on remote workers, and the comparison of two runs."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from itertools import islice
from typing import Any

import torch

from fczoo import Benchmark, Method
from fczoo.federation.callbacks import Callback
from fczoo.federation.remote import RemoteWorker
from fczoo.federation.run import FederatedRun

OF_THE_RUN = ("seconds", "phases", "peak_memory")


class Losses(Callback):
    """Keep every client's losses."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def client(self, task: int, round: int, loss: float) -> None:
        self.told.append((task, round, loss))

    def steps(self, task: int, round: int, client: int, losses: list[float]) -> None:
        self.told.append((client, losses))


class Workers:
    """Answer groups of clients in reverse order by two workers without any memory of clients."""

    def __init__(self, bench: Callable[[], Benchmark], method: Method):
        self.workers = [RemoteWorker(bench(), method, 0) for _ in range(2)]
        self.groups = 0

    def __call__(self, question: bytes, groups: Iterable[bytes], count: int, /) -> Iterator[bytes]:
        answers = {}
        for number, group in reversed(list(enumerate(groups))):
            worker = self.workers[self.groups % 2]
            answers[number] = worker.answer(worker.unpack_request(question), group)
            self.groups += 1
        assert len(answers) == count
        yield from (answers[number] for number in sorted(answers))


def outcome(run: FederatedRun, tasks: int = 3) -> dict[str, Any]:
    """Return all that the first tasks of two runs must have alike, bit for bit."""
    deque(islice(run, tasks), maxlen=0)
    return outcome_so_far(run, run.callback)


def outcome_so_far(run: FederatedRun, losses: Losses) -> dict[str, Any]:
    """Return all that two runs must have alike after the same tasks, bit for bit."""
    result = {k: v for k, v in asdict(run.result).items() if k not in OF_THE_RUN}
    return {"result": repr(result), "told": repr(losses.told), "state": bits(run.state)}


def bits(tree: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {
        k: v.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for k, v in tree.items()
    }


def run_local_and_remote(
    bench: Callable[[], Benchmark], method: Method
) -> tuple[FederatedRun, FederatedRun]:
    """Return a run in this process and one whose clients are elsewhere."""
    away = Workers(bench, method)
    return tuple(
        FederatedRun(bench(), method, 0, Losses(), None, None, workers) for workers in (None, away)
    )
