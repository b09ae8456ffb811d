"""Formats of exports, and their common checks."""

from pathlib import Path
from typing import Literal, NoReturn

import torch
from torch import Tensor

from fczoo import __version__
from fczoo.core.errors import FczooError
from fczoo.core.files import encode_json
from fczoo.models.classifier import Classifier

ExportFormat = Literal["timm", "torch", "onnx", "peft"]
"""Formats of an export."""
SUFFIXES: dict[ExportFormat, str] = {
    "timm": ".safetensors",
    "torch": ".pt2",
    "onnx": ".onnx",
    "peft": "",
}
"""Suffix of the exported file by format, by which programs recognise it; peft has a folder."""
TOLERANCE = 1e-4  # largest absolute and relative difference of logits
IMAGES = 3  # number of random images on which an export is compared with the model


def check_path(path: Path, style: ExportFormat) -> None:
    """Check that an export overwrites nothing and that its file has the format's suffix.

    Args:
        path: File of the export.
        style: Format.

    Raises:
        FczooError: The file exists, its folder does not, or its name has another suffix.
    """
    suffix = SUFFIXES[style]
    if suffix and path.suffix != suffix:
        raise FczooError(f"{path} does not end with {suffix!r}; give another --out")
    if path.exists():
        raise FczooError(f"{path} exists; remove it, or give another --out")
    if not path.parent.is_dir():
        raise FczooError(f"no folder {path.parent}; create it, or give another --out")


def refuse_export(model: Classifier, style: ExportFormat, reason: str) -> NoReturn:
    """Raise an error because a format cannot express the method.

    Args:
        model: Stored model.
        style: Format.
        reason: Reason, a clause about the method.

    Raises:
        FczooError: Always.
    """
    advice = "" if style == "torch" else "; use --format torch"
    raise FczooError(f"{model.method.name} cannot be exported to {style}: {reason}{advice}")


def export_metadata(model: Classifier) -> dict[str, str]:
    """Return the metadata of an export: classes, input, method, data set and version.

    Args:
        model: Kept model.
    """
    config = model.backbone.config
    return {
        "classes": encode_json(model.classes),
        "image_size": str(config.image_size),
        "mean": encode_json(config.mean),
        "std": encode_json(config.std),
        "method": model.method.name,
        "dataset": model.record.dataset,
        "fczoo": __version__,
    }


def check_images(model: Classifier) -> Tensor:
    """Return random images [B, 3, S, S] for the comparison of logits.

    Args:
        model: Kept model.
    """
    size = model.backbone.config.image_size
    rng = torch.Generator().manual_seed(0)
    return torch.randn(IMAGES, 3, size, size, generator=rng)


def check_logits(model: Classifier, style: ExportFormat, logits: Tensor, expected: Tensor) -> None:
    """Check that an export gives the logits of the model.

    Args:
        model: Kept model.
        style: Format.
        logits: Logits [B, C] of the export.
        expected: Logits [B, C] of the model.

    Raises:
        FczooError: They differ.
    """
    logits, expected = logits.double(), expected.double()
    if not torch.allclose(logits, expected, rtol=TOLERANCE, atol=TOLERANCE):
        difference = float((logits - expected).abs().nan_to_num().max())
        refuse_export(model, style, f"its logits would differ by up to {difference:.2g}")


def float_model(model: Classifier) -> Classifier:
    """Return the model with a float32 backbone, as reference for the logits of a float32 export.

    Args:
        model: Kept model.
    """
    backbone = model.backbone.to(dtype=torch.float32)
    return Classifier(model.record, model.method, backbone, model.state)
