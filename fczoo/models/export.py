"""Export of stored models: all formats, and the programs of ``torch.export`` and ONNX."""

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.export import ExportedProgram

from fczoo.core.errors import FczooError, first_line
from fczoo.core.files import write_safely
from fczoo.models.classifier import Classifier
from fczoo.models.export_checks import (
    SUFFIXES,
    ExportFormat,
    check_images,
    check_logits,
    check_path,
    export_metadata,
    refuse_export,
)
from fczoo.models.export_peft import export_peft
from fczoo.models.export_timm import export_timm

LARGEST_BATCH = 2**31 - 1  # torch 2.6 requires an upper limit


def export_torch(model: Classifier, path: Path) -> str:
    """Export the forward as a program of ``torch.export``, for batches of any size.

    Args:
        model: Kept model on the CPU.
        path: File of the program.

    Returns:
        Python code that loads the file.

    Raises:
        FczooError: torch cannot trace the method.
    """
    program = traced_program(model, "torch")
    content = io.BytesIO()
    torch.export.save(program, content, extra_files=export_metadata(model))
    write_safely(path, content.getvalue())
    return f"torch.export.load({str(path)!r}).module()"


def export_onnx(model: Classifier, path: Path) -> str:
    """Export the forward to ONNX, for batches of any size.

    Args:
        model: Kept model on the CPU.
        path: ONNX file to write.

    Returns:
        Python code that loads the file.

    Raises:
        FczooError: A package is missing, or torch cannot trace or translate the method.
    """
    try:
        import onnxruntime
        import onnxscript  # noqa: F401  torch.onnx needs it
    except ImportError as error:
        raise FczooError(
            f"--format onnx needs the package {error.name}; run pip install 'fczoo[onnx]'"
        ) from error
    program, images = traced_program(model, "onnx"), check_images(model)
    with TemporaryDirectory() as folder, _suppress_messages():
        draft = Path(folder) / path.name
        try:
            onnx_program: Any = torch.onnx.export(
                program,
                (images,),
                dynamo=True,
                verbose=False,
                input_names=["images"],
                output_names=["logits"],
            )
            onnx_program.model.metadata_props.update(export_metadata(model))
            onnx_program.save(draft, external_data=False)
            session = onnxruntime.InferenceSession(draft, providers=["CPUExecutionProvider"])
            (logits,) = session.run(None, {"images": images[:2].numpy()})
        except Exception as error:  # torch and ONNX Runtime raise errors of many kinds
            refuse_export(model, "onnx", f"torch.onnx cannot translate it: {_cause(error)}")
        with torch.no_grad():
            check_logits(model, "onnx", torch.from_numpy(logits), model(images[:2]))
        write_safely(path, draft.read_bytes())
    return f"onnxruntime.InferenceSession({str(path)!r})"


def traced_program(model: Classifier, style: ExportFormat) -> ExportedProgram:
    """Convert the forward of a model to a program for any batch size.

    Args:
        model: Kept model on the CPU.
        style: Format, for errors.

    Raises:
        FczooError: torch cannot trace the method, or the program gives other logits.
    """
    images = check_images(model)
    batch = torch.export.Dim("batch", min=1, max=LARGEST_BATCH)
    torch.compiler.reset()  # else torch compares the trace with those of other models
    try:
        with torch.no_grad(), _suppress_messages():
            # strict, because in the other mode len() of images becomes a constant
            program = torch.export.export(
                model, (images,), dynamic_shapes=({0: batch},), strict=True
            )
    except Exception as error:  # torch raises errors of many kinds
        refuse_export(model, style, f"torch.export cannot trace it: {first_line(error)}")
    with torch.no_grad():
        check_logits(model, style, program.module()(images[:1]), model(images[:1]))
    return program


def _cause(error: BaseException) -> str:
    """Return the first line of the error that started a chain; later errors are advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    return first_line(error)


@contextmanager
def _suppress_messages() -> Iterator[None]:
    """Suppress log messages and warnings of torch and ONNX inside a ``with`` block."""
    loggers = [logging.getLogger(name) for name in ("torch", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


EXPORTERS = {
    "timm": export_timm,
    "torch": export_torch,
    "onnx": export_onnx,
    "peft": export_peft,
}
"""Export functions by format; they return Python code that loads the export."""


def default_path(folder: Path, style: ExportFormat) -> Path:
    """Return the default path of an export, in the folder of its model.

    Args:
        folder: Folder of the model.
        style: Format.
    """
    return folder / f"{style}{SUFFIXES[style]}"


def export_model(model: Classifier, style: ExportFormat, path: Path) -> str:
    """Export a model and check that the export gives the same logits.

    Args:
        model: Stored model.
        style: Format.
        path: File to write, which must not exist.

    Returns:
        Python code that loads the export.

    Raises:
        FczooError: The file exists, the format cannot express the method, or a package is missing.
    """
    check_path(path, style)
    return EXPORTERS[style](model.to("cpu"), path)
