"""A frozen vision transformer, shared by all clients, with named plugs for trained tensors.

Plugs are tensors of a flat tree:

==================================  ================================================================
``lora.{block}.{part}.a``, ``.b``   low-rank pair [r, in], [out, r] on q, k, v, proj, fc1 or fc2:
                                    out += (in a^T) b^T
``prefix.{block}.k``, ``.v``        [L, D] or [B, L, D] rows in front of projected keys or values
``tokens``                          [L, D] or [B, L, D] prompt tokens in front of the embedded image
``tokens.{block}``                  [L, D] or [B, L, D] tokens appended to that block's input; they
                                    stay up to the last block
``deep.{block}``                    [L, D] or [B, L, D] tokens appended to that block's input; its
                                    output drops them
``adapter.{block}.down``, ``.up``,  AdaptFormer's bottleneck [r, D], [D, r] with biases [r], [D]
``.down_bias``, ``.up_bias``        next to the block's MLP: out += 0.1 (up relu(down x)),
                                    x as it enters norm2
``full.{weight}``                   replaces the frozen weight of that (timm) name, for fine-tuning
==================================  ================================================================

Prompts, prefixes and appended tokens have no position embedding. They join after the norm that some
networks apply before their first block, and rotary positions do not rotate them. LayerScale does
not scale adapters. Pooled patches (``ViTConfig.pool``) include no prompts unless a call asks.

``Backbone.features_and_taps`` also returns hidden values. ``blocks.{i}.attn.qkv``,
``blocks.{i}.attn.proj``, ``blocks.{i}.mlp.fc1`` and ``blocks.{i}.mlp.fc2`` are the inputs of these
layers; ``blocks.{i}`` is the output of a block.
"""

import math
import re
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from fczoo.core.errors import FczooError
from fczoo.core.vit_config import ViTConfig
from fczoo.core.vit_forward import ForwardPass, PooledRows

LORA_PARTS = ("q", "k", "v", "proj", "fc1", "fc2")
INPUT_WEIGHT = "patch_embed.proj.weight"  # every backbone has it
LAYERS = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")  # linear layers of a block


