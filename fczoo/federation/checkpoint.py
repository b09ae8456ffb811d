"""What survives a killed process: one file a run, replaced after every round, from which the run goes on."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fczoo.core.errors import FczooError, first_line
from fczoo.core.files import write_safely
from fczoo.core.tree import Tree
from fczoo.federation.wire import pack, unpack

FORMAT = "fczoo-checkpoint-3"


@dataclass(frozen=True)
class Snapshot:
    """A run between two rounds.

    Generators are keyed and optimizers made anew in every round, so neither is part of it.
    """

    task: int  # tasks that are finished and evaluated
    round: int  # rounds done of the task after them
    trees: dict[str, Tree]  # by name: "state", and whatever else persists as tensors
    notes: dict[str, Any]  # plain values, as JSON keeps them


class Checkpoint:
    """The file of one run's last snapshot.

    Its bytes are those of ``fczoo.federation.wire``.
    """

    def __init__(self, path: Path, saved: Callable[[], None] = lambda: None):
        self.path = path
        self.saved = saved  # called after each snapshot, where a run may be stopped

    def save(self, snapshot: Snapshot) -> None:
        """Replace the last snapshot; until the new one is on disk, the old one stands.

        Raises OSError, e.g. on a full disk.
        """
        notes = {"task": snapshot.task, "round": snapshot.round, "notes": snapshot.notes}
        write_safely(self.path, pack(FORMAT, snapshot.trees, notes))
        self.saved()

    def load(self, device: torch.device | str = "cpu") -> Snapshot | None:
        """The last snapshot, what lay on an accelerator on ``device``; none where nothing was saved.

        Raises FczooError for a file that is damaged or something else.
        """
        if not self.path.exists():
            return None
        try:
            trees, about = unpack(FORMAT, self.path.read_bytes(), device)
            return Snapshot(int(about["task"]), int(about["round"]), trees, dict(about["notes"]))
        except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
            raise FczooError(
                f"{self.path} is no valid checkpoint: {first_line(error)}; remove it to begin this run anew"
            ) from error

    def remove(self) -> None:
        """The run is finished and needs it no more."""
        self.path.unlink(missing_ok=True)


def settled(value: Tensor) -> Tensor:
    """The tensor in memory of its own, as one read from a file has it.

    Sums can depend on strides and alignment in their last bit.
    """
    return (
        value.clone(memory_format=torch.contiguous_format)
        if value.storage_offset() or not value.is_contiguous()
        else value
    )
