"""Clients in different tasks at the same time.

The run has stages. At each stage some clients continue to their own next task. The split over
clients is that of ordinary tasks; only the time at which a client gets its share of a task changes.
A client that does not continue trains on the same images in several stages.
"""

from dataclasses import replace

import numpy as np

from fczoo.core.errors import FczooError
from fczoo.core.seeds import numpy_stream
from fczoo.core.tasks import Task
from fczoo.data.client_index import ClientIndex
from fczoo.data.dataset import Images
from fczoo.data.partition import Partition
from fczoo.data.stream import Stream


def uses_stages(moving: int | None, task_order: str) -> bool:
    """Return whether a run with these settings has stages in place of tasks.

    Args:
        moving: Clients that change their task between two stages; None without stages.
        task_order: ``own`` if every client has its own order of tasks.
    """
    return moving is not None or task_order == "own"


def tasks_by_stage(
    clients: int, tasks: int, moving: int, order_seed: int | None = None
) -> np.ndarray:
    """Return the index of the task in which each client is in each stage.

    All begin with their first task. Between two stages ``moving`` clients, one after another in the
    order of their numbers, continue to their next task, until all have reached their last.

    Args:
        clients: Number of clients.
        tasks: Number of tasks.
        moving: Number of clients that continue between two stages.
        order_seed: Seed from which the order of tasks of each client is drawn. Default: all go
            through the tasks in the order of their numbers.

    Returns:
        Indices [stages, clients].
    """
    turns = clients * (tasks - 1)
    # [stages] turns until each stage, over all clients
    turn_counts = np.arange(0, turns + moving, moving).clip(max=turns)
    # [stages, clients] turns of each client
    steps = (turn_counts[:, None] - np.arange(clients) + clients - 1) // clients
    if order_seed is None:
        return steps
    orders = [numpy_stream("task order", order_seed, k).permutation(tasks) for k in range(clients)]
    return np.stack(orders)[np.arange(clients), steps]


def to_stages(partition: Partition, stage_tasks: np.ndarray) -> Partition:
    """Convert a partition of tasks to one of stages.

    A client's images of a stage are those of its current task.

    Args:
        partition: Partition of tasks.
        stage_tasks: Indices [stages, clients] of ``tasks_by_stage``.
    """
    stages = (
        ClientIndex(partition.tasks[t][k] for k, t in enumerate(stage)) for stage in stage_tasks
    )
    return replace(partition, tasks=tuple(stages))


def to_tasks(partition: Partition, stage_tasks: np.ndarray) -> Partition:
    """Convert a partition of stages back to the one of tasks from ``to_stages``.

    Args:
        partition: Partition of stages.
        stage_tasks: Indices [stages, clients] of ``tasks_by_stage``.

    Raises:
        FczooError: ``to_stages`` does not make this partition.
    """
    shape = partition.counts().shape
    if shape != stage_tasks.shape:
        file_size, run_size = (
            f"{n} tasks or stages of {k} clients" for n, k in (shape, stage_tasks.shape)
        )
        problem = f"the saved partition has {file_size}, but this run needs {run_size}"
        raise FczooError(f"{problem}; save one with the same options")
    # [clients] stages
    entry_stages = [(stage_tasks == t).argmax(0) for t in range(stage_tasks.max() + 1)]
    tasks = (
        ClientIndex(partition.tasks[s][k] for k, s in enumerate(stages)) for stages in entry_stages
    )
    task_partition = replace(partition, tasks=tuple(tasks))
    if to_stages(task_partition, stage_tasks).sha256 != partition.sha256:
        problem = (
            "in the saved partition, clients move to their next tasks at other times than here"
        )
        raise FczooError(f"{problem}; save one with the same --moving and --task-order")
    return task_partition


def stream_with_stages(stream: Stream, partition: Partition, stage_tasks: np.ndarray) -> Stream:
    """Return the stream with stages as tasks.

    A stage has all classes up to the last class of any task that a client has reached. The domain
    of an image is its stage. For a training image it is the first stage in which a client has the
    image; for a test image, the first stage in which a client has an image of its class (and of its
    domain, if domains are the tasks). Images that no client ever has belong to the last stage.

    Args:
        stream: Data set divided into tasks.
        partition: Partition of stages.
        stage_tasks: Indices [stages, clients] of ``tasks_by_stage``.
    """
    count, classes = len(stage_tasks), len(stream.classes)
    kind, test_kind = (_kinds(images, classes) for images in (stream.train, stream.test))
    stage_of_image = np.full(len(kind), count - 1)  # [N] stage of each training image
    stage_of_kind = np.full(classes * len(stream.tasks), count - 1)  # and of each kind
    for stage in reversed(range(count)):
        indices = np.searchsorted(stream.train_index, partition.tasks[stage].positions)
        stage_of_image[indices] = stage_of_kind[kind[indices]] = stage
    stops = np.array([task.stop for task in stream.tasks])[stage_tasks].max(1)
    return replace(
        stream,
        train=stream.train._replace(domains=stage_of_image),
        test=stream.test._replace(domains=stage_of_kind[test_kind]),
        tasks=tuple(
            Task(s, 0, stop, classes, count)
            for s, stop in enumerate(np.maximum.accumulate(stops).tolist())
        ),
    )


def _kinds(images: Images, classes: int) -> np.ndarray:
    """Return a number [N] per image for its class, or for class and domain if domains are tasks."""
    return images.labels if images.domains is None else images.domains * classes + images.labels
