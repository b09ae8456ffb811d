"""Callbacks that follow the progress of a run."""

from collections.abc import Sequence
from typing import Any

from fczoo.core.method import Method
from fczoo.federation.result import Result


class Callback:
    """Base class of callbacks. Each method does nothing; override those that you need."""

    def start(self, method: Method, seed: int, clients: int, rounds: int, done: int) -> None:
        """Handle the start of a run of ``rounds`` rounds; ``done`` of them are finished."""

    def client(self, task: int, round: int, loss: float) -> None:
        """Handle the end of a client's training with its mean ``loss``."""

    def steps(self, task: int, round: int, client: int, losses: list[float]) -> None:
        """Handle the ``losses`` of a client's steps, in order. Called after ``client``."""

    def round(self, record: dict[str, Any]) -> None:
        """Handle the end of a round."""

    def task(self, result: Result) -> None:
        """Handle the end of a task, after its evaluation."""


class CallbackList(Callback):
    """Call several callbacks in order."""

    def __init__(self, callbacks: Sequence[Callback]):
        self.callbacks = callbacks

    def start(self, method: Method, seed: int, clients: int, rounds: int, done: int) -> None:
        for callback in self.callbacks:
            callback.start(method, seed, clients, rounds, done)

    def client(self, task: int, round: int, loss: float) -> None:
        for callback in self.callbacks:
            callback.client(task, round, loss)

    def steps(self, task: int, round: int, client: int, losses: list[float]) -> None:
        for callback in self.callbacks:
            callback.steps(task, round, client, losses)

    def round(self, record: dict[str, Any]) -> None:
        for callback in self.callbacks:
            callback.round(record)

    def task(self, result: Result) -> None:
        for callback in self.callbacks:
            callback.task(result)
