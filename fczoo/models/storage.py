"""Storage of models: saving, loading and size on disk."""

import hashlib
import logging
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from safetensors.torch import save

from fczoo.backbones.load import load_backbone
from fczoo.backbones.weights import split_spec
from fczoo.core.backbone import Backbone
from fczoo.core.errors import FczooError, InterruptedCommandError, first_line, use_python_names
from fczoo.core.files import write_json, write_safely
from fczoo.core.method import Method
from fczoo.core.options import build
from fczoo.core.registry import METHODS
from fczoo.core.tree import Tree
from fczoo.core.vit_config import ViTConfig
from fczoo.federation.model_record import (
    CARD,
    RECORD,
    SERVER_STATE,
    TENSORS,
    ModelRecord,
    backbone_spec,
    find_model,
    read_model_record,
    weights_note,
    write_model_record,
)
from fczoo.federation.run import FederatedRun
from fczoo.federation.server_optimizers import MOMENTS
from fczoo.federation.warm_start import read_tensors
from fczoo.models.card import model_card
from fczoo.models.classifier import Classifier, prediction_tensors


def save_model(folder: str | Path, run: FederatedRun, server_state: bool = True) -> Path:
    """Save the model of a run after its latest evaluated task.

    ``model.safetensors`` contains the tensors that prediction reads. ``server_state.safetensors``,
    which only its owner can read, contains the rest of the server's state, with control variates
    and moments of the server optimizer. ``model.json`` describes the model, and ``README.md`` is
    its card. Client memory and the weights of the backbone are never saved.

    Args:
        folder: Folder of the model; it is created if needed.
        run: Run with at least one evaluated task, such as ``Benchmark.start`` returns.
        server_state: Whether to save the rest of the server's state, for continued learning.

    Returns:
        The folder.

    Raises:
        FczooError: The method has models of clients and no global one.
        OSError: Writing fails.
    """
    if run.method.training().own_models:
        raise FczooError(
            f"{run.method.name} trains a model per client and has no global model to save"
        )
    folder, result, scenario = Path(folder), run.result, run.scenario
    folder.mkdir(parents=True, exist_ok=True)
    tasks = run.stream.tasks[: len(result.accuracy)]
    task = tasks[-1]
    tensors = prediction_tensors(run.method, run.backbone, run.state, task)
    other_tensors = {name: value for name, value in run.state.items() if name not in tensors}
    other_tensors |= run.server.controls.broadcast
    other_tensors |= {f"{MOMENTS}{name}": value for name, value in run.server.moments.items()}
    (folder / RECORD).unlink(missing_ok=True)  # a folder without this file has no model
    files = {TENSORS: _write(folder / TENSORS, tensors)}
    (folder / SERVER_STATE).unlink(missing_ok=True)
    if server_state and other_tensors:
        files[SERVER_STATE] = _write(folder / SERVER_STATE, other_tensors, mode=0o600)
    record = ModelRecord(
        method=run.method.name,
        options=result.options,
        classes=list(run.stream.classes[: task.stop]),
        has_images=scenario.classes_with_images(task).tolist(),
        tasks=[learned_task.record for learned_task in tasks],
        dataset=run.settings.dataset,
        settings=result.settings,
        seed=run.seed,
        backbone=result.backbone,
        precision=str(run.backbone.dtype).removeprefix("torch."),
        stored_size=scenario.test.pixels.shape[-1],
        test_crop=run.settings.test_crop,
        resize=run.settings.resize,
        accuracy=result.accuracy,
        metrics=result.metrics,
        test_counts=result.test_counts[: len(tasks)],
        partition=result.partition,
        device=run.backbone.device.type,
        tensors=list(tensors),
        state=list(run.state),
        files=files,
        versions=result.versions,
    )
    write_safely(folder / CARD, model_card(record, type(run.method)).encode())
    store_weights_path(run.settings.backbone, run.backbone.sha256)
    write_model_record(folder, record)
    return folder


def _write(path: Path, tensors: Mapping[str, torch.Tensor], mode: int = 0o666) -> str:
    """Write tensors as safetensors; return the SHA-256 of the file."""
    tree: Tree = {
        name: value.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, value in tensors.items()
    }
    content = save(tree)
    write_safely(path, content, mode)
    return hashlib.sha256(content).hexdigest()


def store_weights_path(spec: str, sha256: str) -> None:
    """Store the path of a weight file on this machine, since a model records only its file name.

    Args:
        spec: Backbone of the run, ``NAME:FILE`` or a file.
        sha256: SHA-256 of its weights.
    """
    _, path = split_spec(spec)
    if path is None or not sha256:
        return
    note_path = weights_note(sha256)
    note_path.parent.mkdir(parents=True, exist_ok=True)
    write_json(note_path, {"path": str(path.resolve())})


log = logging.getLogger("fczoo")

