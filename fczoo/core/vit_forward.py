"""Forward pass of a vision transformer with plugs; ``fczoo.core.backbone`` describes the plugs.

It is written out here because timm's blocks offer no way to attach adapters per client. It equals
timm's own when no plug is given (tested for every family).
"""

import math
from collections.abc import Callable, Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.core.errors import FczooError
from fczoo.core.vit_config import Rope, ViTConfig


def rotation(
    rope: Rope, side: int, head_dim: int, device: torch.device
) -> Callable[[Tensor, int, int], Tensor]:
    """Return the function that rotates queries or keys by the positions of their patches.

    Class token, registers, prompts and tokens after the patches do not rotate.

    Args:
        rope: Kind of rotary positions.
        side: Number of patches per side.
        head_dim: Channels of a head.
        device: Device of the angles.

    Returns:
        Function of projected tokens [B, N, D], the number of tokens in front of the patches, and
        the number of heads, that returns tokens [B, N, D] in the same data type.
    """
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
    all_cos, all_sin = angles.cos(), angles.sin()

    def rotate(tokens: Tensor, first_patch: int, heads: int) -> Tensor:
        after = tokens.shape[1] - first_patch - len(all_cos)
        margins = (0, 0, first_patch, after)
        cos, sin = F.pad(all_cos, margins, value=1.0), F.pad(all_sin, margins)
        x = tokens.unflatten(-1, (heads, -1))
        out: Tensor = x * cos[:, None] + _quarter_turn(x, rope.halves) * sin[:, None]
        return out.flatten(2).to(tokens.dtype)

    return rotate


def _quarter_turn(x: Tensor, halves: bool) -> Tensor:
    """Turn each pair of channels by 90 degrees; pairs are neighbours, or one of each half."""
    if halves:
        first, second = x.chunk(2, -1)
        return torch.cat([-second, first], -1)
    return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)


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


ADAPTER_SCALE = 0.1  # s of AdaptFormer (Chen et al., NeurIPS 2022)
PooledRows = Literal["cls", "prompt", "cls+prompt"]


