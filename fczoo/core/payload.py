"""What a client sends to the server, and what each part of it tells about the data behind it."""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from fczoo.core.tree import Tree, select

Content = Literal["parameters", "counts", "class means", "class variances", "gradients of single images"]
"""What a payload tells a server about the data behind it."""


def keep_rows(payload: Tree, prefix: str, keep: Tensor) -> Tree:
    """The upload with only some rows [g] of its class statistics under a prefix.

    Rows beside a ``label`` are cut out; of tensors with one row a class of the task the others become 0, whose count of 0
    says that the client does not have the class.
    """
    rows = select(payload, prefix)
    if f"{prefix}label" in payload:
        return {**payload, **{k: v[keep.to(v.device)] for k, v in rows.items()}}
    return {
        **payload,
        **{
            k: torch.where(keep.to(v.device).view(-1, *[1] * (v.dim() - 1)), v, torch.zeros_like(v))
            for k, v in rows.items()
        },
    }


def content_of(name: str, uploads: Mapping[str, Content]) -> Content:
    """What a tensor of a payload tells, by ``Method.uploads``."""
    return next((content for prefix, content in uploads.items() if name.startswith(prefix)), "parameters")


ENVELOPE = ("num_samples", "client")
