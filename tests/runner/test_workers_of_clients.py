"""Distribution of clients by a fake Ray: order, deaths, and messages of workers."""

import logging
from collections.abc import Callable
from typing import Any

import pytest

from fczoo.core.errors import FczooError, current_place, log_place
from fczoo.runner.executors.ray_clients import (
    AHEAD,
    BLOCK,
    PARTS,
    TRIES,
    ClientBatches,
    ClientWorkers,
    WorkerResponse,
    _worker_count,
)
from fczoo.runner.warnings import LocatedWarning, WarningCollector


class Reference:
    """Stand for the future result of a call; ``give`` makes it or raises."""

    def __init__(self, give: Callable[[], Any]):
        self.give = give


class Call:
    def __init__(self, ray: "Ray", give: Callable[..., Any], ready: bool):
        self.ray, self.give, self.is_ready = ray, give, ready

    def options(self, **_: Any) -> "Call":
        return self

    def remote(self, *given: Any) -> Reference:
        reference = Reference(lambda: self.give(*given))
        if not self.is_ready:
            self.ray.asked.append(given[2])
        return reference


class Ray:
    """Replace Ray.

    The last reference that is waited for comes first, so that answers come in the wrong order.
    """

    class exceptions:
        class RayError(Exception):
            pass

        class OutOfMemoryError(RayError):
            pass

    def __init__(
        self, give: Callable[[list[bytes]], WorkerResponse], actors: int = 2, comes: bool = True
    ):
        self.asked: list[list[bytes]] = []

        def ready() -> None:
            if not comes:
                raise self.exceptions.RayError("no\nplace")

        instances = [type("Actor", (), {})() for _ in range(actors)]
        for actor in instances:
            actor.ready = Call(self, ready, True)
            actor.answer = Call(self, lambda cell, question, groups: give(groups), False)
        self.workers = ClientWorkers(self, instances)

    def put(self, value: Any) -> Any:
        return value

    def wait(
        self, references: list[Reference], timeout: float
    ) -> tuple[list[Reference], list[Reference]]:
        return references[-1:], references[:-1]

    def get(self, reference: Reference) -> Any:
        return reference.give()

    def answers(self, count: int) -> list[bytes]:
        return list(self.workers.answers(None, b"question", make_groups(count), count))


def make_groups(count: int) -> list[bytes]:
    """Return this number of groups."""
    return [b"%d" % i for i in range(count)]


def test_answers_come_in_the_order_of_the_groups():
    ray = Ray(lambda groups: WorkerResponse([group * 2 for group in groups]))
    for count in (7, 50):
        assert ray.answers(count) == [b"%d%d" % (i, i) for i in range(count)]
    assert max(map(len, ray.asked)) > 1
    assert ray.answers(0) == [] and ray.answers(1) == [b"00"]


def test_only_so_many_answers_wait():
    """Limit the number of waiting answers.

    Answers have a block's length, so that each is one call.
    """
    ray = Ray(lambda groups: WorkerResponse([group + bytes(BLOCK // 2) for group in groups]))
    coming = ray.workers.answers(None, b"question", make_groups(50), 50)
    for number in range(10):
        assert next(coming).rstrip(b"\0") == b"%d" % number
        assert all(int(group) < number + 1 + 2 * AHEAD for block in ray.asked for group in block)


def test_blocks_are_an_even_part_of_what_is_left_within_bounds():
    """Blocks are an even part of the remaining groups, within bounds.

    20 groups, one worker: of 19 a quarter would be 4, but 3 answers fit; then 3 of 13, 2 of 10.
    """
    blocks = ClientBatches(make_groups(20), 20, 1)
    sizes = [len(next(blocks))]
    blocks.longest = BLOCK // 3
    sizes += [len(next(blocks)) for _ in range(2)]
    blocks.longest = 1
    last_blocks = list(blocks)
    assert PARTS == 4 and sizes == [1, 3, 3]
    assert [len(block) for block in last_blocks] == [3, 2, 2, 1, 1, 1, 1, 1, 1]
    assert last_blocks[0][0] == b"7"
    blocks = ClientBatches(make_groups(2), 2, 1)
    blocks.longest = 2 * BLOCK
    assert list(blocks) == [[b"0"], [b"1"]]


def test_clients_whose_worker_died_are_asked_of_another(capsys):
    deaths = [b"1", b"1", b"49"]

    def give(groups: list[bytes]) -> WorkerResponse:
        if groups[-1] in deaths:
            deaths.remove(groups[-1])
            raise Ray.exceptions.RayError
        return WorkerResponse(groups)

    assert Ray(give).answers(50) == make_groups(50)
    assert capsys.readouterr().err.count("a worker died (RayError)") == 3


@pytest.mark.parametrize(
    ("error", "says"), [("RayError", "RayError"), ("OutOfMemoryError", "lower --jobs")]
)
def test_clients_at_which_workers_die_again_and_again_end_the_run(error, says):
    def give(groups: list[bytes]) -> WorkerResponse:
        if b"1" in groups:
            raise getattr(Ray.exceptions, error)
        return WorkerResponse(groups)

    with pytest.raises(FczooError, match=f"died {TRIES} times with the same clients: .*{says}"):
        Ray(give).answers(3)


def test_workers_that_never_come_end_the_run():
    with pytest.raises(FczooError, match="no worker of the Ray cluster is left: no place"):
        Ray(WorkerResponse, comes=False).answers(1)


def test_what_a_worker_has_to_say_is_said_here(caplog):
    warnings, places = {"WARNING": [LocatedWarning("little room", "task 1, client 2")]}, []
    caplog.handler.addFilter(lambda record: places.append(current_place()) or True)
    assert Ray(lambda groups: WorkerResponse(groups, warnings=warnings)).answers(1) == [b"0"]
    assert caplog.messages == ["little room"] and places == ["task 1, client 2"]
    with pytest.raises(FczooError, match="ValueError: odd"):
        Ray(lambda groups: WorkerResponse([], "ValueError: odd")).answers(1)


def test_a_worker_keeps_its_warnings():
    with WarningCollector() as warnings, log_place("task 2"):
        logging.getLogger("fczoo").warning("%d images", 3)
    logging.getLogger("fczoo").warning("later")
    assert warnings.pending == {"WARNING": [LocatedWarning("3 images", "task 2")]}


def test_room_of_a_cluster():
    resources = {"num_cpus": 2, "num_gpus": 0.5}
    assert _worker_count({"CPU": 9, "GPU": 1}, resources) == 2
    assert _worker_count({"CPU": 9}, {**resources, "num_gpus": 0}) == 4
    with pytest.raises(FczooError, match="has 9 processors and 0 GPUs, too few for one worker"):
        _worker_count({"CPU": 9}, resources)
