"""Function ``fczoo.partition``: divide the user's own labels among clients."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fczoo.core.errors import FczooError, use_python_names
from fczoo.core.files import encode_json, write_safely
from fczoo.core.options import plain, plural, quote
from fczoo.core.registry import PARTITIONERS
from fczoo.core.seeds import check_seed
from fczoo.core.tasks import Partitioner, Task
from fczoo.data.dataset import Images
from fczoo.data.partition import make_partition
from fczoo.data.stream import NO_PIXELS, Stream

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False, repr=False)
class LabelPartition:
    """Partition of a list of labels: the positions of each client's images.

    Attributes:
        spec: Partitioner with its options, such as ``dirichlet:0.1``.
        seed: Seed of the draws.
        classes: Distinct labels, sorted.
        labels: Class of each image as an index of ``classes``, int64 [N].
        indices: Sorted positions of the images of each client k, int64 [n_k].
    """

    spec: str
    seed: int
    classes: tuple[int | str, ...]
    labels: np.ndarray
    indices: tuple[np.ndarray, ...]

    @property
    def clients(self) -> int:
        """Return the number of clients."""
        return len(self.indices)

    def __repr__(self) -> str:
        images = plural(len(self.labels), "image")
        classes = plural(len(self.classes), "class", "classes")
        return (
            f"<LabelPartition {self.spec}, seed {self.seed}: {images} of {classes} over "
            f"{plural(self.clients, 'client')}>"
        )

    def _repr_png_(self) -> bytes | None:
        """Return the picture for a notebook; None without matplotlib."""
        try:
            figure: Any = self.plot()
        except FczooError:
            return None
        picture: bytes = figure._repr_png_()
        return picture

    def counts(self) -> np.ndarray:
        """Count the images of each client and class.

        Returns:
            int64 counts [clients, classes].
        """
        classes = len(self.classes)
        return np.stack([np.bincount(self.labels[i], minlength=classes) for i in self.indices])

    def plot(self, kind: Literal["heatmap", "bars", "bubbles"] = "heatmap") -> "Figure":
        """Plot the number of images per client and class.

        Args:
            kind: ``heatmap``, with a coloured cell per client and class; ``bars``, with a bar per
                client, stacked by class; or ``bubbles``, with areas proportional to the images.

        Returns:
            A matplotlib figure: a notebook shows it, ``figure.savefig(FILE)`` writes it.

        Raises:
            FczooError: The kind is unknown, or matplotlib is not installed.
        """
        from fczoo.reports.partition_figure import KINDS, draw_partition  # imports torch

        if kind not in KINDS:
            raise FczooError(f"kind is {quote(kind)}; it must be one of {', '.join(KINDS)}")
        title = f"{self.spec}, seed {self.seed}"
        return draw_partition(self.counts(), tuple(map(str, self.classes)), kind, title)

    def save(self, path: str | Path) -> None:
        """Write a JSON file with a list of positions per client, which ``file:PATH`` reads.

        ``fczoo bench --partition file:PATH`` uses it for a data set whose training images have
        these labels, in the same order.

        Args:
            path: File to write; its suffix is ``.json``.

        Raises:
            FczooError: The path is not that of a JSON file, or its folder does not exist.
        """
        if not isinstance(path, str | os.PathLike) or Path(path).suffix != ".json":
            raise FczooError(f"{quote(path)} is not a JSON file; give a name such as split.json")
        file = Path(path)
        if file.is_dir():
            raise FczooError(f"{file} is a folder; give a file")
        if not file.absolute().parent.is_dir():
            raise FczooError(f"{file}: no folder {file.parent}; create it first")
        lists = [positions.tolist() for positions in self.indices]
        write_safely(file, f"{encode_json(lists)}\n".encode())


@use_python_names
def partition(
    labels: Sequence[int] | Sequence[str] | np.ndarray,
    spec: str,
    clients: int,
    seed: int = 0,
    *,
    groups: Sequence[int] | Sequence[str] | np.ndarray | None = None,
) -> LabelPartition:
    """Split images over clients by their labels.

    Example: ``fczoo.partition(labels, "dirichlet:0.1", clients=10).indices[0]`` has the positions
    of the first client's images. The result equals that of ``fczoo partition --tasks 1`` on a data
    set with these labels.

    Args:
        labels: Label of each image, a list, array or tensor of whole numbers or strings [N].
        spec: Partitioner with its options, as in ``--partition`` (see ``fczoo list
            partitioners``), or ``file:PATH`` for a saved partition.
        clients: Number of clients.
        seed: Seed of the draws.
        groups: Domain, hospital, writer or user of each image [N], for partitioners that need it.

    Returns:
        The partition.

    Raises:
        FczooError: Labels or groups are not one whole number or string per image, the partitioner
            is unknown, or it cannot split these images.
    """
    classes, numbers = _number_values(labels, "labels")
    if not isinstance(spec, str):
        raise FczooError(f"spec is {quote(spec)}; give a partitioner such as 'dirichlet:0.1'")
    count, images = plain(clients), len(numbers)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise FczooError(f"clients is {quote(clients)}; it must be a whole number from 1 up")
    group_numbers = None if groups is None else _number_values(groups, "groups")[1]
    if group_numbers is not None and len(group_numbers) != images:
        raise FczooError(
            f"groups has {plural(len(group_numbers), 'entry', 'entries')} and labels has {images}; "
            "give one group per image"
        )
    partitioner: Partitioner | None = None
    if not spec.startswith("file:"):
        partitioner = PARTITIONERS.create(spec)
        if getattr(partitioner, "needs_groups", False) and groups is None:
            raise FczooError(f"{spec} needs the group of each image; give them as groups=")
        if images < count and getattr(partitioner, "disjoint", True):
            raise FczooError(
                f"labels has {plural(images, 'image')}, fewer than {count} clients; lower clients"
            )
    task = Task(0, 0, len(classes), len(classes), 1)
    stream = Stream(
        "labels",
        train=Images(NO_PIXELS, numbers),
        test=Images(NO_PIXELS, numbers[:0]),
        train_index=np.arange(images),
        class_order=tuple(range(len(classes))),
        classes=tuple(map(str, classes)),
        tasks=(task,),
        groups=group_numbers,
    )
    split = make_partition(stream, spec, count, check_seed(seed), partitioner=partitioner)
    return LabelPartition(split.spec, split.seed, classes, numbers, tuple(split.tasks[0]))


def _number_values(values: Any, name: str) -> tuple[tuple[int | str, ...], np.ndarray]:
    """Return the sorted distinct values, and the index of each value among them, int64 [N].

    Args:
        values: Whole numbers or strings [N].
        name: Name of the argument, for messages.

    Raises:
        FczooError: A value has another type, or the list is empty.
    """
    advice = f"{name} must be a list of whole numbers or strings, one per image"
    if isinstance(values, str | bytes) or not hasattr(values, "__len__"):
        raise FczooError(f"{name} is {quote(values)}; {advice}")
    try:
        array = np.asarray(values)
    except Exception as error:  # lists of different lengths; a tensor on a GPU or with a gradient
        raise FczooError(f"{name} cannot be converted to an array; {advice}") from error
    if array.ndim != 1:
        raise FczooError(f"{name} has shape {list(array.shape)}; {advice}")
    if not len(array):
        raise FczooError(f"{name} is empty; {advice}")
    if array.dtype.kind == "O":
        wrong_values = [value for value in array if not isinstance(value, str)]
    elif array.dtype.kind == "U" and not isinstance(values, np.ndarray):
        # NumPy has converted all values to text: look at those from before.
        wrong_values = [value for value in values if not isinstance(value, str)]
    else:
        wrong_values = [] if array.dtype.kind in "iuU" else [*array[:1].tolist()]
    if wrong_values:
        raise FczooError(f"{name} contains {quote(plain(wrong_values[0]))}; {advice}")
    distinct_values, positions = np.unique(
        array.astype(str) if array.dtype.kind == "O" else array, return_inverse=True
    )
    return tuple(distinct_values.tolist()), positions.astype(np.int64)
