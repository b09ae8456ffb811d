"""Content of partition files: fczoo's own, and lists of indices that other tools write."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fczoo.core.errors import FczooError
from fczoo.core.files import Count, convert_json, read_json_value

FORMAT = "fczoo-partition-1"
PARTITION = "partition.json"  # in a run folder
PICKLES = (".pkl", ".pickle", ".pt", ".pth", ".npy", ".npz")


class PartitionFile(msgspec.Struct):
    """A partition file of fczoo."""

    format: str
    sha256: str
    dataset: str
    spec: str
    seed: Count
    class_order: list[int]
    tasks: list[list[list[Count]]]
    joined: list[Count] = []
    variants: dict[str, int | float] = {}


def partition_path(spec: str) -> Path:
    """Return PATH of a spec ``file:PATH``.

    Args:
        spec: Value of ``--partition``.

    Raises:
        FczooError: The spec has no path.
    """
    path = spec.removeprefix("file:").strip()
    if not path:
        raise FczooError(f"--partition {spec} names no file; write file:RUN/{PARTITION}")
    return Path(path)


def read_partition_file(path: Path) -> PartitionFile | list[np.ndarray]:
    """Read a partition file of fczoo, or each client's indices as a list or an object of lists.

    Args:
        path: JSON file: of ``Partition.save``, ``[[INDEX, ...], ...]`` with a list per client, or
            ``{"0": [INDEX, ...], ...}`` with a list per client's number.

    Returns:
        Content of fczoo's file, or the indices of each client.

    Raises:
        FczooError: The file is missing, a folder, malformed or not JSON.
    """
    if path.suffix.lower() in PICKLES:
        problem = f"{path} may run code when it is read, so fczoo does not read such files"
        raise FczooError(
            f"{problem}; write each client's indices as JSON, see --partition in the handbook"
        )
    if path.is_dir():
        own = path / PARTITION
        advice = own if own.is_file() else f"a JSON file, such as {PARTITION} in a run folder"
        raise FczooError(f"{path} is a folder, not a partition file; give {advice}")
    content = read_json_value(path, "partition file")
    try:
        if isinstance(content, list) or (
            isinstance(content, dict) and content and all(map(str.isdecimal, content))
        ):
            return _client_indices(content)
        file = convert_json(content, PartitionFile)
        _check(file)
    except ValueError as error:
        raise FczooError(
            f"{path} is not a valid partition file: {error}; save one with a bench run"
        ) from error
    return file


def _client_indices(content: Any) -> list[np.ndarray]:
    """Return the indices of each client, in the order of the clients' numbers.

    Raises:
        ValueError: Clients are missing, or a client's indices are not a list of different numbers.
    """
    if isinstance(content, dict):
        numbers = list(map(str, range(len(content))))
        if missing := [number for number in numbers if number not in content]:
            raise ValueError(f"it has {len(content)} clients, but no client {missing[0]}")
        content = [content[number] for number in numbers]
    if not content:
        raise ValueError("it lists no client")
    clients = convert_json(content, list[list[Count]])
    for number, indices in enumerate(clients):
        if len(set(indices)) < len(indices):
            raise ValueError(f"client {number} has an index twice")
    return [np.array(indices, np.int64) for indices in clients]


def _check(file: PartitionFile) -> None:
    """Raise ValueError if parts of a file of fczoo contradict each other."""
    if file.format != FORMAT:
        raise ValueError(f"format is {file.format!r}, expected {FORMAT!r}")
    if not file.tasks or len({len(clients) for clients in file.tasks}) != 1 or not file.tasks[0]:
        raise ValueError("tasks: all must list the same clients")
    if file.joined and len(file.joined) != len(file.tasks):
        raise ValueError("joined: expected the number of clients at each task")
    for clients, number in zip(file.tasks, file.joined, strict=False):
        if not 0 < number <= len(clients):
            raise ValueError(f"joined: expected numbers from 1 to {len(clients)}, got {number}")
        if any(clients[number:]):
            raise ValueError("joined: a client owns images before it has joined")


def check_class_order(file_order: tuple[int, ...], run_order: tuple[int, ...]) -> None:
    """Check the class order of a saved partition; the error names the option that fits.

    Args:
        file_order: Original labels in order of arrival, from the file.
        run_order: Original labels in order of arrival, of the run.

    Raises:
        FczooError: They differ.
    """
    if file_order == run_order:
        return
    if file_order == tuple(range(len(file_order))):
        advice = "use --class-order natural"
    else:
        advice = "use the --class-order or --class-order-seed with which it was saved"
    if len(file_order) != len(run_order):
        difference = f"{len(file_order)} classes in the file, {len(run_order)} in the run"
    else:
        i = next(i for i, (a, b) in enumerate(zip(file_order, run_order, strict=True)) if a != b)
        labels = f"{file_order[i]} in the file, {run_order[i]} in the run"
        difference = f"class {i + 1} in order of arrival has the original label {labels}"
    raise FczooError(
        f"the saved partition has another class order than this run: {difference}; {advice}"
    )
