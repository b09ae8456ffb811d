"""The check of a partitioner."""

from collections.abc import Callable

import numpy as np

from fczoo.core.errors import FczooError, quiet
from fczoo.core.registry import PARTITIONERS
from fczoo.core.seeds import numpy_stream
from fczoo.core.tasks import Partitioner, Task
from fczoo.data.dataset import Images
from fczoo.data.partition import make_partition
from fczoo.data.stream import Stream
from fczoo.testing.runs import Draw, check_random_cases, need, need_documented, need_one_line

Refuses = Callable[[int, int, int], bool]
"""``refuses(images, classes, clients)``: whether a partitioner cannot split this many images of
this many classes.
"""

TASKS = (Task(0, 0, 5, 10, 2), Task(1, 5, 10, 10, 2))
EASY, CLIENTS = np.repeat(np.arange(5), 40), 8
"""Labels that any partitioner can split, and over how many clients."""


def check_partitioner(spec: str, refuses: Refuses | None = None, drawn: bool = True) -> None:
    """Raise AssertionError, in one sentence, where a partitioner breaks a rule.

    Checked on random labels of one to five classes and one to nine clients: there is one array of
    positions for each client; positions are whole numbers inside the labels, none twice at one
    client; the labels stay as they are; the same generator gives the same parts. Unless the class
    says ``disjoint = False``, every image goes to one client and none is left over. Other seeds
    give other parts. A stream of several tasks can be split, and is split by the seed. The class
    and each of its options have a description.

    Args:
        spec: Registered name with its options, such as ``dirichlet:0.1``.
        refuses: Returns whether a request cannot be met: exactly these must raise FczooError, in
            one line. None: any request may, except an easy one (200 images of five classes for
            eight clients).
        drawn: False for a spec that draws nothing at random; seeds and streams are then not
            checked.

    Raises:
        AssertionError: A rule is broken.
    """
    partitioner = PARTITIONERS.create(spec)
    need_documented(type(partitioner), spec)

    def case(draw: Draw) -> None:
        sizes = [draw(1, 40) for _ in range(draw(1, 5))]
        labels = np.random.default_rng(draw(0, 2**31)).permutation(
            np.repeat(np.arange(len(sizes)), sizes)
        )
        _check_case(spec, partitioner, labels, draw, refuses)

    with quiet():
        check_random_cases(case)
        easy = _split(spec, partitioner, EASY, CLIENTS, 0, refuses)
        need(
            easy is not None,
            f"{spec} refuses even {len(EASY)} images of 5 classes for {CLIENTS} clients; give "
            "options",
        )
        if drawn:
            _check_seeds(spec, partitioner)
            _check_stream(spec)


def _check_case(
    spec: str, partitioner: Partitioner, labels: np.ndarray, draw: Draw, refuses: Refuses | None
) -> None:
    clients, seed, original_labels = draw(1, 9), draw(0, 2**31), labels.copy()
    parts = _split(spec, partitioner, labels, clients, seed, refuses)
    need(
        np.array_equal(labels, original_labels),
        f"{spec} changes the labels that it is given; work on a copy",
    )
    if parts is None:
        return
    need(
        len(parts) == clients,
        f"{spec} gives {len(parts)} parts for {clients} clients; give each client one",
    )
    for part in parts:
        need(
            isinstance(part, np.ndarray)
            and part.ndim == 1
            and np.issubdtype(part.dtype, np.integer),
            f"{spec} gives a part that is not an array of whole numbers; return the images' "
            "positions in labels",
        )
        need(
            ((part >= 0) & (part < len(labels))).all(),
            f"{spec} names positions outside of the {len(labels)} labels; return positions in "
            "labels",
        )
        need(
            len(np.unique(part)) == len(part),
            f"{spec} gives a client the same image twice; name a position once",
        )
    if getattr(partitioner, "disjoint", True):
        all_positions = np.sort(np.concatenate(parts))
        need(
            np.array_equal(all_positions, np.arange(len(labels))),
            f"{spec} assigns {len(np.unique(all_positions))} of {len(labels)} images, "
            f"{len(all_positions)} in all; give each to one client, or set disjoint = False in the "
            "class",
        )
    second_parts = _parts(partitioner, labels, clients, seed)
    need(
        all(np.array_equal(a, b) for a, b in zip(parts, second_parts, strict=True)),
        f"{spec} gives other parts from the same generator; draw only from rng and keep no state",
    )


def _check_seeds(spec: str, partitioner: Partitioner) -> None:
    seeds, different = range(5), set()
    for seed in seeds:
        different.add(
            tuple(tuple(np.sort(part)) for part in _parts(partitioner, EASY, CLIENTS, seed))
        )
    need(
        len(different) == len(seeds),
        f"{spec} gives the same parts from different seeds; draw from rng",
    )


def _parts(
    partitioner: Partitioner, labels: np.ndarray, clients: int, seed: int
) -> list[np.ndarray]:
    return partitioner(labels, clients, numpy_stream("check", seed))


def _split(
    spec: str,
    partitioner: Partitioner,
    labels: np.ndarray,
    clients: int,
    seed: int,
    refuses: Refuses | None,
) -> list[np.ndarray] | None:
    """Return the parts, or None if the request is refused and may be."""
    request = (len(labels), len(np.unique(labels)), clients)
    description = f"{request[0]} images of {request[1]} classes for {clients} clients"
    try:
        parts = _parts(partitioner, labels, clients, seed)
    except FczooError as error:
        need_one_line(error, spec)
        need(
            refuses is None or refuses(*request),
            f"{spec} refuses {description}, which it should split: {error}",
        )
        return None
    need(
        refuses is None or not refuses(*request),
        f"{spec} splits {description}, which it should refuse with a FczooError",
    )
    return parts


def _easy_stream() -> Stream:
    """Create two tasks as in ``EASY`` with images in random order.

    Positions in the original differ from those in the stream.
    """
    labels = np.random.default_rng(0).permutation(np.concatenate([EASY, EASY + 5]))
    images, order = Images(np.empty((0, 0, 0, 3), np.uint8), labels), tuple(range(10))
    return Stream(
        "easy", images, images, 3 + 2 * np.arange(len(labels)), order, tuple("abcdefghij"), TASKS
    )


def _check_stream(spec: str) -> None:
    stream = _easy_stream()
    first, same_seed, other_seed = (
        make_partition(stream, spec, CLIENTS, seed) for seed in (4, 4, 5)
    )
    need(
        first.sha256 == same_seed.sha256,
        f"{spec} splits the same stream differently; draw only from rng",
    )
    need(
        first.sha256 != other_seed.sha256,
        f"{spec} splits a stream in the same way from different seeds; draw from rng",
    )
    for task, parts in zip(stream.tasks, first.tasks, strict=True):
        task_indices = stream.train_index[stream.positions(stream.train, task)]
        need(
            np.isin(np.concatenate(parts), task_indices).all(),
            f"{spec} gives a client images of another task; return positions in the labels that "
            "it is given",
        )
