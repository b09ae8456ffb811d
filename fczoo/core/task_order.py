"""Order of the exchanges between server and clients in one task."""

from collections.abc import Iterator

from fczoo.core.method import Method
from fczoo.core.protocols import EndsTasks
from fczoo.core.types import (
    Exchange,
    Task,
)


def task_exchanges(method: Method, task: Task, rounds: int) -> Iterator[Exchange]:
    """Yield the exchanges of one task between server and clients, in their order.

    This function is the only statement of the order: runs, sites, the upload probe and the
    conformance kit iterate over it.

    Args:
        method: The method that is trained.
        task: The task to learn.
        rounds: Rounds of training per task; a task in which the method trains nothing has none.
    """
    training = method.training()
    if "task_start" in training.collect_at:
        yield Exchange(task, boundary="task_start")
    rounds = rounds if training.active_optims(task, 0) else 0
    for number in range(rounds):
        yield Exchange(task, number)
    if isinstance(method, EndsTasks):
        yield Exchange(task, boundary="after_rounds")
    if training.balanced and task.index:
        yield Exchange(task, rounds, balanced=True)
    if "task_end" in training.collect_at:
        yield Exchange(task, boundary="task_end")
