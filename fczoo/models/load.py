"""Loading of kept models."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import torch

from fczoo.backbones.load import load_backbone
from fczoo.core.backbone import Backbone
from fczoo.core.errors import FczooError, use_python_names
from fczoo.core.method import Method
from fczoo.core.options import build
from fczoo.core.registry import METHODS
from fczoo.core.tree import Tree
from fczoo.core.vit_config import ViTConfig
from fczoo.federation.model_record import (
    TENSORS,
    ModelRecord,
    backbone_spec,
    find_model,
    read_model_record,
)
from fczoo.federation.start import read_tensors
from fczoo.models.classifier import Classifier


@use_python_names
def load_model(
    folder: str | Path,
    *,
    backbone: str | Backbone | None = None,
    device: str | torch.device | None = None,
) -> Classifier:
    """Load the model that a run has kept.

    Example: ``model = fczoo.load_model("results/run-1/hgp/seed0")``, then
    ``model(model.transform(image)[None])``.

    Args:
        folder: ``METHOD/seedN`` of a run folder, or a run folder with only one model.
        backbone: Name, file or ``NAME:FILE`` of the frozen weights, or the backbone itself.
            Default: that of the run.
        device: Device of the model. Default: the CPU.

    Returns:
        A ``torch.nn.Module``: images [B, 3, S, S] -> logits [B, classes], as in the run's last
        evaluation.

    Raises:
        FczooError: A file is missing, damaged or of a newer format, the weights of the backbone
            are others, or the method is not installed.
    """
    place = find_model(folder)
    record = read_model_record(place)
    method = _method(place, record)
    tree = _tensors(place, record)
    frozen = _backbone(place, record, backbone)
    model = Classifier(record, method, frozen.to(dtype=getattr(torch, record.precision)), tree)
    return model if device is None else model.to(device)


def _method(place: Path, record: ModelRecord) -> Method:
    if METHODS.find(record.method) is None:
        raise FczooError(
            f"the model in {place} is of method {record.method!r}, which is not installed; install "
            "the package that defines it"
        )
    method: Method = build(METHODS.get(record.method), record.method, record.options)
    return method


def _tensors(place: Path, record: ModelRecord) -> Tree:
    tensors = read_tensors(place, TENSORS, record)
    try:
        return {name: tensors[name] for name in record.tensors}
    except KeyError as error:
        raise FczooError(f"{place / TENSORS} lacks {error}; copy the folder again") from error


def _backbone(place: Path, record: ModelRecord, choice: str | Backbone | None) -> Backbone:
    """Load the backbone and compare it with that of the run."""
    if isinstance(choice, Backbone):
        backbone = choice
    else:
        names = {f.name for f in fields(ViTConfig)}
        try:
            config = msgspec.convert(
                {k: v for k, v in record.backbone.items() if k in names}, ViTConfig
            )
        except msgspec.ValidationError as error:
            raise FczooError(f"the backbone in {place} is not valid: {error}") from error
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
            f"the model in {place} was trained on {record.backbone.get('name')} with SHA-256 "
            f"{str(expected)[:12]}, and these weights have {backbone.sha256[:12]}; give the same "
            "weights with --backbone NAME:FILE"
        )
    return backbone
