"""Weight files: search for the tensors of a plain ViT in a checkpoint."""

import argparse
import logging
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from fczoo.core.errors import FczooError
from fczoo.core.names import join_first_names

log = logging.getLogger("fczoo.backbones")
log.setLevel(logging.INFO)  # runs say what they drop

UNUSED_PREFIXES = (
    *("head.", "head_dist.", "pre_logits.", "decoder_", "mask_token", "masked_embed"),
    *("rope_embed.", "local_cls_norm."),  # of DINOv3: constants, and a norm for training
)
"""Prefixes of weights that the feature of a whole image does not use."""
FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MAX_DEPTH = 4  # maximum depth of the searched dictionaries
MAX_LISTED_ENTRIES = 6  # maximum number of entries that a warning lists
ANCHOR = "patch_embed.proj.weight"  # tensor that every plain ViT has
COMPANIONS = ("cls_token", "blocks.0.norm1.weight")  # and one of these next to it
PREFERENCE = ("teacher", "ema", "base_encoder", "", "student", "momentum_encoder")
"""Words that decide between several backbones in one file, best first; "" is any other name."""
_SCALARS = (np.float16, np.float32, np.float64, np.int8, np.int16, np.int32, np.int64, np.bool_)
_DTYPES = [type(np.dtype(kind)) for kind in _SCALARS]
_SCALAR: Any = np.float64(0).__reduce__()[0]  # numpy's function that rebuilds a scalar
_PLAIN_VALUES: list[Any] = [
    (_SCALAR, "numpy._core.multiarray.scalar"),
    (_SCALAR, "numpy.core.multiarray.scalar"),  # its name in numpy 1
    np.dtype,
    *_DTYPES,
    argparse.Namespace,
]
"""Values that a checkpoint may hold next to tensors; rebuilding them runs no code of the file."""


class _Candidate(NamedTuple):
    """Backbone in a checkpoint, under dictionary keys and a prefix of its tensors' names."""

    keys: tuple[str, ...]
    prefix: str
    content: Mapping[Any, Any]

    @property
    def rank(self) -> int:
        path = "_".join(("", *self.keys, self.prefix, "")).replace(".", "_")
        ranks = [i for i, keyword in enumerate(PREFERENCE) if keyword and f"_{keyword}_" in path]
        return min(ranks, default=PREFERENCE.index(""))

    def __str__(self) -> str:
        under = f"under {'.'.join(self.keys)}" if self.keys else ""
        prefix = f"prefix {self.prefix}" if self.prefix else ""
        return ", ".join(filter(None, (under, prefix))) or "at the top level"

    def tensors(self) -> dict[str, Tensor]:
        return {
            key.removeprefix(self.prefix): value
            for key, value in self.content.items()
            if isinstance(key, str) and isinstance(value, Tensor) and key.startswith(self.prefix)
        }


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """Read the plain ViT in a safetensors or PyTorch file, without its classification head.

    Dropped tensors are logged.

    Args:
        path: Weight file.

    Returns:
        Tensors by their timm names.

    Raises:
        FczooError: The file is damaged, does not hold exactly one ViT, or a tensor is not
            floating-point.
    """
    content = _load(path)
    chosen = _choose(path, content)
    weights = {k: v for k, v in chosen.tensors().items() if not k.startswith(UNUSED_PREFIXES)}
    if "dist_token" in weights:
        problem = f"{path} is a distilled DeiT (dist_token), which is not a plain ViT"
        raise FczooError(f"{problem}; take the weights of the DeiT without distillation")
    for name, tensor in weights.items():
        if tensor.dtype not in FLOATING:
            problem = f"weight {name} of {path} is {str(tensor.dtype).removeprefix('torch.')}"
            raise FczooError(f"{problem}; give weights in fp16, bf16, fp32 or fp64")
    leftovers = _list_dropped(content, chosen)
    head_only = all(name.startswith(UNUSED_PREFIXES) for name in leftovers)
    if head_only and not chosen.keys and not chosen.prefix:
        if leftovers:
            log.info("%s: dropped %s", path.name, _describe_head(chosen, leftovers))
    else:
        note = ""
        if leftovers:
            note = f"; dropped {join_first_names(leftovers, MAX_LISTED_ENTRIES)}"
        log.warning("%s: loaded %d tensors (%s)%s", path.name, len(weights), chosen, note)
    return weights


