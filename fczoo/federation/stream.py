"""The images of a run, cut into tasks and split over clients. Nothing here needs torch."""

from fczoo.data.partition import Partition, make_partition
from fczoo.data.stream import Stream, make_stream
from fczoo.federation.settings import Settings


def open_stream(s: Settings, pixels: bool = True) -> tuple[Stream, Partition]:
    """Load the images, or only their labels, and split them.

    Raises FczooError for whatever is missing or impossible.
    """
    stream = whole_stream(s, pixels)
    return stream, split(s, stream)


def whole_stream(s: Settings, pixels: bool = True) -> Stream:
    """The images, or only their labels, cut into tasks. Raises FczooError for whatever is missing."""
    kept = s.train_per_class, s.test_per_class, s.stored_size
    return make_stream(s.dataset, s.root, s.tasks, s.class_order_seed, *kept, s.class_order, pixels)


def split(s: Settings, stream: Stream) -> Partition:
    """Who owns which training image. Raises FczooError when the split is impossible."""
    return make_partition(
        stream, s.partition, s.clients, s.partition_seed, s.joining, s.transition, s.partitioner
    )
