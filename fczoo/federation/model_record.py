"""Description of a kept model, ``model.json``, the files next to it, and its run's settings."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from fczoo.backbones.weights import split_stored_spec
from fczoo.core.errors import FczooError
from fczoo.core.files import Count, home, read_json, read_record, write_record
from fczoo.core.names import join_first_names
from fczoo.core.registry import DATASETS
from fczoo.core.tasks import NUMBERS, Task
from fczoo.data.dataset import Resize
from fczoo.data.partition_file import PARTITION
from fczoo.data.stream import DOMAINS

FORMAT = "fczoo-model-1"
RECORD = "model.json"
TENSORS = "model.safetensors"
SERVER_STATE = "server_state.safetensors"
CARD = "README.md"


class ModelRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Content of ``model.json``: everything about a model except its tensors."""

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
    resize: Resize = "crop"  # how image files become square
    accuracy: list[list[float]]
    metrics: dict[str, float]
    test_counts: list[Count]
    partition: dict[str, Any]
    device: str  # type of the device of the run
    tensors: list[str]  # names of what prediction reads, in the order of the server's state
    # names of the server's whole state, in order; None: of a version that could not continue a run
    state: list[str] | None = None
    files: dict[str, str]  # name of a file -> its SHA-256
    versions: dict[str, str]

    @property
    def task(self) -> Task:
        """Return the last learned task."""
        return Task.of_record(self.tasks[-1])

    def __post_init__(self) -> None:
        """Check that the parts agree.

        Raises:
            ValueError: A number of classes or a task does not fit.
        """
        if not self.tasks or any(set(task) != set(NUMBERS) for task in self.tasks):
            raise ValueError(f"tasks must be one or more objects with {', '.join(sorted(NUMBERS))}")
        if not len(self.classes) == len(self.has_images) == self.task.stop:
            raise ValueError(
                f"the numbers of classes differ: {len(self.classes)} in classes, "
                f"{len(self.has_images)} in has_images, {self.task.stop} in the last task"
            )


NAN_FIELDS = "accuracy", "metrics"
"""Fields whose numbers may be NaN, which JSON has as null."""


