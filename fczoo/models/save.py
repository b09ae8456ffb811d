"""Saving of the model at the end of a run or of a task."""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save

from fczoo.backbones.weights import split_spec
from fczoo.core.files import home, write_json, write_safely
from fczoo.core.tree import Tree
from fczoo.federation.run import FederatedRun
from fczoo.federation.server_optimizers import MOMENTS
from fczoo.models.card import model_card
from fczoo.models.record import (
    CARD,
    RECORD,
    SERVER_STATE,
    TENSORS,
    ModelRecord,
    write_model_record,
)
from fczoo.models.tensors import prediction_tensors


def save_model(folder: str | Path, run: FederatedRun, server_state: bool = True) -> Path:
    """Save the model of a run as it is after the last evaluated task.

    ``model.safetensors`` holds the tensors that prediction reads, ``server_state.safetensors``
    (only its owner can read it) the rest of the server's state, ``model.json`` all else, and
    ``README.md`` describes them.
    What clients keep is never saved, and neither are the weights of the backbone.

    Args:
        folder: Folder of the model; it is created.
        run: Run with at least one evaluated task, such as ``Benchmark.start`` returns.
        server_state: Whether to save the rest of the server's state, from which learning could
            continue.

    Returns:
        The folder.

    Raises:
        OSError: Writing fails.
    """
    folder, result, world = Path(folder), run.result, run.world
    folder.mkdir(parents=True, exist_ok=True)
    tasks = run.stream.tasks[: len(result.accuracy)]
    task = tasks[-1]
    tensors = prediction_tensors(run.method, run.backbone, run.state, task)
    rest = {name: value for name, value in run.state.items() if name not in tensors}
    rest |= {f"{MOMENTS}{name}": value for name, value in run.server.steps.moments.items()}
    (folder / RECORD).unlink(missing_ok=True)  # until the new one is written, there is no model
    files = {TENSORS: _write(folder / TENSORS, tensors)}
    (folder / SERVER_STATE).unlink(missing_ok=True)
    if server_state and rest:
        files[SERVER_STATE] = _write(folder / SERVER_STATE, rest, mode=0o600)
    record = ModelRecord(
        method=run.method.name,
        options=result.options,
        classes=list(run.stream.classes[: task.stop]),
        has_images=world.classes_with_images(task).tolist(),
        tasks=[asdict(learned) for learned in tasks],
        dataset=run.settings.dataset,
        settings=result.settings,
        seed=run.seed,
        backbone=result.backbone,
        precision=str(run.backbone.dtype).removeprefix("torch."),
        stored_size=world.test.pixels.shape[-1],
        test_crop=run.settings.test_crop,
        accuracy=result.accuracy,
        metrics=result.metrics,
        test_counts=result.test_counts[: len(tasks)],
        partition=result.partition,
        device=run.backbone.device.type,
        tensors=list(tensors),
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
    """Store where a weight file is on this machine; a model names it by its last name only.

    Args:
        spec: Backbone of the run, ``NAME:FILE`` or a file.
        sha256: SHA-256 of its weights.
    """
    _, path = split_spec(spec)
    if path is None or not sha256:
        return
    note = weights_note(sha256)
    note.parent.mkdir(parents=True, exist_ok=True)
    write_json(note, {"path": str(path.resolve())})


def weights_note(sha256: str) -> Path:
    """Return the file that has the path of a weight file on this machine.

    Args:
        sha256: SHA-256 of the weights.
    """
    return home() / "begun" / f"weights-{sha256[:24]}.json"
