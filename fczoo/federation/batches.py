"""Clients, and the inputs of their batches."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fczoo.core.method import Method
from fczoo.data.views import Augment, ImageStore


@dataclass(frozen=True)
class Client:
    """A client of one task: its number and where its images are in the training store."""

    number: int
    index: Tensor  # [n] positions


def pad(rows: Tensor, width: int) -> Tensor:
    return torch.cat([rows, rows[:1].expand(width - len(rows), *rows.shape[1:])])


def make_inputs(
    method: Method,
    store: ImageStore,
    index: Tensor,
    augment: Augment,
    draws: Tensor | None = None,
    cache_queries: bool = False,
) -> tuple[Tensor, Tensor]:
    """Images and query features that ``method`` asks for, flat over clients; the other one is empty [B, 0]."""
    wanted, state_dtype = method.inputs(), torch.promote_types(store.backbone.dtype, torch.float32)
    from_cache = "query" in wanted and (draws is None or cache_queries)
    x = q = torch.empty(len(index), 0, dtype=state_dtype, device=store.backbone.device)
    if "images" in wanted or ("query" in wanted and not from_cache):
        x = store.view(index) if draws is None else store.augmented(index, augment, draws)
    if from_cache:
        q = store.query(index)
    elif "query" in wanted:
        with torch.no_grad():
            q = store.backbone(x)
    return (x if "images" in wanted else x.new_empty(len(index), 0)), q
