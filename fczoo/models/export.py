"""Export of kept models to formats that other programs read."""

from pathlib import Path

from fczoo.models.classifier import Classifier
from fczoo.models.export_checks import SUFFIXES, ExportFormat, check_path
from fczoo.models.export_peft import export_peft
from fczoo.models.export_program import export_onnx, export_torch
from fczoo.models.export_timm import export_timm

EXPORTERS = {
    "timm": export_timm,
    "torch": export_torch,
    "onnx": export_onnx,
    "peft": export_peft,
}
"""Format -> function of a model and a path; it returns Python code that loads the export."""


def default_path(folder: Path, style: ExportFormat) -> Path:
    """Return the file of an export in the folder of its model.

    Args:
        folder: Folder of the model.
        style: Format.
    """
    return folder / f"{style}{SUFFIXES[style]}"


def export_model(model: Classifier, style: ExportFormat, path: Path) -> str:
    """Export a model, and compare the logits of the export with its own.

    Args:
        model: Kept model.
        style: Format.
        path: File to write, which must not exist.

    Returns:
        Python code that loads the export.

    Raises:
        FczooError: The file exists, the format cannot express the method, or a package is missing.
    """
    check_path(path, style)
    return EXPORTERS[style](model.to("cpu"), path)
