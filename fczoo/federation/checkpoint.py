"""What survives a killed process: one file a run, replaced after every round, from which the run goes on."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fczoo.core.errors import FczooError, first_line
from fczoo.core.files import write_safely
from fczoo.core.tree import Tree

FORMAT = "fczoo-checkpoint-1"


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

    Format: safetensors, tensors called ``TREE/NAME``, position and notes as JSON among its metadata, with a
    SHA-256 over all of it. No pickle, so that nothing in a foreign file can run.
    """

    def __init__(self, path: Path, saved: Callable[[], None] = lambda: None):
        self.path = path
        self.saved = saved  # called after each snapshot, where a run may be stopped

    def save(self, snapshot: Snapshot) -> None:
        """Replace the last snapshot; until the new one is on disk, the old one stands.

        Raises OSError, e.g. on a full disk.
        """
        tensors = {
            f"{tree}/{name}": v.detach().cpu().clone(memory_format=torch.contiguous_format)
            for tree, values in snapshot.trees.items()
            for name, v in values.items()
        }
        places = {
            tree: {k: v.device.type for k, v in values.items()} for tree, values in snapshot.trees.items()
        }
        text = json.dumps(
            {"task": snapshot.task, "round": snapshot.round, "places": places, "notes": snapshot.notes}
        )
        write_safely(
            self.path, save(tensors, {"format": FORMAT, "text": text, "sha256": _digest(tensors, text)})
        )
        self.saved()

    def load(self, device: torch.device | str = "cpu") -> Snapshot | None:
        """The last snapshot, what lay on an accelerator on ``device``; none where nothing was saved.

        Raises FczooError for a file that is damaged or something else.
        """
        if not self.path.exists():
            return None
        try:
            with safe_open(self.path, "pt") as file:
                about = file.metadata() or {}
                if about.get("format") != FORMAT:
                    raise ValueError(f"format {about.get('format')!r}, expected {FORMAT!r}")
                tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - the file is no mapping
            if about["sha256"] != _digest(tensors, about["text"]):
                raise ValueError("its content does not match its sha256")
            content = json.loads(about["text"])
            trees = {  # in the order of saving: sums over a tree depend on it in their last bit
                tree: {
                    name: tensors[f"{tree}/{name}"].to("cpu" if place == "cpu" else device)
                    for name, place in names.items()
                }
                for tree, names in content["places"].items()
            }
            return Snapshot(int(content["task"]), int(content["round"]), trees, dict(content["notes"]))
        except (
            OSError,
            SafetensorError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            RuntimeError,
            OverflowError,
        ) as error:
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


def _digest(tensors: dict[str, Tensor], text: str) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        value = tensors[name]
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
