"""State of a run between two rounds, and the checkpoint file from which the run resumes."""

import json
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fczoo.core.errors import FczooError, first_line
from fczoo.core.files import encode_json, write_safely
from fczoo.core.tree import Tree, nbytes, sha256_of

FORMAT = "fczoo-checkpoint-3"


def pack(form: str, trees: Mapping[str, Tree], notes: Mapping[str, Any]) -> bytes:
    """Serialize trees and plain values in the format ``form``."""
    tensors = {
        f"{tree}/{name}": v.detach().cpu().clone(memory_format=torch.contiguous_format)
        for tree, values in trees.items()
        for name, v in values.items()
    }
    places = {tree: {k: v.device.type for k, v in values.items()} for tree, values in trees.items()}
    text = encode_json({"places": places, "notes": dict(notes)})
    return save(tensors, {"format": form, "text": text, "sha256": sha256_of(tensors, text)})


def unpack(
    form: str, content: bytes, device: torch.device | str = "cpu"
) -> tuple[dict[str, Tree], Any]:
    """Deserialize trees and plain values, with accelerator tensors on ``device``.

    Raises ValueError for bytes that are damaged or of another format.
    """
    try:
        about = _metadata(content)
        if about.get("format") != form:
            raise ValueError(f"format {about.get('format')!r}, expected {form!r}")
        tensors = {
            name: value.clone() for name, value in load(content).items()
        }  # in memory of its own
        if about["sha256"] != sha256_of(tensors, about["text"]):
            raise ValueError("its content does not match its sha256")
        description = json.loads(about["text"])
        trees = {  # in the order of packing: sums over a tree depend on it in their last bit
            tree: {
                name: tensors[f"{tree}/{name}"].to("cpu" if device_type == "cpu" else device)
                for name, device_type in names.items()
            }
            for tree, names in description["places"].items()
        }
        return trees, description["notes"]
    except (
        SafetensorError,
        KeyError,
        TypeError,
        AttributeError,
        RuntimeError,
        OverflowError,
    ) as error:
        raise ValueError(str(error)) from error


def format_of(content: bytes) -> str | None:
    """Return the declared format of bytes.

    Raises ValueError for damaged bytes.
    """
    try:
        return _metadata(content).get("format")
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(str(error)) from error


def content_hash(content: bytes) -> str:
    """Return the SHA-256 of packed content, which identifies a message; ``unpack`` checks it.

    It is not a hash of the bytes: safetensors may write the same content in another order.
    """
    return str(_metadata(content)["sha256"])


def header_size(content: bytes) -> int:
    """Return the length of a safetensors file's header, which its first 8 bytes state.

    Args:
        content: Content of the file.
    """
    (length,) = struct.unpack("<Q", content[:8].ljust(8, b"\xff"))
    return int(length)


def _metadata(content: bytes) -> dict[str, str]:
    """Read the metadata of a safetensors file from its JSON header."""
    length = header_size(content)
    if length > len(content):
        raise ValueError("its header is cut off")
    about = json.loads(content[8 : 8 + length]).get("__metadata__", {})
    if not isinstance(about, dict):
        raise ValueError("its header has no metadata")
    return about


@dataclass(frozen=True)
class Snapshot:
    """State of a run between two rounds.

    It holds no generators, which have keys, and no optimizers, which every round creates again.
    """

    task: int  # tasks that are finished and evaluated
    round: int  # rounds done of the task after them
    trees: dict[str, Tree]  # by name: "state", and whatever else persists as tensors
    notes: dict[str, Any]  # plain values, as JSON keeps them


