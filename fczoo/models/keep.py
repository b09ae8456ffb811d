"""Keeping of models during runs, and their size on disk."""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from fczoo.core.errors import first_line
from fczoo.federation.run import FederatedRun
from fczoo.models.record import RECORD, SERVER_STATE, TENSORS
from fczoo.models.save import save_model

log = logging.getLogger("fczoo")

KeepModel = Literal["final", "tasks", "none"]
"""Models that a run keeps: the final one, one after each task, or none."""


def keep_model(folder: Path, run: FederatedRun, keep: KeepModel, server_state: bool) -> None:
    """Keep the model of the task that a run has just evaluated, if it is asked for.

    The final model is in the run's folder, and that of an earlier task t in ``task{t}`` below it.
    A run whose model cannot be saved continues with a warning, since its numbers took longer.

    Args:
        folder: Folder of the run.
        run: The run.
        keep: Models that are kept.
        server_state: Whether to keep the rest of the server's state as well.
    """
    is_final = run.result.is_finished
    has_none = run.method.training().own_models  # which the note under its tables says
    if keep == "none" or has_none or not (is_final or keep == "tasks"):
        return
    place = folder if is_final else folder / f"task{len(run.result.accuracy)}"
    try:
        save_model(place, run, server_state)
    except Exception as error:  # of a disk, or of a method that reads more than an image
        log.warning(
            "the model of %s is not kept: %s: %s",
            run.method.name,
            type(error).__name__,
            first_line(error),
        )


def models_in(folders: Iterable[Path]) -> tuple[list[Path], int]:
    """Return the folders of the models below some folders, and their size on disk in bytes.

    Args:
        folders: Folders, such as run folders.
    """
    places = sorted({path.parent for folder in folders for path in folder.rglob(RECORD)})
    files = [place / name for place in places for name in (RECORD, TENSORS, SERVER_STATE)]
    return places, sum(path.stat().st_size for path in files if path.is_file())
