"""Whom a run tells how it gets on."""

from collections.abc import Sequence
from typing import Any, Protocol

from fczoo.core.method import Method
from fczoo.federation.result import Result


class Observer(Protocol):
    """Is told how a run gets on."""

    def start(self, method: Method, seed: int, clients: int, rounds: int, done: int) -> None: ...
    def client(self, task: int, round: int, loss: float) -> None: ...
    def steps(self, task: int, round: int, client: int, losses: list[float]) -> None: ...
    def round(self, record: dict[str, Any]) -> None: ...
    def task(self, result: Result) -> None: ...


class Silent:
    """The observer that says nothing; a class on top of it says what it cares for."""

    def start(self, method: Method, seed: int, clients: int, rounds: int, done: int) -> None:
        """A run begins or goes on: ``rounds`` rounds over all tasks, ``done`` of them done before."""

    def client(self, task: int, round: int, loss: float) -> None:
        """A client has trained."""

    def steps(self, task: int, round: int, client: int, losses: list[float]) -> None:
        """The losses of a client's single steps, in order; told after ``client``."""

    def round(self, record: dict[str, Any]) -> None:
        """A round is over."""

    def task(self, result: Result) -> None:
        """A task is over and evaluated."""


class Several:
    """Several observers as one: each is told everything, in order."""

    def __init__(self, observers: Sequence[Observer]):
        self.observers = observers

    def start(self, method: Method, seed: int, clients: int, rounds: int, done: int) -> None:
        for observer in self.observers:
            observer.start(method, seed, clients, rounds, done)

    def client(self, task: int, round: int, loss: float) -> None:
        for observer in self.observers:
            observer.client(task, round, loss)

    def steps(self, task: int, round: int, client: int, losses: list[float]) -> None:
        for observer in self.observers:
            observer.steps(task, round, client, losses)

    def round(self, record: dict[str, Any]) -> None:
        for observer in self.observers:
            observer.round(record)

    def task(self, result: Result) -> None:
        for observer in self.observers:
            observer.task(result)
