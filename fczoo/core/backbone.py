"""A frozen vision transformer, shared by all clients, with named plugs for trained tensors.

The forward pass is written out here because timm's blocks offer no way to attach adapters per
client. It equals timm's own when no plug is given (tested). Plugs are tensors of a flat tree:

==================================  ================================================================
``lora.{block}.{part}.a``, ``.b``   low-rank pair [r, in], [out, r] on q, k, v, proj, fc1 or fc2:
                                    out += (in a^T) b^T
``prefix.{block}.k``, ``.v``        [L, D] or [B, L, D] rows in front of projected keys or values
``tokens``                          [L, D] or [B, L, D] prompt tokens in front of the embedded image
``deep.{block}``                    [L, D] or [B, L, D] tokens behind that block's input, whose
                                    outputs are dropped
``adapter.{block}.down``, ``.up``,  AdaptFormer's bottleneck [r, D], [D, r] with biases [r], [D]
``.down_bias``, ``.up_bias``        next to the block's MLP: out += 0.1 (up relu(down x)),
                                    x as it enters norm2
``full.{weight}``                   replaces the frozen weight of that (timm) name, for fine-tuning
==================================  ================================================================

A method may also ask for what is inside (``Backbone.features_and_taps``): ``blocks.{i}.attn.qkv``,
``blocks.{i}.attn.proj``, ``blocks.{i}.mlp.fc1`` and ``blocks.{i}.mlp.fc2`` are the inputs of these
layers, ``blocks.{i}`` the block's output.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.core.attention import attend
from fczoo.core.errors import FczooError

LORA_PARTS = ("q", "k", "v", "proj", "fc1", "fc2")
ADAPTER_SCALE = 0.1  # s of AdaptFormer (Chen et al., NeurIPS 2022)
LAYERS = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")  # linear layers of a block


@dataclass(frozen=True)
class ViTConfig:
    """Shape and input of a plain vision transformer (timm's ``VisionTransformer``)."""

    name: str
    image_size: int
    patch_size: int
    dim: int
    depth: int
    heads: int
    mlp_dim: int
    eps: float = 1e-6
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Weight name -> shape, without a classification head."""
        d, m, p = self.dim, self.mlp_dim, self.patch_size
        out: dict[str, tuple[int, ...]] = {
            "cls_token": (1, 1, d),
            "pos_embed": (1, 1 + (self.image_size // p) ** 2, d),
            "patch_embed.proj.weight": (d, 3, p, p),
            "patch_embed.proj.bias": (d,),
        }
        layers = {
            "norm1": (d,),
            "attn.qkv": (3 * d, d),
            "attn.proj": (d, d),
            "norm2": (d,),
            "mlp.fc1": (m, d),
            "mlp.fc2": (d, m),
        }
        for i in range(self.depth):
            for layer, shape in layers.items():
                out[f"blocks.{i}.{layer}.weight"] = shape
                out[f"blocks.{i}.{layer}.bias"] = shape[:1]
        return {**out, "norm.weight": (d,), "norm.bias": (d,)}


class Backbone:
    """A frozen ViT held once, in one compute type, on one device.

    Calling it maps normalised images [B, 3, S, S] to features [B, D] in at least float32.
    """

    def __init__(
        self, config: ViTConfig, weights: Mapping[str, Tensor], sha256: str = "", copy: bool = True
    ):
        """Create a backbone.

        Args:
            config: Shape and input of the vision transformer.
            weights: Tensors by their timm names, without a classification head.
            sha256: SHA-256 of the weights, for records.
            copy: Whether the weights are copied; without a copy they stay in place, such as in a
                mapped file.

        Raises:
            FczooError: The names or shapes of the weights do not fit ``config``.
        """
        self.config, self.sha256 = config, sha256
        self.weights = {k: v.detach().clone() if copy else v.detach() for k, v in weights.items()}
        shapes = config.shapes()
        for name in shapes.keys() | self.weights.keys():
            shape = tuple(self.weights[name].shape) if name in self.weights else None
            if shape != shapes.get(name):
                fault = f"has shape {shape}" if shape else "is missing"
                requirement = (
                    f"expected {shapes[name]}"
                    if name in shapes
                    else "but the architecture has no such tensor"
                )
                problem = (
                    f"{name} {fault}, {requirement}; give NAME:FILE with the right architecture"
                )
                raise FczooError(f"weights do not fit {config.name}: {problem}")
        block = "|".join(map(str, range(config.depth)))
        kinds = (
            rf"lora\.({block})\.({'|'.join(LORA_PARTS)})\.[ab]",
            rf"prefix\.({block})\.[kv]",
            "tokens",
            rf"deep\.({block})",
            rf"adapter\.({block})\.(down|up)(_bias)?",
            rf"full\.({'|'.join(map(re.escape, shapes))})",
        )
        self._plug_names = re.compile("|".join(kinds))

    @property
    def dim(self) -> int:
        return self.config.dim

    @property
    def depth(self) -> int:
        return self.config.depth

    @property
    def dtype(self) -> torch.dtype:
        """Return the data type of the frozen weights and of the forward."""
        return self.weights["cls_token"].dtype

    @property
    def device(self) -> torch.device:
        return self.weights["cls_token"].device

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> "Backbone":
        """Copy the backbone to another device or data type.

        Args:
            device: Device of the copy. Default: the same.
            dtype: Data type of the copy. Default: the same.
        """
        weights = {k: v.to(device=device, dtype=dtype, copy=True) for k, v in self.weights.items()}
        return Backbone(self.config, weights, self.sha256, copy=False)

    def full_weights(self) -> dict[str, Tensor]:
        """Copy every weight as a plug in at least float32, to start full fine-tuning."""
        plugs = {}
        for name, weight in self.weights.items():
            plugs[f"full.{name}"] = weight.to(
                torch.promote_types(weight.dtype, torch.float32), copy=True
            )
        return plugs

    def lora_shape(self, part: str) -> tuple[int, int]:
        """Return the (in, out) dimensions of a part that takes a LoRA pair.

        Args:
            part: One of ``LORA_PARTS``.

        Raises:
            FczooError: The part is unknown.
        """
        if part not in LORA_PARTS:
            raise FczooError(f"no LoRA on {part!r}; known parts: {', '.join(LORA_PARTS)}")
        d, m = self.config.dim, self.config.mlp_dim
        return {"fc1": (d, m), "fc2": (m, d)}.get(part, (d, d))

    def check_blocks(self, blocks: tuple[int, ...], label: str) -> None:
        """Check that this backbone has all of some blocks.

        Args:
            blocks: Numbers of blocks, counted from 0.
            label: Name of the option for the message.

        Raises:
            FczooError: ``blocks`` is empty or names a block that this backbone does not have.
        """
        if not blocks:
            raise FczooError(f"{label} is empty; name one block or more of {self.config.name}")
        if missing := [i for i in blocks if not 0 <= i < self.depth]:
            have = f"{self.config.name} has blocks 0 to {self.depth - 1}"
            raise FczooError(f"{label} names block {missing[0]}, but {have}")

    def check_plugs(self, plugs: Mapping[str, Tensor]) -> None:
        """Check the names of plugs, so that none is ignored.

        Args:
            plugs: Plugs by name.

        Raises:
            FczooError: This backbone does not have a plug of that name.
        """
        for name in plugs:
            if not self._plug_names.fullmatch(name):
                model = f"{self.config.name} ({self.depth} blocks)"
                raise FczooError(
                    f"unknown plug {name!r} for {model}; see fczoo.core.backbone for the plugs"
                )

    def __repr__(self) -> str:
        c = self.config
        return (
            f"<Backbone {c.name}: {c.depth} blocks of {c.dim}, {c.image_size} px, on {self.device}>"
        )

    def __call__(
        self,
        images: Tensor,
        plugs: Mapping[str, Tensor] | None = None,
        pool: Literal["cls", "prompt", "cls+prompt"] = "cls",
    ) -> Tensor:
        """Compute features of images, after the final norm.

        Args:
            images: Normalised images [B, 3, S, S].
            plugs: Tensors by the names of plugs; see the module's docstring.
            pool: Output rows that are averaged: the class token, the ``tokens`` prompts, or both.

        Returns:
            Features [B, D] in at least float32.

        Raises:
            FczooError: A plug is unknown.
        """
        return self._forward(images, plugs or {}, pool, {})

    def features_and_taps(
        self, images: Tensor, taps: Collection[str], plugs: Mapping[str, Tensor] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute features as a call does, and the tokens at some taps.

        Without taps a call is faster: it leaves out the last block's rows that are not read.

        Args:
            images: Normalised images [B, 3, S, S].
            taps: Names such as ``blocks.0.attn.qkv``; see the module's docstring.
            plugs: Tensors by the names of plugs.

        Returns:
            Features [B, D], and the values [B, N, width] of all N tokens at each tap.

        Raises:
            FczooError: A tap or a plug is unknown.
        """
        blocks = "|".join(map(str, range(self.depth)))
        layers = "|".join(map(re.escape, LAYERS))
        inside = rf"blocks\.({blocks})(\.({layers}))?"
        for name in taps:
            if not re.fullmatch(inside, name):
                raise FczooError(
                    f"unknown tap {name!r} for {self.config.name}; see fczoo.core.backbone"
                )
        tap_values = dict.fromkeys(taps, images)
        return self._forward(images, plugs or {}, "cls", tap_values), tap_values

    def _forward(
        self,
        images: Tensor,
        plugs: Mapping[str, Tensor],
        pool: Literal["cls", "prompt", "cls+prompt"],
        seen: dict[str, Tensor],
    ) -> Tensor:
        """Compute the features; add the tokens at each tap to ``seen``."""
        self.check_plugs(plugs)
        hidden, prompts = self._embed(images, plugs)
        every_row = slice(0, hidden.shape[1])
        output_rows = slice(
            prompts if pool == "cls" else 0, prompts if pool == "prompt" else prompts + 1
        )
        for i in range(self.depth):
            if f"deep.{i}" in plugs:
                hidden = torch.cat([hidden, self._rows(plugs[f"deep.{i}"], len(images))], 1)
            last = i == self.depth - 1 and not seen
            rows = output_rows if last else every_row  # the last block's other rows go unread
            attention_output = self._attention(
                self._norm(hidden, f"blocks.{i}.norm1", plugs), i, rows, plugs, seen
            )
            hidden = hidden[:, rows] + attention_output
            inner = self._norm(hidden, f"blocks.{i}.norm2", plugs)
            inner = F.gelu(self._linear(inner, f"blocks.{i}.mlp.fc1", f"lora.{i}.fc1", plugs, seen))
            mlp_output = self._linear(inner, f"blocks.{i}.mlp.fc2", f"lora.{i}.fc2", plugs, seen)
            adapter_output = self._adapter(hidden, i, plugs)
            hidden = hidden + (
                mlp_output if adapter_output is None else mlp_output + adapter_output
            )
            _note(seen, f"blocks.{i}", hidden)
        read = hidden[:, output_rows] if seen else hidden
        return self._norm(read, "norm", plugs).to(self._feature_dtype).mean(1)

    def class_token(self) -> Tensor:
        """Return the class token [D] at the first block, the same for every image."""
        return (self.weights["cls_token"][0, 0] + self.weights["pos_embed"][0, 0]).to(
            self._feature_dtype
        )

    @property
    def _feature_dtype(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)

    def _embed(self, images: Tensor, plugs: Mapping[str, Tensor]) -> tuple[Tensor, int]:
        """Return prompts, class token and patches [B, N, D], and the number of prompts."""
        kernel, bias = self._layer("patch_embed.proj", plugs)
        patches = (
            F.conv2d(images.to(self.dtype), kernel, bias, stride=self.config.patch_size)
            .flatten(2)
            .mT
        )
        class_token = self._weight("cls_token", plugs).expand(len(images), -1, -1)
        hidden = torch.cat([class_token, patches], 1) + self._weight("pos_embed", plugs)
        if "tokens" not in plugs:
            return hidden, 0
        tokens = self._rows(plugs["tokens"], len(images))
        return torch.cat([tokens, hidden], 1), tokens.shape[1]

    def _weight(self, name: str, plugs: Mapping[str, Tensor]) -> Tensor:
        plug = plugs.get(f"full.{name}")
        return self.weights[name] if plug is None else plug.to(self.dtype)

    def _layer(self, name: str, plugs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return self._weight(f"{name}.weight", plugs), self._weight(f"{name}.bias", plugs)

    def _norm(self, hidden: Tensor, name: str, plugs: Mapping[str, Tensor]) -> Tensor:
        return F.layer_norm(hidden, (self.dim,), *self._layer(name, plugs), self.config.eps)

    def _lora(self, hidden: Tensor, pair: str, plugs: Mapping[str, Tensor]) -> Tensor | None:
        if f"{pair}.a" not in plugs:
            return None
        return (hidden @ plugs[f"{pair}.a"].to(self.dtype).mT) @ plugs[f"{pair}.b"].to(
            self.dtype
        ).mT

    def _adapter(self, hidden: Tensor, block: int, plugs: Mapping[str, Tensor]) -> Tensor | None:
        if f"adapter.{block}.up" not in plugs:
            return None
        parts = "down", "down_bias", "up", "up_bias"
        down, down_bias, up, up_bias = (plugs[f"adapter.{block}.{p}"].to(self.dtype) for p in parts)
        return ADAPTER_SCALE * F.linear(F.linear(hidden, down, down_bias).relu(), up, up_bias)

    def _linear(
        self,
        hidden: Tensor,
        name: str,
        pair: str,
        plugs: Mapping[str, Tensor],
        seen: dict[str, Tensor],
    ) -> Tensor:
        _note(seen, name, hidden)
        out = F.linear(hidden, *self._layer(name, plugs))
        extra = self._lora(hidden, pair, plugs)
        return out if extra is None else out + extra

    def _attention(
        self,
        hidden: Tensor,
        block: int,
        rows: slice,
        plugs: Mapping[str, Tensor],
        seen: dict[str, Tensor],
    ) -> Tensor:
        """Compute a block's attention [B, rows, D]: the tokens in ``rows`` attend to all tokens."""
        _note(seen, f"blocks.{block}.attn.qkv", hidden)
        parts = F.linear(hidden, *self._layer(f"blocks.{block}.attn.qkv", plugs)).chunk(3, -1)
        heads = []
        for part, projection in zip("qkv", parts, strict=True):
            extra = self._lora(hidden, f"lora.{block}.{part}", plugs)
            projection = projection if extra is None else projection + extra
            if part != "q" and f"prefix.{block}.{part}" in plugs:
                prefix = self._rows(plugs[f"prefix.{block}.{part}"], len(hidden))
                projection = torch.cat([prefix, projection], 1)
            heads.append(projection.unflatten(-1, (self.config.heads, -1)).transpose(1, 2))
        query, key, value = heads
        output = attend(query[:, :, rows], key, value).transpose(1, 2).flatten(2)
        return self._linear(output, f"blocks.{block}.attn.proj", f"lora.{block}.proj", plugs, seen)

    def _rows(self, rows: Tensor, images: int) -> Tensor:
        """Expand rows [L, D] or [B, L, D] to [B, L, D] in the compute type."""
        rows = rows.to(self.dtype)
        return rows.expand(images, -1, -1) if rows.dim() == 2 else rows


def _note(seen: dict[str, Tensor], tap: str, value: Tensor) -> None:
    if tap in seen:
        seen[tap] = value
