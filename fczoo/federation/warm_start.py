"""Start of a run from a kept model: checks of its settings, and its state."""

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.errors import FczooError, first_line
from fczoo.core.method import Method
from fczoo.core.options import quote
from fczoo.core.seeds import torch_stream
from fczoo.core.tree import Tree
from fczoo.core.types import EndsTasks, HasClientMemory, Task
from fczoo.federation.model_record import (
    SERVER_STATE,
    TENSORS,
    ModelRecord,
    model_of_run,
    models_of,
    read_model_record,
    read_verified,
)
from fczoo.federation.result import metrics_of
from fczoo.federation.scenario import Scenario
from fczoo.federation.server import Server

log = logging.getLogger("fczoo")

NAN = float("nan")


@dataclass(frozen=True)
class Start:
    """The kept model from which a run starts."""

    record: ModelRecord
    state: Tree  # of the server
    about: Mapping[str, Any]  # model, its number of tasks, and the hash of its tensors

    def progress(self, gives_logits: bool) -> dict[str, Any]:
        """Return the fields of a result for the learned tasks.

        The accuracies are those of the model's run. Other figures of its earlier evaluations are
        not part of a model: they are NaN, or None.

        Args:
            gives_logits: Whether the method gives logits.
        """
        rows = [list(row) for row in self.record.accuracy]
        tasks, count = self.record.tasks, len(rows)
        return {
            "start": dict(self.about),
            "accuracy": rows,
            "task_aware": [[NAN] * len(row) for row in rows],
            "next_accuracy": [None] * count,
            "top5": [NAN] * count,
            "calibration": [NAN] * count if gives_logits else [],
            "class_accuracy": [[NAN] * int(task["stop"]) for task in tasks],
        }


def start_options(folder: str, method: str) -> dict[str, Any]:
    """Return the options with which a method continues from a model.

    Args:
        folder: Folder of the model, or a run folder.
        method: Registered name of the method.

    Raises:
        FczooError: No model of the method exists there.
    """
    records = [read_model_record(path) for path in models_of(folder)]
    options = [record.options for record in records if record.method == method]
    if not options:
        names = ", ".join(sorted({record.method for record in records}))
        raise FczooError(
            f"{folder} has no model of {method}, only of {names}; a run must continue with the "
            "method of its model"
        )
    return dict(options[0])


def find_start(folder: str, method: Method, seed: int) -> tuple[Path, ModelRecord]:
    """Return the folder and the description of the model from which a run starts.

    Args:
        folder: Folder of the model, or a run folder.
        method: Method of the run.
        seed: Seed of the run.

    Raises:
        FczooError: The method cannot continue from the model.
    """
    path = model_of_run(folder, method.name, seed)
    record = read_model_record(path)
    start_options(str(path), method.name)
    _check_options(path, record, method)
    if record.state is None:
        problem = f"the model in {path} is of a version of fczoo whose models cannot continue"
        raise FczooError(f"{problem}; repeat its run")
    if SERVER_STATE not in record.files and (
        missing := [name for name in record.state if name not in record.tensors]
    ):
        raise FczooError(
            f"{method.name} needs the server's {', '.join(missing[:3])} to continue, but {path} "
            "was kept with --no-keep-server-state; repeat its run without this option"
        )
    return path, record


def _check_tasks(path: Path, record: ModelRecord, scenario: Scenario) -> None:
    """Raise FczooError unless a model has the tasks with which the stream of a run begins."""
    tasks = scenario.stream.tasks[: scenario.stream.learned_count]
    bounds = [(task["start"], task["stop"]) for task in record.tasks]
    classes = scenario.stream.classes[: len(record.classes)]
    if bounds != [(task.start, task.stop) for task in tasks] or list(classes) != record.classes:
        raise FczooError(
            f"the tasks of {path} differ from those of other models in "
            f"{scenario.settings.start_from}; choose one model, such as --start-from {path}"
        )


def _check_backbone(path: Path, record: ModelRecord, backbone: Backbone) -> None:
    """Raise FczooError unless a run has the backbone and the input of a model."""
    run_config = {**backbone.config.record(), "sha256": backbone.sha256}
    for name, value in record.backbone.items():
        run_value = (
            list(run_config[name])
            if isinstance(run_config.get(name), tuple)
            else run_config.get(name)
        )
        if run_value != (list(value) if isinstance(value, tuple) else value):
            raise FczooError(
                f"the backbone of the model in {path} has {name} {quote(value)}, but that of this "
                f"run {quote(run_value)}; leave out --backbone and its options, such as "
                "--image-size"
            )


def _check_options(path: Path, record: ModelRecord, method: Method) -> None:
    """Raise FczooError if an option other than a rate or a weight differs from the model's."""
    for name, value in asdict(method).items():
        model_value = record.options.get(name, value)
        model_value = tuple(model_value) if isinstance(value, tuple) else model_value
        if model_value != value and not (
            isinstance(value, float) and isinstance(model_value, int | float)
        ):
            raise FczooError(
                f"the model in {path} has {method.name}.{name}={quote(model_value)}, not "
                f"{quote(value)}; only options with decimal numbers, such as rates, may change"
            )


