"""Softmax attention, by whichever kernel suits the device."""

import torch
import torch.nn.functional as F
from torch import Tensor


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Compute softmax attention of queries, keys and values.

    On the CPU the fused kernel has no rule for a batch of clients (vmap) and a slow bfloat16
    backward, so the formula is written out there; on other devices the fused kernel is faster or
    needs less memory.

    Args:
        query: Queries [B, H, N, D/H].
        key: Keys [B, H, M, D/H].
        value: Values [B, H, M, D/H].

    Returns:
        Outputs [B, H, N, D/H].
    """
    inside_vmap = torch._C._functorch.maybe_current_level() is not None
    if query.device.type == "cpu" and (inside_vmap or query.dtype == torch.bfloat16):
        scale = query.shape[-1] ** -0.5
        attention: Tensor = ((query * scale) @ key.mT).softmax(-1)
        return attention @ value
    return F.scaled_dot_product_attention(query, key, value)
