"""State of a run between two rounds, and the checkpoint file from which the run resumes."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fczoo.core.errors import FczooError, first_line
from fczoo.core.files import write_safely
from fczoo.core.tree import Tree, nbytes
from fczoo.federation.serialization import pack, unpack

FORMAT = "fczoo-checkpoint-3"


@dataclass(frozen=True)
class Snapshot:
    """A run between two rounds.

    Generators are keyed and optimizers made again in every round, so neither is part of it.
    """

    task: int  # tasks that are finished and evaluated
    round: int  # rounds done of the task after them
    trees: dict[str, Tree]  # by name: "state", and whatever else persists as tensors
    notes: dict[str, Any]  # plain values, as JSON keeps them


class Checkpoint:
    """The file of one run's last snapshot.

    Its bytes are those of ``fczoo.federation.serialization``.
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
        """Load the last snapshot, with accelerator tensors on ``device``; None without a snapshot.

        Raises FczooError for a file that is damaged or something else.
        """
        if not self.path.exists():
            return None
        try:
            trees, about = unpack(FORMAT, self.path.read_bytes(), device)
            return Snapshot(int(about["task"]), int(about["round"]), trees, dict(about["notes"]))
        except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
            raise FczooError(
                f"{self.path} is not a valid checkpoint: {first_line(error)}; remove it to begin "
                "this run again"
            ) from error

    def remove(self) -> None:
        """Remove the file, since the run is finished."""
        self.path.unlink(missing_ok=True)


def contiguous_copy(value: Tensor) -> Tensor:
    """Copy a tensor into separate memory, as if it were read from a file.

    Sums can depend on strides and alignment in their last bit.
    """
    return (
        value.clone(memory_format=torch.contiguous_format)
        if value.storage_offset() or not value.is_contiguous()
        else value
    )


class ClientState(NamedTuple):
    """State of all or some clients between exchanges."""

    memories: dict[int, Tree]  # client -> what it remembers, see core.method.HasClientMemory
    taught: dict[
        int, dict[int, Tensor]
    ]  # client -> position of an image -> output [C] of the task's teacher
    controls: dict[int, Tree]  # client -> its tree of the local rule, see ControlVariates
    lost: dict[int, Tree]  # client -> what its codes of the task have lost, see compression

    def of(self, clients: Iterable[int]) -> "ClientState":
        """Select the state of some clients."""
        numbers = list(clients)
        return ClientState(
            {k: self.memories[k] for k in numbers if k in self.memories},
            {k: self.taught[k] for k in numbers if k in self.taught},
            {k: self.controls[k] for k in numbers if k in self.controls},
            {k: self.lost[k] for k in numbers if k in self.lost},
        )

    def take(self, later: "ClientState") -> None:
        """Replace the state of some clients."""
        self.memories.update(later.memories)
        self.taught.update(later.taught)
        self.controls.update(later.controls)
        self.lost.update(later.lost)


class RunState(NamedTuple):
    """All that a run resumes from, in addition to its result and the downlink's ledger."""

    state: Tree  # the server's
    kept: ClientState  # by the clients
    control: Tree  # the server's tree of the local rule, see ControlVariates
    moments: Tree  # of the server optimizer, see ServerSteps
    begin: Tree  # trained tensors as the task began, for diagnostics; empty without


def memory_bytes(memory: Tree, exemplars: str, image: int) -> int:
    """Return the bytes of a client's memory; each exemplar position counts as ``image`` bytes."""
    tensors = {name: value for name, value in memory.items() if name != exemplars}
    return nbytes(tensors) + image * len(memory.get(exemplars, ()))


def to_trees(carried: RunState) -> dict[str, Tree]:
    """Convert a snapshot to trees, which ``from_trees`` reads."""
    server_trees = {"state": carried.state, "control": carried.control, "begin": carried.begin}
    return {**server_trees, "moments": carried.moments, **kept_trees(carried.kept)}


def from_trees(trees: Mapping[str, Tree]) -> RunState:
    """Return the snapshot that ``to_trees`` converted."""
    moments = trees.get("moments", {})  # not in older files
    return RunState(trees["state"], kept_in(trees), trees["control"], moments, trees["begin"])


def kept_trees(kept: ClientState) -> dict[str, Tree]:
    """Convert client state to trees, which ``kept_in`` reads."""
    trees = {f"memory.{client}": memory for client, memory in kept.memories.items()}
    trees |= {f"control.{client}": variates for client, variates in kept.controls.items()}
    trees |= {f"lost.{client}": lost for client, lost in kept.lost.items()}
    for client, teacher_outputs in kept.taught.items():
        positions, outputs = list(teacher_outputs), list(teacher_outputs.values())
        trees[f"taught.{client}"] = {
            "position": torch.tensor(positions),
            "output": torch.stack(outputs),
        }
    return trees


def kept_in(trees: Mapping[str, Tree]) -> ClientState:
    """Return the client state that ``kept_trees`` converted, from among other trees."""
    teacher_outputs = {
        client: dict(zip(tree["position"].tolist(), tree["output"], strict=True))
        for client, tree in _by_client(trees, "taught.").items()
    }
    return ClientState(
        _by_client(trees, "memory."),
        teacher_outputs,
        _by_client(trees, "control."),
        _by_client(trees, "lost."),
    )


def _by_client(trees: Mapping[str, Tree], prefix: str) -> dict[int, Tree]:
    return {int(k.removeprefix(prefix)): v for k, v in trees.items() if k.startswith(prefix)}