class Backbone:
    """A frozen ViT in one compute type on one device.

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
            copy: Whether to copy the weights; False keeps them where they are, such as in a
                memory-mapped file.

        Raises:
            FczooError: The names or shapes of the weights do not fit ``config``.
        """
        self.config, self.sha256 = config, sha256
        self.weights = {k: v.detach().clone() if copy else v.detach() for k, v in weights.items()}
        shapes = config.shapes()
        names = sorted(shapes.keys() | self.weights.keys(), key=lambda n: (n == "pos_embed", n))
        for name in names:
            shape = tuple(self.weights[name].shape) if name in self.weights else None
            if shape != shapes.get(name):
                fault = f"has shape {shape}" if shape else "is missing"
                requirement = (
                    f"expected {shapes[name]}"
                    if name in shapes
                    else "but the architecture has no such tensor"
                )
                problem = f"{name} {fault}, {requirement}"
                advice = config.size_advice(shape) if name == "pos_embed" and shape else ""
                advice = advice or "give NAME:FILE with the right architecture"
                raise FczooError(f"weights do not fit {config.name}: {problem}; {advice}")
        block = "|".join(map(str, range(config.depth)))
        kinds = (
            rf"lora\.({block})\.({'|'.join(LORA_PARTS)})\.[ab]",
            rf"prefix\.({block})\.[kv]",
            "tokens",
            rf"(deep|tokens)\.({block})",
            rf"adapter\.({block})\.(down|up)(_bias)?",
            rf"full\.({'|'.join(map(re.escape, shapes))})",
        )
        self._plug_names = re.compile("|".join(kinds))

    @property
    def dim(self) -> int:
        """Return the length D of a feature."""
        return self.config.feature_dim

    @property
    def token_dim(self) -> int:
        """Return the width of a token: that of prompts, prefixes and taps."""
        return self.config.dim

    @property
    def depth(self) -> int:
        return self.config.depth

    @property
    def dtype(self) -> torch.dtype:
        """Return the data type of the frozen weights and of the forward."""
        return self.weights[INPUT_WEIGHT].dtype

    @property
    def device(self) -> torch.device:
        return self.weights[INPUT_WEIGHT].device

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

    def normalise(self, images: Tensor) -> Tensor:
        """Normalise images for the backbone.

        Args:
            images: Images [B, 3, H, W] with pixels in [0, 1].

        Returns:
            Normalised images [B, 3, H, W].
        """
        mean, std = self._channel_statistics(images)
        return (images - mean) / std

    def raw_pixels(self, images: Tensor) -> Tensor:
        """Return pixels in [0, 1], from which some released code computes its statistics.

        Args:
            images: Normalised images [B, 3, H, W].

        Returns:
            Images [B, 3, H, W].
        """
        mean, std = self._channel_statistics(images)
        return images * std + mean

    def _channel_statistics(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input mean and standard deviation, [1, 3, 1, 1] each."""
        # create them on the images' device: a copy from the host would wait for the device
        mean, std = (
            torch.cat([images.new_full((1, 1, 1, 1), value) for value in channels], 1)
            for channels in (self.config.mean, self.config.std)
        )
        return mean, std

    def full_weights(self) -> dict[str, Tensor]:
        """Copy every weight as a plug in at least float32, to start full fine-tuning."""
        plugs = {}
        for name, weight in self.weights.items():
            plugs[f"full.{name}"] = weight.to(
                torch.promote_types(weight.dtype, torch.float32), copy=True
            )
        return plugs

    @property
    def largest_norm(self) -> float:
        """Return a bound of the Euclidean norm of every feature of the frozen weights.

        A normalised vector [d] is at most sqrt(d) long, and the final norm scales and shifts it.
        Means of such vectors have the same bound. It is infinite with attention pooling, which
        comes after the norm.
        """
        if self.config.pool == "attention":
            return math.inf
        scale, shift = (self.weights[f"norm.{part}"].cpu().double() for part in ("weight", "bias"))
        parts = self.dim // len(scale)  # two with ``cls+mean``
        bound = math.sqrt(len(scale)) * float(scale.abs().max()) + float(shift.norm())
        return math.sqrt(parts) * bound

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
        return {"fc1": (d, 2 * m if self.config.swiglu else m), "fc2": (m, d)}.get(part, (d, d))

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

    def check_pool(self, pool: PooledRows) -> None:
        """Check that this backbone can pool some output rows.

        Args:
            pool: Rows as for a call.

        Raises:
            FczooError: The configuration pools ``cls+mean`` and ``pool`` asks for prompts.
        """
        if pool != "cls" and self.config.pool == "cls+mean":
            raise FczooError("prompts cannot be pooled with pool cls+mean; use pool cls or mean")

    def check_plugs(self, plugs: Mapping[str, Tensor]) -> None:
        """Check the names of plugs, so that no misspelt plug is ignored.

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
        pool: PooledRows = "cls",
    ) -> Tensor:
        """Compute features of images, after the final norm.

        Args:
            images: Normalised images [B, 3, S, S].
            plugs: Tensors by the names of plugs; see the module's docstring.
            pool: Output rows to pool. ``cls``: those of the image, class token or patches as the
                configuration sets; ``prompt``: the ``tokens`` prompts; ``cls+prompt``: both.

        Returns:
            Features [B, D] in at least float32.

        Raises:
            FczooError: A plug is unknown, or the configuration pools ``cls+mean`` and ``pool``
                asks for prompts.
        """
        self.check_pool(pool)
        return self._forward(images, plugs or {}, pool, {})

    def features_and_taps(
        self, images: Tensor, taps: Collection[str], plugs: Mapping[str, Tensor] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute features as a call does, and the tokens at some taps.

        A call is faster: it leaves out the rows of the last block that no feature reads.

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
        pool: PooledRows,
        tap_values: dict[str, Tensor],
    ) -> Tensor:
        """Compute the features; replace the values of ``tap_values`` by the tokens at its taps."""
        self.check_plugs(plugs)
        return ForwardPass(self.config, self.weights, plugs, tap_values).features(images, pool)

    def class_token(self) -> Tensor:
        """Return the class token [D] at the first block, the same for every image.

        Raises:
            FczooError: This backbone does not have a class token, or pools ``cls+mean``.
        """
        if self.config.pool == "cls+mean":
            problem = "the class token cannot be the query with pool cls+mean"
            raise FczooError(f"{problem}; use pool cls or mean")
        if not self.config.class_token:
            raise FczooError(f"{self.config.name} has no class token; take a backbone that has one")
        return ForwardPass(self.config, self.weights, {}, {}).class_token()

    @property
    def _feature_dtype(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)
