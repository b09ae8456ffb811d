"""Weight files: find the tensors of a plain ViT in a checkpoint."""

import argparse
import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from fczoo.core.errors import FczooError

log = logging.getLogger("fczoo")

UNUSED = ("head.", "head_dist.", "pre_logits.", "decoder_", "mask_token", "masked_embed")
"""Prefixes of weights that the feature of a whole image does not use."""
FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DEEPEST = 4  # levels of dictionaries that are searched
NAMED = 6  # entries that a note names
ANCHORS = ("cls_token", "patch_embed.proj.weight")  # tensors that every plain ViT has
PREFERENCE = ("teacher", "ema", "base_encoder", "", "student", "momentum_encoder")
"""Words that decide between several backbones in one file, best first; "" is any other place."""
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
"""What a checkpoint may hold beside tensors; rebuilding them runs no code of the file."""


class _Candidate(NamedTuple):
    """A backbone in a checkpoint, under dictionary keys and a prefix of its tensors' names."""

    keys: tuple[str, ...]
    prefix: str
    content: Mapping[Any, Any]

    @property
    def rank(self) -> int:
        place = "_".join(("", *self.keys, self.prefix, "")).replace(".", "_")
        ranks = [i for i, word in enumerate(PREFERENCE) if word and f"_{word}_" in place]
        return min(ranks, default=PREFERENCE.index(""))

    def __str__(self) -> str:
        under = f"under {'.'.join(self.keys)}" if self.keys else ""
        prefix = f"prefix {self.prefix}" if self.prefix else ""
        return ", ".join(filter(None, (under, prefix))) or "at the top"

    def tensors(self) -> dict[str, Tensor]:
        return {
            key.removeprefix(self.prefix): value
            for key, value in self.content.items()
            if isinstance(key, str) and isinstance(value, Tensor) and key.startswith(self.prefix)
        }


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """Read the plain ViT in a safetensors or PyTorch file, without its classification head.

    Raises:
        FczooError: The file is damaged, holds no ViT or several, or its type is not floating.
    """
    content = _load(path)
    chosen = _choose(path, list(_find_backbones(content)))
    weights = {k: v for k, v in chosen.tensors().items() if not k.startswith(UNUSED)}
    if "dist_token" in weights:
        problem = f"{path} is a distilled DeiT (dist_token), which is not a plain ViT"
        raise FczooError(f"{problem}; take the weights of the DeiT without distillation")
    for name, tensor in weights.items():
        if tensor.dtype not in FLOATING:
            problem = f"weight {name} of {path} is {str(tensor.dtype).removeprefix('torch.')}"
            raise FczooError(f"{problem}; give weights in fp16, bf16, fp32 or fp64")
    dropped = _list_dropped(content, chosen)
    head_only = all(name.startswith(UNUSED) for name in dropped)
    if not head_only or chosen.keys or chosen.prefix:
        more = f" and {len(dropped) - NAMED} more" if len(dropped) > NAMED else ""
        rest = f"; dropped {', '.join(dropped[:NAMED])}{more}" if dropped else ""
        log.warning("%s: took %d tensors %s%s", path.name, len(weights), chosen, rest)
    return weights


def _load(path: Path) -> Any:
    with path.open("rb") as file:
        if file.read(9)[8:] == b"{":  # the JSON header of safetensors, after its length
            return load_file(path)
    try:
        with (
            path.open("rb") as file,  # torch.load would go by the suffix of a path
            torch.serialization.safe_globals(_PLAIN_VALUES),
            warnings.catch_warnings(action="ignore"),
        ):
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # those of unpickling share no base class
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
    if not isinstance(content, Mapping) or len(keys) > DEEPEST:
        return
    names = {k for k, v in content.items() if isinstance(k, str) and isinstance(v, Tensor)}
    for name in sorted(names):
        prefix = name.removesuffix(ANCHORS[0])
        whole = name.endswith(ANCHORS[0]) and (not prefix or prefix.endswith("."))
        if whole and f"{prefix}{ANCHORS[1]}" in names:
            yield _Candidate(keys, prefix, content)
    for key, value in content.items():
        if isinstance(key, str):
            yield from _find_backbones(value, (*keys, key))


def _choose(path: Path, candidates: list[_Candidate]) -> _Candidate:
    if not candidates:
        problem = f"{path} does not hold a plain ViT in timm's names (cls_token, patch_embed)"
        raise FczooError(f"{problem}; convert its state dict to timm's names, or take another file")
    best = min(candidate.rank for candidate in candidates)
    chosen = [candidate for candidate in candidates if candidate.rank == best]
    if len(chosen) > 1:
        named = " and ".join(str(candidate) for candidate in chosen[:2])
        raise FczooError(f"{path} holds several backbones: {named}; save one of them to its own file")
    return chosen[0]


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
        own = isinstance(value, Tensor) and str(key).startswith(chosen.prefix)
        if own and not name.startswith(UNUSED):
            continue
        prefix, dot, _ = name.partition(".")
        names[f"{prefix}.*" if isinstance(value, Tensor) and dot else name] = None
    return list(names)