def find_model(folder: str | Path) -> Path:
    """Return the folder of a model: the folder itself, or that of the only model below it.

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
    # the model after a task is in a folder below the model of the whole run
    models = [path for path in folders if not (path.parent / RECORD).is_file()]
    if not models:
        raise FczooError(
            f"no model in {folder}; finished runs store one, except with --no-keep-model and for "
            "methods with own models, such as local"
        )
    if len(models) > 1:
        names = join_first_names([str(path.relative_to(folder)) for path in models], 4)
        raise FczooError(f"{folder} has {len(models)} models: {names}; give one of these folders")
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
            f"{path} has format {content.get('format')!r}, but this fczoo reads "
            f"{FORMAT!r}; install the fczoo that wrote it"
            + (f", version {writer}" if isinstance(writer, str) else "")
        )
    return read_record(path, "model description", ModelRecord, FORMAT, NAN_FIELDS)


def write_model_record(folder: Path, record: ModelRecord) -> None:
    """Write the description of a model.

    Args:
        folder: Folder of the model.
        record: Its description.
    """
    write_record(folder / RECORD, FORMAT, msgspec.to_builtins(record))


def read_verified(folder: Path, name: str, record: ModelRecord) -> bytes:
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


def model_of_run(folder: str | Path, method: str, seed: int) -> Path:
    """Return the folder of the model from which one run starts.

    Args:
        folder: Folder of a model, or a run folder with ``METHOD/seedN`` or with only one model.
        method: Method of the run.
        seed: Seed of the run.

    Raises:
        FczooError: No model exists there, or only models of other methods and seeds.
    """
    folder = Path(folder)
    place = folder / method / f"seed{seed}"
    if (place / RECORD).is_file():
        return place
    if len(models_of(folder)) > 1:
        raise FczooError(
            f"{folder} has no model of {method} with seed {seed}; give the folder of one model, "
            "METHOD/seedN; all seeds then start from it"
        )
    return find_model(folder)


def models_of(folder: str | Path) -> list[Path]:
    """Return the folders of the models from which runs can start.

    Args:
        folder: Folder of a model, or a run folder, whose models are of the same data and tasks.

    Raises:
        FczooError: No model exists there.
    """
    folder = Path(folder)
    places = sorted(path.parent for path in folder.glob(f"*/seed*/{RECORD}"))
    return places if places and not (folder / RECORD).is_file() else [find_model(folder)]


def path_note(out: Path) -> Path:
    """Return the file that stores the paths in a run folder's settings on this machine.

    Args:
        out: The run folder.
    """
    name = hashlib.sha256(str(out.resolve()).encode()).hexdigest()[:24]
    return home() / "begun" / f"{name}.json"


def weights_note(sha256: str) -> Path:
    """Return the file that stores the path of a weight file on this machine.

    Args:
        sha256: SHA-256 of the weights.
    """
    return home() / "begun" / f"weights-{sha256[:24]}.json"


def stored_paths(place: Path) -> dict[str, str]:
    """Return the paths of a run's settings on this machine, by setting; empty if none is stored.

    Args:
        place: Folder of one setting of a bench, or of a model in it.
    """
    place = place.resolve()
    for out in (place, *place.parents):
        if path_note(out).is_file():
            notes, inside = read_json(path_note(out), "note"), place.relative_to(out)
            names = map(str, (inside, *inside.parents))
            return next((dict(notes[name]) for name in names if name in notes), {})
    return {}


def backbone_spec(record: ModelRecord) -> str:
    """Return the spec of a run's backbone, with the path of its file on this machine.

    Args:
        record: Description of the model.
    """
    spec = str(record.settings.get("backbone"))
    name, path = split_stored_spec(spec)
    if path is None:
        return spec
    note = weights_note(str(record.backbone.get("sha256")))
    if not path.is_file() and note.is_file():
        path = Path(str(read_json(note, "note").get("path")))
    file = f"{path.parent}/{path.name}"  # a file in a folder needs no suffix of weights
    return f"{name}:{file}" if name else file


def settings_with_local_paths(place: Path, record: ModelRecord) -> dict[str, Any]:
    """Return the settings of a model's run, with its files and folders on this machine.

    Args:
        place: Folder of the model.
        record: Its description.

    Raises:
        FczooError: The run started from a model whose folder is not known on this machine.
    """
    paths, values = stored_paths(place), dict(record.settings)
    values |= {"data_root": paths.get("data_root"), "backbone": backbone_spec(record)}
    run_folder = next((p for p in place.resolve().parents if (p / PARTITION).is_file()), None)
    if run_folder and str(values.get("partition")).startswith("file:"):
        values["partition"] = f"file:{run_folder / PARTITION}"
    if values.get("start_from"):
        if "start_from" not in paths:
            raise FczooError(
                f"the run of {place} started from the model {values['start_from']}; only the "
                "machine of that run knows where this model is, so repeat the command there"
            )
        values["start_from"] = paths["start_from"]
    return values


def has_same_data(values: Mapping[str, Any], dataset: str, data_root: str | None) -> bool:
    """Return whether a run's data are those of a data set and data root.

    Args:
        values: Settings of the run, from ``settings_with_local_paths``.
        dataset: Name of a data set.
        data_root: Its data root; None: that of ``FCZOO_HOME``.
    """
    run_root, other_root = (
        Path(root).expanduser().resolve() if root else home() / "data"
        for root in (values["data_root"], data_root)
    )
    is_same_set = DATASETS.get(dataset) is DATASETS.get(str(values["dataset"]))
    return is_same_set and run_root == other_root


def start_values(folder: str, dataset: str | None, data_root: str | None) -> dict[str, Any]:
    """Return the settings with which a run continues from a model, unless the user gives others.

    They are those of the model's run. With the same data, the tasks are its remaining tasks, or one
    task of the classes that were added since. With other data, it is one task of all their classes.

    Args:
        folder: Folder of the model, or its run folder.
        dataset: Data set of the new tasks; None: that of the run.
        data_root: Data root of the new tasks; None: that of the run.

    Returns:
        Values by setting; the text ``none`` for None.

    Raises:
        FczooError: No model exists there.
    """
    place = models_of(folder)[0]
    record = read_model_record(place)
    values = settings_with_local_paths(place, record)
    task, tasks = record.task, values["tasks"]
    remaining = task.count - task.index - 1
    values["tasks"] = (
        tasks[-remaining:] if isinstance(tasks, list) and remaining else remaining or 1
    )
    values |= {"base_classes": None, "ways": None}  # the tasks are listed
    if tasks == DOMAINS:
        values["tasks"] = tasks  # ``check_start_settings`` refuses it
    root = values["data_root"] if data_root is None else None if data_root == "none" else data_root
    if not has_same_data(values, dataset or str(values["dataset"]), root):
        values |= {"tasks": 1, "class_order": "natural", "class_order_seed": None}
        if values.get("norm_by_dataset"):
            values |= {name: record.backbone[name] for name in ("mean", "std")}
            values["norm_by_dataset"] = False
    values |= {"dataset": dataset or values["dataset"], "data_root": root, "vary": ["training"]}
    values.pop("stop_after_tasks", None)  # the model's run ended there; this one continues
    values["resize"] = record.resize  # records without the setting are of its default
    return {name: "none" if value is None else value for name, value in values.items()}