def load_start(scenario: Scenario, method: Method, seed: int) -> Start:
    """Load the model from which a run starts.

    Tensors with entries per class or per task get entries for the new classes and tasks, drawn as
    in a run from scratch.

    Args:
        scenario: Data, partition and backbone of the run.
        method: Method of the run.
        seed: Seed of the run.

    Raises:
        FczooError: The run cannot continue from the model.
    """
    path, record = find_start(str(scenario.settings.start_from), method, seed)
    _check_backbone(path, record, scenario.backbone)
    _check_tasks(path, record, scenario)
    tensors = read_tensors(path, TENSORS, record)
    if SERVER_STATE in record.files:
        tensors |= read_tensors(path, SERVER_STATE, record)
    device = scenario.backbone.device
    tensors = {name: value.to(device) for name, value in tensors.items()}
    try:
        state = {name: tensors[name] for name in record.state or ()}
    except KeyError as error:
        raise FczooError(f"{path} lacks the tensor {error}; copy the folder again") from error
    tasks = Task.of_record(record.tasks[0]), scenario.stream.tasks[0]
    if tasks[0] != tasks[1]:
        order = scenario.stream.class_order
        fresh = [
            method.begin_task(
                {},
                replace(t, class_order=order[: t.classes]),
                scenario.backbone,
                torch_stream("begin", seed, 0, 0),
            )
            for t in tasks
        ]
        state = grow(method.name, state, *fresh)
    parts = path.resolve().parts[-3:]
    about = {
        "model": "/".join(parts),
        "tasks": len(record.tasks),
        "sha256": record.files[TENSORS],
    }
    return Start(record, state, about)


def start_from_model(server: Server, seed: int) -> int:
    """Load the model from which a run starts into its server.

    Args:
        server: Server of the run, whose settings name the model.
        seed: Seed of the run.

    Returns:
        The number of tasks that the model has learned; 0 without a model.

    Raises:
        FczooError: The run cannot continue from the model.
    """
    if not server.scenario.settings.start_from:
        return 0
    method, start = server.method, load_start(server.scenario, server.method, seed)
    if keeps_client_memory(method):
        log.warning(
            "%s continues without the memory of its clients, such as exemplars, and may forget "
            "more: a kept model does not store it",
            method.name,
        )
    server.replace_state(start.state)
    progress = start.progress(server.training.gives_logits)
    server.result = replace(server.result, **progress)
    server.result.metrics = metrics_of(server.result)
    return len(start.record.tasks)


def grow(method: str, state: Tree, small: Tree, large: Tree) -> Tree:
    """Add entries of further classes and tasks to the tensors of a state.

    Args:
        method: Name of the method.
        state: State of a run with fewer classes or tasks.
        small: State at the beginning of such a run.
        large: State at the beginning of the run that continues it. Its shapes show which
            dimensions depend on these numbers, and its last entries are added.

    Raises:
        FczooError: A tensor is divided among the tasks, so that it cannot grow.
    """
    grown = dict(state)
    for name, value in large.items():
        growth = [a - b for a, b in zip(value.shape, small[name].shape, strict=True)]
        dims = [dim for dim, number in enumerate(growth) if number]
        if not dims:
            continue
        if len(dims) > 1 or min(growth) < 0:
            raise FczooError(
                f"{method} sizes the tensor {name} at the start of a run, for the tasks and "
                "classes planned then; a run that continues can only learn those, so learn all "
                "tasks in one run"
            )
        (dim,) = dims
        # copies of a tensor, such as a teacher's, have its name behind a prefix
        copies = [key for key in state if key.endswith(f".{name}") and key not in large]
        end = value.narrow(dim, value.shape[dim] - growth[dim], growth[dim])
        for key in (name, *copies):
            if key in state:
                grown[key] = _append(state[key], end, dim, is_copy=key != name)
    return grown


def _append(value: Tensor, end: Tensor, dim: int, is_copy: bool) -> Tensor:
    """Append ``end`` to a tensor; zeros to a copy, or if ``end`` has another shape."""
    shape = list(value.shape)
    shape[dim] = end.shape[dim]
    entries = end.to(value) if not is_copy and list(end.shape) == shape else value.new_zeros(shape)
    return torch.cat([value, entries], dim)


def read_tensors(path: Path, name: str, record: ModelRecord) -> Tree:
    """Read a file of tensors of a model.

    Args:
        path: Folder of the model.
        name: Name of the file.
        record: Description of the model.

    Raises:
        FczooError: The file is missing, was changed or is damaged.
    """
    content = read_verified(path, name, record)
    try:
        # in separate memory: sums depend on alignment in their last bit
        return {key: value.clone() for key, value in load(content).items()}
    except (SafetensorError, RuntimeError) as error:
        raise FczooError(
            f"{path / name} is not a valid model: {first_line(error)}; copy the folder again"
        ) from error


def keeps_client_memory(method: Method) -> bool:
    """Return whether the clients of a method have a memory, which a kept model does not store.

    Args:
        method: Method of the run.
    """
    return isinstance(method, HasClientMemory | EndsTasks) or bool(method.training().exemplars)
