"""Trees of tensors as bytes, for checkpoints and other machines.

It is the only form in which they leave a process.

safetensors, tensors called ``TREE/NAME``, plain values as JSON among its metadata, with a SHA-256
over all of it. No pickle, so that nothing in foreign bytes can run.
"""

import json
import struct
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from fczoo.core.files import encode_json
from fczoo.core.tree import Tree, sha256_of


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


def form_of(content: bytes) -> str | None:
    """Return the declared format of bytes.

    Raises ValueError for damaged bytes.
    """
    try:
        return _metadata(content).get("format")
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(str(error)) from error


def seal_of(content: bytes) -> str:
    """Return the SHA-256 of bytes, by which a message is recognised; ``unpack`` checks it.

    It is not that of the bytes: safetensors may write the same content in another order.
    """
    return str(_metadata(content)["sha256"])


def _metadata(content: bytes) -> dict[str, str]:
    """Read the metadata of a safetensors file from its JSON header."""
    (length,) = struct.unpack("<Q", content[:8].ljust(8, b"\xff"))
    if length > len(content):
        raise ValueError("its header is cut off")
    about = json.loads(content[8 : 8 + length]).get("__metadata__", {})
    if not isinstance(about, dict):
        raise ValueError("its header is none")
    return about
