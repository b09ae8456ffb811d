"""Clients of a run on a Ray cluster, which may be started on this machine.

Each worker is an actor that opens backbone and data once. If a worker dies, Ray restarts it when
resources are free, and another worker processes its clients. Workers store no client state, so
results do not change.
"""

import logging
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from fczoo.core.errors import FczooError, log_place
from fczoo.federation.client import ClientRequest
from fczoo.federation.remote import RemoteWorker, Transport
from fczoo.runner.configs import ExecutionConfig, RunSpec
from fczoo.runner.execute import error_text
from fczoo.runner.executors import Command, check_node, open_benchmark, prepare_command
from fczoo.runner.executors.ray import connect
from fczoo.runner.progress import print_progress
from fczoo.runner.warnings import LocatedWarning, WarningCollector

log = logging.getLogger("fczoo")

# batches per worker that may run ahead of the oldest missing answer; their answers are in memory
MAX_BATCHES_AHEAD = 2
MAX_ANSWER_BYTES = 4_000_000  # bytes of the answers to one call
BATCH_DIVISOR = 4  # a call has at most 1/BATCH_DIVISOR of a worker's share of the remaining groups
MAX_ATTEMPTS = 3  # attempts at clients with which workers die
WAIT_MESSAGE_SECONDS = 60.0  # seconds without a worker after which a message is printed


@contextmanager
def clients_on_ray(
    execution: ExecutionConfig, out: Path
) -> Iterator[Callable[[RunSpec], Transport]]:
    """Start the workers of a cluster; yield a function that returns a run's transport.

    The server has as many threads as each worker, so results equal those of one process with this
    number. Raises FczooError if no cluster answers, or its resources are too small for one worker.
    """
    ray, options = connect(execution)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(execution.threads)
        count = min(execution.jobs, _worker_count(ray.cluster_resources(), options))
        actor = ray.remote(**options, max_restarts=-1, max_task_retries=0)(ClientWorker)
        command = prepare_command(out)
        workers = ClientWorkers(
            ray, [actor.remote(command, execution.threads) for _ in range(count)]
        )
        yield lambda run: partial(workers.answers, ray.put(run))
    finally:
        torch.set_num_threads(threads)
        ray.shutdown()


def _worker_count(cluster: dict[str, float], worker: dict[str, Any]) -> int:
    """Return the number of workers that fit on a cluster.

    Raises FczooError if there is none.
    """
    shares = {"CPU": worker["num_cpus"], "GPU": worker["num_gpus"]}
    count = min(int(cluster.get(name, 0) / share) for name, share in shares.items() if share)
    if not count:
        has = f"{cluster.get('CPU', 0):g} processors and {cluster.get('GPU', 0):g} GPUs"
        raise FczooError(
            f"the Ray cluster has {has}, too few for one worker; lower --cluster threads or gpus"
        )
    return count


@dataclass(frozen=True)
class WorkerResponse:
    """Response of a worker, as plain values, since some exceptions cannot be sent back."""

    answers: Sequence[bytes]
    error: str = ""
    warnings: Mapping[str, Sequence[LocatedWarning]] = field(default_factory=dict)  # by level


class ClientWorker:
    """Actor that answers requests for clients of any run."""

    def __init__(self, command: Command, threads: int):
        self.command, self.threads = command, threads
        self.run: RunSpec | None = None
        self.question: Any = None  # reference to the latest request; clients of a round share it

    def ready(self) -> None:
        """Return once the actor is ready."""

    def answer(self, run: RunSpec, question: list[Any], groups: Sequence[bytes]) -> WorkerResponse:
        """Answer a request, passed by reference, for groups of clients."""
        warnings = WarningCollector()  # returned, since no one sees the output of an actor
        try:
            self._open(run)  # its warnings are dropped: the command has printed them
            with warnings:
                request = self._request_of(question[0])
                answers = [self.remote_worker.answer(request, group) for group in groups]
                return WorkerResponse(answers, "", warnings.pending)
        except Exception as error:
            return WorkerResponse([], error_text(error), warnings.pending)

    def _open(self, run: RunSpec) -> None:
        if run != self.run:
            os.chdir(self.command.base_folder)
            torch.set_num_threads(self.threads)
            check_node(run)
            method = run.config.create_method()
            self.remote_worker = RemoteWorker(open_benchmark(run), method, run.config.seed)
            self.run = run
            self.question = None

    def _request_of(self, question: Any) -> ClientRequest:
        if question != self.question:
            import ray

            self.request = self.remote_worker.unpack_request(ray.get(question))
            self.question = question
        return self.request


