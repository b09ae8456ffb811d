"""Rotary position embedding of patches."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.core.vit_config import Rope


class Rotation:
    """Rotation of queries and keys by the positions of their patches; other tokens keep theirs.

    Class token, registers, prompts and tokens behind the patches do not rotate.
    """

    def __init__(self, rope: Rope, side: int, head_dim: int, device: torch.device):
        """Compute the angles of ``side`` x ``side`` patches."""
        self.halves = rope.halves
        pairs = head_dim // 4  # of each image axis
        exponents = torch.arange(pairs, dtype=torch.float32, device=device) / pairs
        steps = torch.arange(side, dtype=torch.float32, device=device)
        if rope.centred:
            steps = 2 * math.pi * (2 * (steps + 0.5) / side - 1)
        elif rope.reference is not None:
            steps = steps / side * rope.reference
        rows, columns = steps.repeat_interleave(side), steps.repeat(side)
        angles = torch.stack([rows, columns], 1)[..., None] / rope.temperature**exponents
        angles = angles.flatten(1)
        angles = angles.repeat(1, 2) if rope.halves else angles.repeat_interleave(2, 1)
        self._cos, self._sin = angles.cos(), angles.sin()

    def apply(self, tokens: Tensor, first_patch: int, heads: int) -> Tensor:
        """Rotate the patches among projected tokens [B, N, D].

        Args:
            tokens: Queries or keys.
            first_patch: Number of tokens in front of the patches.
            heads: Number of heads.

        Returns:
            Tokens [B, N, D] in the same data type.
        """
        after = tokens.shape[1] - first_patch - len(self._cos)
        margins = (0, 0, first_patch, after)
        cos, sin = F.pad(self._cos, margins, value=1.0), F.pad(self._sin, margins)
        x = tokens.unflatten(-1, (heads, -1))
        out: Tensor = x * cos[:, None] + self._quarter_turn(x) * sin[:, None]
        return out.flatten(2).to(tokens.dtype)

    def _quarter_turn(self, x: Tensor) -> Tensor:
        """Turn each pair of channels by 90 degrees."""
        if self.halves:
            first, second = x.chunk(2, -1)
            return torch.cat([-second, first], -1)
        return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
