"""The images of a run, cut into tasks and split over clients. Nothing here needs torch."""

from functools import partial

from fczoo.core.errors import FczooError
from fczoo.data.partition import Partition, make_partition
from fczoo.data.stream import Stream, make_stream
from fczoo.data.task_schedule import (
    by_stage,
    by_task,
    in_stages,
    stream_with_stages,
    tasks_by_stage,
)
from fczoo.federation.settings import Settings


def open_stream(s: Settings, pixels: bool = True) -> tuple[Stream, Partition]:
    """Load the images, or only their labels, and split them.

    Raises FczooError for whatever is missing or impossible.
    """
    return split_stream(s, whole_stream(s, pixels))


def whole_stream(s: Settings, pixels: bool = True) -> Stream:
    """Load the images, or only labels, divided into tasks.

    Raises FczooError for missing data.
    """
    limits = s.train_per_class, s.test_per_class, s.stored_size
    return make_stream(
        s.dataset, s.root, s.tasks, s.class_order_seed, *limits, s.class_order, pixels
    )


def split_stream(s: Settings, stream: Stream) -> tuple[Stream, Partition]:
    """Return the stream of tasks as clients see it, and the partition of the training images.

    Where clients are in different tasks at one time, stages take the place of tasks. Raises
    FczooError when the split is impossible.
    """
    split = partial(
        make_partition,
        stream,
        s.partition,
        s.clients,
        s.partition_seed,
        s.joining,
        s.transition,
        s.partitioner,
    )
    if not in_stages(s.moving, s.task_order):
        return stream, split()
    if s.joining:
        problem = "--moving and --task-order are for clients that are there from the start"
        raise FczooError(f"{problem}; leave out --joining")
    if s.moving is not None and s.moving >= s.clients:
        problem = f"--moving {s.moving} is all of the {s.clients} clients"
        raise FczooError(
            f"{problem}, which continue together without it; give fewer, or leave it out"
        )
    order_seed = s.partition_seed if s.task_order == "own" else None
    places = tasks_by_stage(s.clients, len(stream.tasks), s.moving or s.clients, order_seed)

    def restore(saved: Partition) -> Partition:
        return by_task(saved, places)

    partition = by_stage(split(restore=restore), places)
    return stream_with_stages(stream, partition, places), partition