class ClientBatches(Iterator[list[bytes]]):
    """Batches of client groups: a call has a fixed overhead of some milliseconds.

    Batches become smaller towards the end, so that all workers end at about the same time. The
    first batches are single groups, until the size of an answer is known.
    """

    def __init__(self, groups: Iterable[bytes], count: int, workers: int):
        self.groups, self.remaining_groups, self.workers = iter(groups), count, workers
        self.answer_bytes = MAX_ANSWER_BYTES  # bytes of the longest answer to the last call

    def __next__(self) -> list[bytes]:
        size = min(
            self.remaining_groups // (BATCH_DIVISOR * self.workers),
            MAX_ANSWER_BYTES // self.answer_bytes,
        )
        groups = list(islice(self.groups, max(1, size)))
        if not groups:
            raise StopIteration
        self.remaining_groups -= len(groups)
        return groups


class ClientWorkers:
    """Pool of actors: free, busy and starting ones."""

    def __init__(self, ray: Any, actors: Sequence[Any]):
        self.ray, self.count = ray, len(actors)
        self.free_actors: list[Any] = []
        self.busy_actors: dict[Any, Any] = {}  # actors by reference to their pending answer
        self.starting_actors: dict[Any, Any] = {}  # actors by reference to their call of ``ready``
        for actor in actors:
            self._await_ready(actor)

    def answers(
        self, run: Any, question: bytes, groups: Iterable[bytes], count: int, /
    ) -> Iterator[bytes]:
        """Yield responses, see ``Transport``; ``run`` is a reference to the run.

        Raises FczooError if a worker reports a failure, or workers die repeatedly with the same
        clients.
        """
        question_reference = [self.ray.put(question)]
        batches = ClientBatches(groups, count, self.count)
        todo = enumerate(batches)
        waiting = deque(islice(todo, 1))  # one batch is prepared; others are once a worker is free
        out: dict[Any, tuple[int, list[bytes]]] = {}
        answers_by_number: dict[int, Sequence[bytes]] = {}
        deaths, number = Counter[int](), 0
        while waiting or out or answers_by_number:
            limit = number + MAX_BATCHES_AHEAD * self.count
            while self.free_actors and waiting and waiting[0][0] < limit:
                (place, batch), actor = waiting.popleft(), self.free_actors.pop()
                waiting.extend(islice(todo, not waiting))
                reference = actor.answer.remote(run, question_reference, batch)
                self.busy_actors[reference], out[reference] = actor, (place, batch)
            if number in answers_by_number:
                yield from answers_by_number.pop(number)
                number += 1
                continue
            reference, response = self._next_event()
            if reference not in out:  # an actor is ready, or ended a call of an earlier question
                continue
            place, batch = out.pop(reference)
            if isinstance(response, WorkerResponse):
                answers_by_number[place] = answers = _read_response(response)
                batches.answer_bytes = max(map(len, answers))
                continue
            deaths[place] += 1
            if deaths[place] == MAX_ATTEMPTS:
                raise FczooError(
                    f"workers died {MAX_ATTEMPTS} times with the same clients: {response}"
                )
            print_progress(f"a worker died ({response}); retrying its clients")
            waiting.appendleft((place, batch))

    def _await_ready(self, actor: Any) -> None:
        """Add an actor to the starting ones; Ray restarts it if it died."""
        self.starting_actors[actor.ready.options(max_task_retries=-1).remote()] = actor

    def _next_event(self) -> tuple[Any, WorkerResponse | str | None]:
        """Return the next event: a response, the death of its worker, or a free worker."""
        while not (
            ready := self.ray.wait(
                [*self.busy_actors, *self.starting_actors], timeout=WAIT_MESSAGE_SECONDS
            )[0]
        ):
            if not self.busy_actors:
                print_progress("still waiting for the first worker of the Ray cluster")
        (reference,) = ready
        if actor := self.starting_actors.pop(reference, None):
            self._record_ready(actor, reference)
            return reference, None
        actor = self.busy_actors.pop(reference)
        try:
            response: WorkerResponse = self.ray.get(reference)
        except self.ray.exceptions.RayError as error:
            self._await_ready(actor)
            full = isinstance(error, self.ray.exceptions.OutOfMemoryError)
            return reference, "memory ran out on its node; lower --jobs" if full else type(
                error
            ).__name__
        self.free_actors.append(actor)
        return reference, response

    def _record_ready(self, actor: Any, reference: Any) -> None:
        """Record that an actor is free or lost.

        Raises FczooError when none is left.
        """
        try:
            self.ray.get(reference)
            self.free_actors.append(actor)
        except self.ray.exceptions.RayError as error:
            if not (self.starting_actors or self.busy_actors or self.free_actors):
                reason = " ".join(str(error).split())
                raise FczooError(f"no worker of the Ray cluster is left: {reason}") from error


def _read_response(response: WorkerResponse) -> Sequence[bytes]:
    """Return the answers of a worker and log its warnings.

    Raises FczooError if the worker reports an error.
    """
    for level, warnings in response.warnings.items():
        for text, place in warnings:
            with log_place(place):
                log.log(logging.getLevelNamesMapping()[level], "%s", text)
    if response.error:
        raise FczooError(response.error)
    return response.answers