class ForwardPass:
    """One forward pass: the network's weights, plugs in their places, and values at taps."""

    def __init__(
        self,
        config: ViTConfig,
        weights: Mapping[str, Tensor],
        plugs: Mapping[str, Tensor],
        taps: dict[str, Tensor],
    ):
        """Create a forward pass.

        Args:
            config: Configuration of the vision transformer.
            weights: Frozen weights by name.
            plugs: Tensors by the names of plugs.
            taps: Values by the names of taps; the pass replaces them.
        """
        self.config, self.weights, self.plugs, self.taps = config, weights, plugs, taps
        kernel = weights["patch_embed.proj.weight"]
        self.dtype = kernel.dtype
        self.feature_dtype = torch.promote_types(self.dtype, torch.float32)
        self.rotate: Callable[[Tensor, int, int], Tensor] | None = None
        if config.rope is not None:
            head_dim = config.dim // config.heads
            self.rotate = rotation(config.rope, config.grid, head_dim, kernel.device)

    def features(self, images: Tensor, pool: PooledRows) -> Tensor:
        """Compute features [B, D] of normalised images [B, 3, S, S]."""
        hidden, prompts = self._embed(images)
        every_row = slice(0, hidden.shape[1])
        output_rows = self._output_rows(pool, prompts, hidden.shape[1])
        for i in range(self.config.depth):
            if f"tokens.{i}" in self.plugs:
                hidden = torch.cat([hidden, self._rows(f"tokens.{i}", len(images))], 1)
                every_row = slice(0, hidden.shape[1])
            if f"deep.{i}" in self.plugs:
                hidden = torch.cat([hidden, self._rows(f"deep.{i}", len(images))], 1)
            last = i == self.config.depth - 1 and not self.taps
            rows = output_rows if last else every_row  # the last block's other rows go unread
            hidden = self._block(hidden, i, rows, prompts)
        read = hidden[:, output_rows] if self.taps else hidden
        return self._pool(read, 0 if pool == "cls" else prompts)

    def class_token(self) -> Tensor:
        """Return the class token [D] at the first block."""
        token = self._weight("cls_token")
        if self.config.position == "all":
            token = token + self._weight("pos_embed")[:, :1]
        if self.config.pre_norm:
            token = self._norm(token, "norm_pre")
        return token[0, 0].to(self.feature_dtype)

    def _output_rows(self, pool: PooledRows, prompts: int, tokens: int) -> slice:
        """Return the rows that the feature reads: prompts, those of the image, or both."""
        start = prompts if pool == "cls" else 0
        if pool == "prompt":
            return slice(start, prompts)
        return slice(start, prompts + 1 if self.config.pool == "cls" else tokens)

    def _pool(self, read: Tensor, prompts: int) -> Tensor:
        """Reduce the rows that the feature reads to features; the first ``prompts`` are prompts."""
        config = self.config
        if not config.norm_after_pool:
            read = self._norm(read, "norm")
        patches = prompts + config.prefix_tokens
        if config.pool == "cls":
            parts = [read]
        elif config.pool == "cls+mean":
            parts = [read[:, :1], read[:, patches:]]
        else:  # class token and registers are not pooled
            parts = [torch.cat([read[:, :prompts], read[:, patches:]], 1)]
        if config.pool == "attention":
            return self._attention_pool(parts[0]).to(self.feature_dtype)
        features = [part.to(self.feature_dtype).mean(1) for part in parts]
        if config.norm_after_pool:
            features = [
                self._norm(f.to(self.dtype), "norm").to(self.feature_dtype) for f in features
            ]
        return torch.cat(features, 1) if len(features) > 1 else features[0]

    def _attention_pool(self, tokens: Tensor) -> Tensor:
        """Compute SigLIP's feature [B, D]: a learnt query attends to tokens [B, N, D]."""
        query = F.linear(self._weight("attn_pool.latent"), *self._layer("attn_pool.q"))
        key, value = F.linear(tokens, *self._layer("attn_pool.kv")).chunk(2, -1)
        heads = (self._heads(part) for part in (query.expand(len(tokens), -1, -1), key, value))
        out = F.linear(attend(*heads).transpose(1, 2).flatten(2), *self._layer("attn_pool.proj"))
        inner = self._activation(
            F.linear(self._norm(out, "attn_pool.norm"), *self._layer("attn_pool.mlp.fc1"))
        )
        return (out + F.linear(inner, *self._layer("attn_pool.mlp.fc2")))[:, 0]

    def _embed(self, images: Tensor) -> tuple[Tensor, int]:
        """Return prompts and embedded image [B, N, D], and the number of prompts."""
        config = self.config
        kernel, bias = self._layer("patch_embed.proj")
        hidden = (
            F.conv2d(images.to(self.dtype), kernel, bias, stride=config.patch_size).flatten(2).mT
        )
        if config.position == "patches":
            hidden = hidden + self._weight("pos_embed")
        names = ["cls_token"] * config.class_token + ["reg_token"] * bool(config.register_tokens)
        prefix = [self._weight(name).expand(len(images), -1, -1) for name in names]
        if prefix:
            hidden = torch.cat([*prefix, hidden], 1)
        if config.position == "all":
            hidden = hidden + self._weight("pos_embed")
        if config.pre_norm:
            hidden = self._norm(hidden, "norm_pre")
        if "tokens" not in self.plugs:
            return hidden, 0
        tokens = self._rows("tokens", len(images))
        return torch.cat([tokens, hidden], 1), tokens.shape[1]

    def _block(self, hidden: Tensor, block: int, rows: slice, prompts: int) -> Tensor:
        """Compute a block's output [B, rows, D]."""
        attention_output = self._attention(
            self._norm(hidden, f"blocks.{block}.norm1"), block, rows, prompts
        )
        hidden = hidden[:, rows] + self._scale(attention_output, f"blocks.{block}.ls1")
        mlp_output = self._scale(
            self._mlp(self._norm(hidden, f"blocks.{block}.norm2"), block), f"blocks.{block}.ls2"
        )
        adapter_output = self._adapter(hidden, block)
        hidden = hidden + (mlp_output if adapter_output is None else mlp_output + adapter_output)
        self._record_tap(f"blocks.{block}", hidden)
        return hidden

    def _attention(self, hidden: Tensor, block: int, rows: slice, prompts: int) -> Tensor:
        """Compute a block's attention [B, rows, D]: the tokens in ``rows`` attend to all tokens."""
        name = f"blocks.{block}.attn"
        self._record_tap(f"{name}.qkv", hidden)
        parts = F.linear(hidden, *self._layer(f"{name}.qkv")).chunk(3, -1)
        heads = []
        for part, projection in zip("qkv", parts, strict=True):
            extra = self._lora(hidden, f"lora.{block}.{part}")
            projection = projection if extra is None else projection + extra
            if self.rotate is not None and part != "v":
                first_patch = prompts + self.config.prefix_tokens
                projection = self.rotate(projection, first_patch, self.config.heads)
            if part != "q" and f"prefix.{block}.{part}" in self.plugs:
                prefix = self._rows(f"prefix.{block}.{part}", len(hidden))
                projection = torch.cat([prefix, projection], 1)
            heads.append(self._heads(projection))
        query, key, value = heads
        output = attend(query[:, :, rows], key, value).transpose(1, 2).flatten(2)
        if self.config.attention_norm:
            output = self._norm(output, f"{name}.norm")
        return self._linear(output, f"{name}.proj", f"lora.{block}.proj")

    def _mlp(self, hidden: Tensor, block: int) -> Tensor:
        name = f"blocks.{block}.mlp"
        inner = self._linear(hidden, f"{name}.fc1", f"lora.{block}.fc1")
        if self.config.swiglu:
            gate, value = inner.chunk(2, -1)
            inner = F.silu(gate) * value
        else:
            inner = self._activation(inner)
        if self.config.mlp_norm:
            inner = self._norm(inner, f"{name}.norm")
        return self._linear(inner, f"{name}.fc2", f"lora.{block}.fc2")

    def _activation(self, inner: Tensor) -> Tensor:
        if self.config.activation == "quick_gelu":
            return inner * torch.sigmoid(1.702 * inner)
        return F.gelu(
            inner, approximate="tanh" if self.config.activation == "gelu_tanh" else "none"
        )

    def _adapter(self, hidden: Tensor, block: int) -> Tensor | None:
        if f"adapter.{block}.up" not in self.plugs:
            return None
        parts = "down", "down_bias", "up", "up_bias"
        down, down_bias, up, up_bias = (
            self.plugs[f"adapter.{block}.{p}"].to(self.dtype) for p in parts
        )
        return ADAPTER_SCALE * F.linear(F.linear(hidden, down, down_bias).relu(), up, up_bias)

    def _linear(self, hidden: Tensor, name: str, pair: str) -> Tensor:
        self._record_tap(name, hidden)
        out = F.linear(hidden, *self._layer(name))
        extra = self._lora(hidden, pair)
        return out if extra is None else out + extra

    def _lora(self, hidden: Tensor, pair: str) -> Tensor | None:
        if f"{pair}.a" not in self.plugs:
            return None
        down, up = (self.plugs[f"{pair}.{side}"].to(self.dtype) for side in "ab")
        return (hidden @ down.mT) @ up.mT

    def _scale(self, branch: Tensor, name: str) -> Tensor:
        """Apply LayerScale to a branch's output, if the network has it."""
        return branch * self._weight(f"{name}.gamma") if self.config.layer_scale else branch

    def _norm(self, hidden: Tensor, name: str) -> Tensor:
        weight, bias = self._layer(name)
        return F.layer_norm(hidden, (hidden.shape[-1],), weight, bias, self.config.eps)

    def _heads(self, tokens: Tensor) -> Tensor:
        """Split tokens [B, N, D] into heads [B, H, N, D/H]."""
        heads: Tensor = tokens.unflatten(-1, (self.config.heads, -1))
        return heads.transpose(1, 2)

    def _layer(self, name: str) -> tuple[Tensor, Tensor | None]:
        """Return a layer's weight and bias, if it has one."""
        bias = f"{name}.bias"
        return self._weight(f"{name}.weight"), self._weight(bias) if bias in self.weights else None

    def _weight(self, name: str) -> Tensor:
        plug = self.plugs.get(f"full.{name}")
        return self.weights[name] if plug is None else plug.to(self.dtype)

    def _rows(self, plug: str, images: int) -> Tensor:
        """Expand a plug's rows [L, D] or [B, L, D] to [B, L, D] in the compute type."""
        rows = self.plugs[plug].to(self.dtype)
        if rows.shape[-1] != self.config.dim:
            problem = f"plug {plug!r} has width {rows.shape[-1]}"
            raise FczooError(f"{problem}, but {self.config.name} needs {self.config.dim}")
        return rows.expand(images, -1, -1) if rows.dim() == 2 else rows

    def _record_tap(self, tap: str, value: Tensor) -> None:
        if tap in self.taps:
            self.taps[tap] = value
