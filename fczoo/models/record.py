"""Description of a kept model, ``model.json``, and the files next to it."""

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from fczoo import __version__
from fczoo.core.errors import FczooError
from fczoo.core.files import Count, read_json, read_record, write_record
from fczoo.core.types import Task

FORMAT = "fczoo-model-1"
RECORD = "model.json"
TENSORS = "model.safetensors"
SERVER_STATE = "server_state.safetensors"
CARD = "README.md"


class ModelRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Content of ``model.json``: all about a model but its tensors."""

    method: str
    options: dict[str, Any]
    classes: list[str]  # names in order of arrival, of all classes seen so far
    has_images: list[bool]  # whether any client had images of each class
    tasks: list[dict[str, Count]]  # fields of each learned ``Task``
    dataset: str
    settings: dict[str, Any]  # of the run, with files and folders reduced to their last name
    seed: Count
    backbone: dict[str, Any]  # fields of ``ViTConfig``, and the SHA-256 of its weights
    precision: str
    stored_size: Count  # side in pixels of the images before they are resized to the input
    test_crop: float
    accuracy: list[list[float]]
    metrics: dict[str, float]
    test_counts: list[Count]
    partition: dict[str, Any]
    device: str  # type of the device of the run
    tensors: list[str]  # names in the order of the server's state
    files: dict[str, str]  # name of a file -> its SHA-256
    versions: dict[str, str]

    @property
    def task(self) -> Task:
        """Return the last learned task."""
        return Task(**self.tasks[-1])

    def __post_init__(self) -> None:
        """Check that the parts agree.

        Raises:
            ValueError: A number of classes or a task does not fit.
        """
        fields = set(Task.__dataclass_fields__)
        if not self.tasks or any(set(task) != fields for task in self.tasks):
            raise ValueError(f"tasks must be one or more objects with {', '.join(sorted(fields))}")
        if not len(self.classes) == len(self.has_images) == self.task.stop:
            raise ValueError(
                f"{len(self.classes)} classes do not go with {len(self.has_images)} in has_images "
                f"and {self.task.stop} in the last task"
            )


MEASURED = "accuracy", "metrics"
"""Fields whose numbers may be NaN, which JSON has as null."""


def find_model(folder: str | Path) -> Path:
    """Return the folder of a model: the folder itself, or the only one below a run folder.

    Args:
        folder: ``METHOD/seedN`` of a run folder, or a folder with only one model below it.

    Raises:
        FczooError: No model exists there, or there are several.
    """
    folder = Path(folder)
    if (folder / RECORD).is_file():
        return folder
    if not folder.is_dir():
        raise FczooError(f"no folder {folder}; give METHOD/seedN of a run folder of `fczoo bench`")
    folders = [path.parent for path in sorted(folder.rglob(RECORD))]
    # a model of one task is below that of the whole run
    models = [path for path in folders if not (path.parent / RECORD).is_file()]
    if not models:
        raise FczooError(
            f"no model in {folder}; a run that has finished without --no-keep-model has one"
        )
    if len(models) > 1:
        names = ", ".join(str(path.relative_to(folder)) for path in models[:4])
        more = f" and {len(models) - 4} more" if len(models) > 4 else ""
        raise FczooError(
            f"{folder} has {len(models)} models: {names}{more}; give one of these folders"
        )
    return models[0]


def read_model_record(folder: Path) -> ModelRecord:
    """Read the description of a model.

    Args:
        folder: Folder of the model.

    Raises:
        FczooError: The file is missing, damaged or of another format.
    """
    path = folder / RECORD
    content = read_json(path, "model description")
    if content.get("format") != FORMAT:
        versions = content.get("versions")
        writer = versions.get("fczoo") if isinstance(versions, dict) else None
        raise FczooError(
            f"{path} has format {content.get('format')!r}, and fczoo {__version__} reads "
            f"{FORMAT!r}; install the fczoo that wrote it"
            + (f", version {writer}" if isinstance(writer, str) else "")
        )
    return read_record(path, "model description", ModelRecord, FORMAT, MEASURED)


def write_model_record(folder: Path, record: ModelRecord) -> None:
    """Write the description of a model.

    Args:
        folder: Folder of the model.
        record: Its description.
    """
    write_record(folder / RECORD, FORMAT, msgspec.to_builtins(record))


def read_checked(folder: Path, name: str, record: ModelRecord) -> bytes:
    """Read a file of a model and compare its SHA-256 with the description.

    Args:
        folder: Folder of the model.
        name: Name of the file.
        record: Description of the model.

    Raises:
        FczooError: The file is missing or was changed.
    """
    path = folder / name
    try:
        content = path.read_bytes()
    except OSError as error:
        raise FczooError(
            f"cannot read {path}: {error.strerror or error}; copy the whole folder of the model"
        ) from error
    if hashlib.sha256(content).hexdigest() != record.files.get(name):
        raise FczooError(
            f"{path} does not match the SHA-256 in {RECORD}; it is damaged or of another run: copy "
            "the whole folder again"
        )
    return content
