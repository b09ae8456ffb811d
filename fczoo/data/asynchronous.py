"""Clients in different tasks at one time: stages, at each of which some go on to their own next task.

The split over clients is that of ordinary tasks; only when a client meets its share of one changes. A client
that stays where it is trains on the same images in several stages.
"""

from dataclasses import replace

import numpy as np

from fczoo.core.errors import FczooError
from fczoo.core.seeds import numpy_stream
from fczoo.core.tasks import Task
from fczoo.data.dataset import Images
from fczoo.data.owned import Owned
from fczoo.data.partition import Partition
from fczoo.data.stream import Stream


def in_stages(moving: int | None, task_order: str) -> bool:
    """Whether a run with these settings has stages in place of tasks."""
    return moving is not None or task_order == "own"


def tasks_by_stage(clients: int, tasks: int, moving: int, order_seed: int | None = None) -> np.ndarray:
    """Index of the task in which each client is in each stage, [stages, clients].

    All begin with their first task. Between two stages ``moving`` clients, by turns, go on to their
    next one, until all have reached their last. With ``order_seed`` every client goes through the tasks in
    an order of its own, drawn from it; else all do in the order of their numbers.
    """
    turns = clients * (tasks - 1)
    taken = np.arange(0, turns + moving, moving).clip(max=turns)  # [stages] turns by then, over all clients
    steps = (taken[:, None] - np.arange(clients) + clients - 1) // clients  # [stages, clients] of each one
    if order_seed is None:
        return steps
    orders = [numpy_stream("task order", order_seed, k).permutation(tasks) for k in range(clients)]
    return np.stack(orders)[np.arange(clients), steps]


def by_stage(partition: Partition, places: np.ndarray) -> Partition:
    """A split of tasks as one of stages: each client's images of a stage are those of its task there.

    ``places`` [stages, clients] is what ``tasks_by_stage`` gives.
    """
    stages = (Owned(partition.tasks[t][k] for k, t in enumerate(stage)) for stage in places)
    return replace(partition, tasks=tuple(stages))


def by_task(partition: Partition, places: np.ndarray) -> Partition:
    """The split of tasks of which ``by_stage`` made a split of stages.

    Raises FczooError for one that it does not make.
    """
    found = partition.counts().shape
    if found != places.shape:
        problem = "the saved partition has {} tasks or stages of {} clients, this run".format(*found)
        raise FczooError(f"{problem} {places.shape[0]} of {places.shape[1]}; save one with the same options")
    entered = [(places == t).argmax(0) for t in range(places.max() + 1)]  # [clients] stages
    tasks = (Owned(partition.tasks[s][k] for k, s in enumerate(stages)) for stages in entered)
    whole = replace(partition, tasks=tuple(tasks))
    if by_stage(whole, places).sha256 != partition.sha256:
        problem = "the saved partition has clients go on at other stages than this run"
        raise FczooError(f"{problem}; save one with the same --moving and --task-order")
    return whole


def staged(stream: Stream, partition: Partition, places: np.ndarray) -> Stream:
    """The stream with stages for tasks, of which ``partition`` says who has what.

    The classes of a stage are all up to the last one of the tasks that anybody has reached. Images say their
    stage: in the training part that in which somebody first has them, in the test part that in which somebody
    first has one of their class (of their domain, where these are the tasks). What nobody ever has is of the
    last stage.
    """
    count, classes = len(places), len(stream.classes)
    kind, test_kind = (_kinds(images, classes) for images in (stream.train, stream.test))
    met = np.full(len(kind), count - 1)  # [N] stage of each training image
    first = np.full(classes * len(stream.tasks), count - 1)  # and of each kind
    for stage in reversed(range(count)):
        own = np.searchsorted(stream.train_index, partition.tasks[stage].positions)
        met[own] = first[kind[own]] = stage
    stops = np.array([task.stop for task in stream.tasks])[places].max(1)
    return replace(
        stream,
        train=stream.train._replace(domains=met),
        test=stream.test._replace(domains=first[test_kind]),
        tasks=tuple(
            Task(s, 0, stop, classes, count) for s, stop in enumerate(np.maximum.accumulate(stops).tolist())
        ),
    )


def _kinds(images: Images, classes: int) -> np.ndarray:
    """A number [N] for the class of each image or, where the domains are the tasks, for both."""
    return images.labels if images.domains is None else images.domains * classes + images.labels
