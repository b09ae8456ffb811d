"""Who is asked for which clients, by a stand-in for Ray: order, deaths, what a worker has to say."""

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from fczoo.core.errors import FczooError
from fczoo.core.place import at, place
from fczoo.runner.clients_on_ray import AHEAD, TRIES, Said, Workers, _room, _Warnings


class Reference:
    """What will come of a call; ``give`` makes it or raises."""

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
    """The last reference that is waited for comes first, so that answers come in the wrong order."""

    class exceptions:
        class RayError(Exception):
            pass

        class OutOfMemoryError(RayError):
            pass

    def __init__(self, give: Callable[[bytes], Said], actors: int = 2, comes: bool = True):
        self.asked = deque[bytes]()

        def ready() -> None:
            if not comes:
                raise self.exceptions.RayError("no\nplace")

        made = [type("Actor", (), {})() for _ in range(actors)]
        for actor in made:
            actor.ready = Call(self, ready, True)
            actor.answer = Call(self, lambda cell, question, group: give(group), False)
        self.workers = Workers(self, made)

    def put(self, value: Any) -> Any:
        return value

    def wait(self, references: list[Reference], timeout: float) -> tuple[list[Reference], list[Reference]]:
        return references[-1:], references[:-1]

    def get(self, reference: Reference) -> Any:
        return reference.give()

    def answers(self, count: int) -> list[bytes]:
        return list(self.workers.answers(None, b"question", [b"%d" % i for i in range(count)]))


def test_answers_come_in_the_order_of_the_groups():
    ray = Ray(lambda group: Said(group * 2))
    assert ray.answers(7) == [b"%d%d" % (i, i) for i in range(7)]
    assert ray.answers(0) == [] and ray.answers(1) == [b"00"]


def test_only_so_many_answers_wait():
    ray = Ray(lambda group: Said(group))
    coming = ray.workers.answers(None, b"question", [b"%d" % i for i in range(50)])
    for number in range(10):
        assert next(coming) == b"%d" % number
        assert max(map(int, ray.asked)) < number + 1 + 2 * AHEAD


def test_clients_whose_worker_died_are_asked_of_another(capsys):
    deaths = [b"1", b"1", b"3"]

    def give(group: bytes) -> Said:
        if group in deaths:
            deaths.remove(group)
            raise Ray.exceptions.RayError
        return Said(group)

    assert Ray(give).answers(5) == [b"0", b"1", b"2", b"3", b"4"]
    assert capsys.readouterr().err.count("a worker died (RayError)") == 3


@pytest.mark.parametrize(
    ("error", "says"), [("RayError", "RayError"), ("OutOfMemoryError", "take fewer --jobs")]
)
def test_clients_at_which_workers_die_again_and_again_end_the_run(error, says):
    def give(group: bytes) -> Said:
        if group == b"1":
            raise getattr(Ray.exceptions, error)
        return Said(group)

    with pytest.raises(FczooError, match=f"died {TRIES} times at the same clients: .*{says}"):
        Ray(give).answers(3)


def test_workers_that_never_come_end_the_run():
    with pytest.raises(FczooError, match="no worker of the Ray cluster is left: no place"):
        Ray(Said, comes=False).answers(1)


def test_what_a_worker_has_to_say_is_said_here(caplog):
    told, places = ((logging.WARNING, "little room", "task 1, client 2"),), []
    caplog.handler.addFilter(lambda record: places.append(place()) or True)
    assert Ray(lambda group: Said(group, warnings=told)).answers(1) == [b"0"]
    assert caplog.messages == ["little room"] and places == ["task 1, client 2"]
    with pytest.raises(FczooError, match="ValueError: odd"):
        Ray(lambda group: Said(b"", "ValueError: odd")).answers(1)


def test_a_worker_keeps_its_warnings():
    with _Warnings() as warnings, at("task 2"):
        logging.getLogger("fczoo").warning("%d images", 3)
    logging.getLogger("fczoo").warning("later")
    assert warnings.told == [(logging.WARNING, "3 images", "task 2")]


def test_room_of_a_cluster():
    asked = {"num_cpus": 2, "num_gpus": 0.5}
    assert _room({"CPU": 9, "GPU": 1}, asked) == 2 and _room({"CPU": 9}, {**asked, "num_gpus": 0}) == 4
    with pytest.raises(FczooError, match="has 9 processors and 0 GPUs, too few for one worker"):
        _room({"CPU": 9}, asked)