KeepModel = Literal["final", "tasks", "none"]
"""Models that a run stores: the final one, one after each task, or none."""


def keep_model(folder: Path, run: FederatedRun, keep: KeepModel, server_state: bool) -> None:
    """Save the model of the latest task of a run, if ``keep`` includes it.

    The final model is in the run's folder, that of an earlier task t in its subfolder ``task{t}``.
    If a model cannot be saved, as on a full disk, the run continues with a warning.

    Args:
        folder: Folder of the run.
        run: The run.
        keep: Models to save.
        server_state: Whether to save the rest of the server's state as well.
    """
    is_final = run.result.is_finished
    has_none = run.method.training().own_models  # a note below the tables explains it
    if keep == "none" or has_none or not (is_final or keep == "tasks"):
        return
    model_folder = folder if is_final else folder / f"task{len(run.result.accuracy)}"
    try:
        save_model(model_folder, run, server_state)
    except InterruptedCommandError:
        raise
    except (OSError, FczooError) as error:
        log.warning(
            "the model of %s is not stored: %s: %s",
            run.method.name,
            type(error).__name__,
            first_line(error),
        )


def models_in(folders: Iterable[Path]) -> tuple[list[Path], int]:
    """Find the models at or below some folders; return their folders and total size in bytes.

    Args:
        folders: Folders, such as run folders.
    """
    model_folders = sorted({path.parent for folder in folders for path in folder.rglob(RECORD)})
    files = [
        model_folder / name
        for model_folder in model_folders
        for name in (RECORD, TENSORS, SERVER_STATE)
    ]
    return model_folders, sum(path.stat().st_size for path in files if path.is_file())


@use_python_names
def load_model(
    folder: str | Path,
    *,
    backbone: str | Backbone | None = None,
    device: str | torch.device | None = None,
) -> Classifier:
    """Load the stored model of a run.

    Example: ``model = fczoo.load_model("results/run-1/hgp/seed0")``, then
    ``model(model.transform(image)[None])``.

    Args:
        folder: ``METHOD/seedN`` of a run folder, or a run folder with only one model.
        backbone: Name, file or ``NAME:FILE`` of the frozen weights, or the backbone itself.
            Default: that of the run.
        device: Device of the model. Default: the CPU.

    Returns:
        A ``torch.nn.Module`` that maps images [B, 3, S, S] to logits [B, classes], as in the run's
        last evaluation.

    Raises:
        FczooError: A file is missing, damaged or of a newer format, the backbone has other weights,
            or the method is not installed.
    """
    model_folder = find_model(folder)
    record = read_model_record(model_folder)
    method = _method(model_folder, record)
    tree = _tensors(model_folder, record)
    frozen_backbone = _backbone(model_folder, record, backbone)
    frozen_backbone = frozen_backbone.to(dtype=getattr(torch, record.precision))
    model = Classifier(record, method, frozen_backbone, tree)
    return model if device is None else model.to(device)


def _method(model_folder: Path, record: ModelRecord) -> Method:
    if METHODS.find(record.method) is None:
        raise FczooError(
            f"the model in {model_folder} is of method {record.method!r}, which is not installed; "
            "install the package that defines it"
        )
    try:
        method: Method = build(METHODS.get(record.method), record.method, record.options)
    except FczooError as error:
        raise FczooError(f"{model_folder / RECORD}: {error}") from error
    return method


def _tensors(model_folder: Path, record: ModelRecord) -> Tree:
    tensors = read_tensors(model_folder, TENSORS, record)
    try:
        return {name: tensors[name] for name in record.tensors}
    except KeyError as error:
        raise FczooError(
            f"{model_folder / TENSORS} lacks the tensor {error}; copy the folder again"
        ) from error


def _backbone(model_folder: Path, record: ModelRecord, choice: str | Backbone | None) -> Backbone:
    """Load the backbone and check that its weights are those of the run."""
    if isinstance(choice, Backbone):
        backbone = choice
    else:
        names = {f.name for f in fields(ViTConfig)}
        try:
            config = msgspec.convert(
                {k: v for k, v in record.backbone.items() if k in names}, ViTConfig
            )
        except msgspec.ValidationError as error:
            raise FczooError(
                f"the backbone in {model_folder / RECORD} is not valid: {error}"
            ) from error
        backbone = load_backbone(
            choice or backbone_spec(record),
            image_size=config.image_size,
            mean=config.mean,
            std=config.std,
            pool=config.pool,
        )
    expected: Any = record.backbone.get("sha256")
    if backbone.sha256 != expected:
        raise FczooError(
            f"the model in {model_folder} was trained on {record.backbone.get('name')} with "
            f"SHA-256 {str(expected)[:12]}, but the loaded weights have {backbone.sha256[:12]}; "
            "give the weights of the run with --backbone NAME:FILE"
        )
    return backbone
