"""Test the distribution of clients with a fake Ray: order, worker deaths and messages."""

import logging
from collections.abc import Callable
from typing import Any

import pytest

from fczoo.core.errors import FczooError, current_place, log_place
from fczoo.runner.executors.ray_clients import (
    BATCH_DIVISOR,
    MAX_ANSWER_BYTES,
    MAX_ATTEMPTS,
    MAX_BATCHES_AHEAD,
    ClientBatches,
    ClientWorkers,
    WorkerResponse,
    _worker_count,
)
from fczoo.runner.warnings import LocatedWarning, WarningCollector


class Reference:
    """Represent the future result of a call; ``compute`` computes it or raises."""

    def __init__(self, compute: Callable[[], Any]):
        self.compute = compute


class Call:
    def __init__(self, ray: "Ray", compute: Callable[..., Any], ready: bool):
        self.ray, self.compute, self.is_ready = ray, compute, ready

    def options(self, **_: Any) -> "Call":
        return self

    def remote(self, *given: Any) -> Reference:
        reference = Reference(lambda: self.compute(*given))
        if not self.is_ready:
            self.ray.requests.append(given[2])
        return reference


class Ray:
    """Replace Ray.

    ``wait`` returns the last reference first, so that responses arrive out of order.
    """

    class exceptions:
        class RayError(Exception):
            pass

        class OutOfMemoryError(RayError):
            pass

    def __init__(
        self,
        compute: Callable[[list[bytes]], WorkerResponse],
        actors: int = 2,
        available: bool = True,
    ):
        self.requests: list[list[bytes]] = []

        def ready() -> None:
            if not available:
                raise self.exceptions.RayError("no\nplace")

        instances = [type("Actor", (), {})() for _ in range(actors)]
        for actor in instances:
            actor.ready = Call(self, ready, True)
            actor.answer = Call(self, lambda cell, question, groups: compute(groups), False)
        self.workers = ClientWorkers(self, instances)

    def put(self, value: Any) -> Any:
        return value

    def wait(
        self, references: list[Reference], timeout: float
    ) -> tuple[list[Reference], list[Reference]]:
        return references[-1:], references[:-1]

    def get(self, reference: Reference) -> Any:
        return reference.compute()

    def answers(self, count: int) -> list[bytes]:
        return list(self.workers.answers(None, b"question", make_groups(count), count))


def make_groups(count: int) -> list[bytes]:
    """Return this number of groups."""
    return [b"%d" % i for i in range(count)]


def test_responses_keep_order_of_groups():
    ray = Ray(lambda groups: WorkerResponse([group * 2 for group in groups]))
    for count in (7, 50):
        assert ray.answers(count) == [b"%d%d" % (i, i) for i in range(count)]
    assert max(map(len, ray.requests)) > 1
    assert ray.answers(0) == [] and ray.answers(1) == [b"00"]


def test_pending_responses_are_limited():
    """Limit the number of pending responses.

    Each response is as long as a block, so that every call has one group.
    """
    ray = Ray(
        lambda groups: WorkerResponse([group + bytes(MAX_ANSWER_BYTES // 2) for group in groups])
    )
    coming = ray.workers.answers(None, b"question", make_groups(50), 50)
    for number in range(10):
        assert next(coming).rstrip(b"\0") == b"%d" % number
        assert all(
            int(group) < number + 1 + 2 * MAX_BATCHES_AHEAD
            for block in ray.requests
            for group in block
        )


def test_batch_sizes_follow_remaining_groups():
    """Divide the remaining groups into even batches within bounds.

    20 groups, one worker: a quarter of 19 would be 4, but 3 responses fit; then 3 of 13, 2 of 10.
    """
    blocks = ClientBatches(make_groups(20), 20, 1)
    sizes = [len(next(blocks))]
    blocks.answer_bytes = MAX_ANSWER_BYTES // 3
    sizes += [len(next(blocks)) for _ in range(2)]
    blocks.answer_bytes = 1
    last_blocks = list(blocks)
    assert BATCH_DIVISOR == 4 and sizes == [1, 3, 3]
    assert [len(block) for block in last_blocks] == [3, 2, 2, 1, 1, 1, 1, 1, 1]
    assert last_blocks[0][0] == b"7"
    blocks = ClientBatches(make_groups(2), 2, 1)
    blocks.answer_bytes = 2 * MAX_ANSWER_BYTES
    assert list(blocks) == [[b"0"], [b"1"]]


def test_clients_of_dead_worker_are_reassigned(capsys):
    deaths = [b"1", b"1", b"49"]

    def compute(groups: list[bytes]) -> WorkerResponse:
        if groups[-1] in deaths:
            deaths.remove(groups[-1])
            raise Ray.exceptions.RayError
        return WorkerResponse(groups)

    assert Ray(compute).answers(50) == make_groups(50)
    assert capsys.readouterr().err.count("a worker died (RayError)") == 3


@pytest.mark.parametrize(
    ("error", "says"), [("RayError", "RayError"), ("OutOfMemoryError", "lower --jobs")]
)
def test_repeated_worker_deaths_stop_run(error, says):
    def compute(groups: list[bytes]) -> WorkerResponse:
        if b"1" in groups:
            raise getattr(Ray.exceptions, error)
        return WorkerResponse(groups)

    with pytest.raises(
        FczooError, match=f"died {MAX_ATTEMPTS} times with the same clients: .*{says}"
    ):
        Ray(compute).answers(3)


def test_unavailable_workers_stop_run():
    with pytest.raises(FczooError, match="no worker of the Ray cluster is left: no place"):
        Ray(WorkerResponse, available=False).answers(1)


def test_worker_warnings_and_errors_are_forwarded(caplog):
    warnings, places = {"WARNING": [LocatedWarning("little room", "task 1, client 2")]}, []
    caplog.handler.addFilter(lambda record: places.append(current_place()) or True)
    assert Ray(lambda groups: WorkerResponse(groups, warnings=warnings)).answers(1) == [b"0"]
    assert caplog.messages == ["little room"] and places == ["task 1, client 2"]
    with pytest.raises(FczooError, match="ValueError: odd"):
        Ray(lambda groups: WorkerResponse([], "ValueError: odd")).answers(1)


def test_warning_collector_keeps_worker_warnings():
    with WarningCollector() as warnings, log_place("task 2"):
        logging.getLogger("fczoo").warning("%d images", 3)
    logging.getLogger("fczoo").warning("later")
    assert warnings.pending == {"WARNING": [LocatedWarning("3 images", "task 2")]}


def test_worker_count_follows_from_cluster_resources():
    resources = {"num_cpus": 2, "num_gpus": 0.5}
    assert _worker_count({"CPU": 9, "GPU": 1}, resources) == 2
    assert _worker_count({"CPU": 9}, {**resources, "num_gpus": 0}) == 4
    with pytest.raises(FczooError, match="has 9 processors and 0 GPUs, too few for one worker"):
        _worker_count({"CPU": 9}, resources)