def _load(path: Path) -> Any:
    with path.open("rb") as file:
        if file.read(9)[8:] == b"{":  # the JSON header of safetensors, after its length
            return load_file(path)
    try:
        with (
            path.open("rb") as file,  # from a path, torch.load would use the suffix
            torch.serialization.safe_globals(_PLAIN_VALUES),
            warnings.catch_warnings(action="ignore"),
        ):
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling errors do not share a base class
        advice = "save only its state dict, with safetensors.torch.save_file"
        if "TorchScript" in str(error):
            raise FczooError(f"{path} is a TorchScript archive; {advice}") from error
        if foreign := re.search(r"GLOBAL (\S+) was not an allowed global", str(error)):
            problem = f"{path} holds Python objects ({foreign[1]}), which fczoo does not unpickle"
            trust = "if you trust it, load it with torch.load(FILE, weights_only=False) and"
            raise FczooError(f"{problem}; {trust} {advice}") from error
        problem = f"cannot read weights from {path}: it is damaged or of another format"
        raise FczooError(f"{problem}; get it again, in safetensors or PyTorch format") from error


def _find_backbones(content: Any, keys: tuple[str, ...] = ()) -> Iterator[_Candidate]:
    """Yield every backbone in nested dictionaries."""
    if not isinstance(content, Mapping) or len(keys) > MAX_DEPTH:
        return
    names = {k for k, v in content.items() if isinstance(k, str) and isinstance(v, Tensor)}
    for name in sorted(names):
        prefix = name.removesuffix(ANCHOR)
        is_anchor = name.endswith(ANCHOR) and (not prefix or prefix.endswith("."))
        if is_anchor and any(f"{prefix}{companion}" in names for companion in COMPANIONS):
            yield _Candidate(keys, prefix, content)
    for key, value in content.items():
        if isinstance(key, str):
            yield from _find_backbones(value, (*keys, key))


def dropped_tensors(path: Path) -> str:
    """List the tensors of a file that ``read_state_dict`` drops; empty without any.

    Raises:
        FczooError: As for ``read_state_dict``.
    """
    content = _load(path)
    chosen = _choose(path, content)
    return _describe_head(chosen, _list_dropped(content, chosen))


def _choose(path: Path, content: Any) -> _Candidate:
    candidates = list(_find_backbones(content))
    names: Iterable[str] = map(str, content) if isinstance(content, Mapping) else ()
    if not candidates and any("patch_embeddings.projection" in name for name in names):
        problem = f"the tensors of {path} have the names of Hugging Face transformers"
        advice = "use timm's weights of this model (see 'fczoo list backbones')"
        raise FczooError(f"{problem}; {advice}")
    if not candidates:
        problem = f"{path} has no plain ViT with timm's tensor names (cls_token, patch_embed)"
        raise FczooError(f"{problem}; rename the tensors as in timm, or give another file")
    best = min(candidate.rank for candidate in candidates)
    chosen = [candidate for candidate in candidates if candidate.rank == best]
    if len(chosen) > 1:
        names = " and ".join(str(candidate) for candidate in chosen[:2])
        raise FczooError(
            f"{path} holds several backbones: {names}; save one of them to its own file"
        )
    return chosen[0]


def _describe_head(chosen: _Candidate, leftovers: list[str]) -> str:
    """List dropped tensors of a head, with the number of its classes."""
    weight = chosen.tensors().get("head.weight")
    classes = "" if weight is None else f" (a classification head of {len(weight):,} classes)"
    return f"{', '.join(leftovers)}{classes}"


def _list_dropped(content: Mapping[Any, Any], chosen: _Candidate) -> list[str]:
    """List entries of a file, and prefixes of tensors, that do not belong to the backbone."""
    names = dict[str, None]()
    level = content
    for depth, key in enumerate(chosen.keys):
        inside = chosen.keys[:depth]
        names |= dict.fromkeys(".".join(map(str, (*inside, k))) for k in level if k != key)
        level = level[key]
    for key, value in level.items():
        name = str(key).removeprefix(chosen.prefix)
        in_backbone = isinstance(value, Tensor) and str(key).startswith(chosen.prefix)
        if in_backbone and not name.startswith(UNUSED_PREFIXES):
            continue
        prefix, dot, _ = name.partition(".")
        names[f"{prefix}.*" if isinstance(value, Tensor) and dot else name] = None
    return list(names)