class Checkpoint:
    """The file of one run's last snapshot.

    ``pack`` writes its content.
    """

    def __init__(self, path: Path, on_save: Callable[[], None] = lambda: None):
        self.path = path
        self.on_save = on_save  # called after each snapshot, where a run may be stopped

    def save(self, snapshot: Snapshot) -> None:
        """Replace the last snapshot, which stays until the new one is on disk.

        Raises OSError, e.g. on a full disk.
        """
        notes = {"task": snapshot.task, "round": snapshot.round, "notes": snapshot.notes}
        write_safely(self.path, pack(FORMAT, snapshot.trees, notes))
        self.on_save()

    def load(self, device: torch.device | str = "cpu") -> Snapshot | None:
        """Load the last snapshot, with accelerator tensors on ``device``; None without a snapshot.

        Raises FczooError for a file that is damaged or not a checkpoint.
        """
        if not self.path.exists():
            return None
        try:
            trees, about = unpack(FORMAT, self.path.read_bytes(), device)
            return Snapshot(int(about["task"]), int(about["round"]), trees, dict(about["notes"]))
        except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
            problem = f"{self.path} is not a valid checkpoint: {first_line(error)}"
            raise FczooError(f"{problem}; remove it to restart this run") from error

    def remove(self) -> None:
        """Remove the file, since the run is finished."""
        self.path.unlink(missing_ok=True)


def contiguous_copy(value: Tensor) -> Tensor:
    """Return a contiguous tensor without storage offset, as one read from a file.

    It is a copy unless ``value`` is such a tensor. Sums can depend on strides and alignment in
    their last bit.
    """
    return (
        value.clone(memory_format=torch.contiguous_format)
        if value.storage_offset() or not value.is_contiguous()
        else value
    )


class ClientState(NamedTuple):
    """State of all or some clients between exchanges."""

    memories: dict[int, Tree]  # client -> what it remembers, see core.method.HasClientMemory
    # client -> position of an image -> output [C] of the task's teacher
    teacher_outputs: dict[int, dict[int, Tensor]]
    controls: dict[int, Tree]  # client -> its tree of the local rule, see ControlVariates
    residuals: dict[int, Tree]  # client -> what its codes of the task have lost, see compression

    def select(self, clients: Iterable[int]) -> "ClientState":
        """Select the state of some clients."""
        numbers = list(clients)
        return ClientState(
            {k: self.memories[k] for k in numbers if k in self.memories},
            {k: self.teacher_outputs[k] for k in numbers if k in self.teacher_outputs},
            {k: self.controls[k] for k in numbers if k in self.controls},
            {k: self.residuals[k] for k in numbers if k in self.residuals},
        )

    def update(self, other: "ClientState") -> None:
        """Replace the state of some clients."""
        self.memories.update(other.memories)
        self.teacher_outputs.update(other.teacher_outputs)
        self.controls.update(other.controls)
        self.residuals.update(other.residuals)

    def to_trees(self) -> dict[str, Tree]:
        """Convert the state to trees, which ``from_trees`` reads."""
        trees = {f"memory.{client}": memory for client, memory in self.memories.items()}
        trees |= {f"control.{client}": variates for client, variates in self.controls.items()}
        trees |= {f"residuals.{client}": tree for client, tree in self.residuals.items()}
        for client, outputs in self.teacher_outputs.items():
            trees[f"taught.{client}"] = {
                "position": torch.tensor(list(outputs)),
                "output": torch.stack(list(outputs.values())),
            }
        return trees

    @classmethod
    def from_trees(cls, trees: Mapping[str, Tree]) -> "ClientState":
        """Read the state from the trees of ``to_trees``, which may be among others."""
        teacher_outputs = {
            client: dict(zip(tree["position"].tolist(), tree["output"], strict=True))
            for client, tree in _by_client(trees, "taught.").items()
        }
        return cls(
            _by_client(trees, "memory."),
            teacher_outputs,
            _by_client(trees, "control."),
            _by_client(trees, "residuals."),
        )


def memory_bytes(memory: Tree, exemplars: str, image: int) -> int:
    """Return the bytes of a client's memory; each exemplar position counts as ``image`` bytes."""
    tensors = {name: value for name, value in memory.items() if name != exemplars}
    return nbytes(tensors) + image * len(memory.get(exemplars, ()))


def _by_client(trees: Mapping[str, Tree], prefix: str) -> dict[int, Tree]:
    return {int(k.removeprefix(prefix)): v for k, v in trees.items() if k.startswith(prefix)}
