"""Configuration of a plain vision transformer: its parts, its input and the shapes of its weights.

One class describes all supported families. They differ in these fields:

=======================  ===========================================================================
DINOv2, DINOv3, DeiT3    ``layer_scale``; some have ``register_tokens``
DINOv3, EVA-02           ``rope``: rotary positions; EVA-02 has a learnt position embedding as well
CLIP, OpenCLIP           ``pre_norm``; ``activation="quick_gelu"`` for OpenAI's weights
SigLIP                   no ``class_token``, ``pool="attention"``
EVA-02                   ``swiglu``, ``mlp_norm``, ``attention_norm``; ``norm_after_pool``
MIIL                     no ``qkv_bias``
=======================  ===========================================================================
"""

import math
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any, Literal

from fczoo.core.errors import FczooError

Position = Literal["all", "patches", "none"]
Pool = Literal["cls", "mean", "cls+mean", "attention"]
Activation = Literal["gelu", "gelu_tanh", "quick_gelu"]


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding of patches (Su et al., 2021), half of a head per image axis.

    Frequency i of n is ``temperature ** (-i / n)``. It multiplies a patch's coordinates: those of
    DINOv3 are 2 pi times the centre of the patch in [-1, 1], those of EVA-02 the patch's row and
    column, scaled to a grid of ``reference`` patches per side.
    """

    temperature: float = 10000.0
    reference: int | None = None  # patches per side of the grid in pre-training; None: this grid's
    centred: bool = False  # coordinates of DINOv3
    halves: bool = False  # channel i rotates with i + n, as in DINOv3, not 2i with 2i + 1


POOLS_TO_CHOOSE = ("cls", "mean", "cls+mean")
"""Poolings that any weights allow; attention pooling needs additional weights."""


@dataclass(frozen=True)
class ViTConfig:
    """Shape, parts and input of a plain vision transformer."""

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
    class_token: bool = True
    register_tokens: int = 0
    position: Position = "all"  # tokens with a learnt position embedding
    rope: Rope | None = None
    pre_norm: bool = False  # a norm before the first block; the patch embedding then has no bias
    qkv_bias: bool = True
    layer_scale: bool = False
    activation: Activation = "gelu"
    swiglu: bool = False  # fc1 gives gate and value: silu(gate) * value
    attention_norm: bool = False  # a norm before the projection of the attention's output
    mlp_norm: bool = False  # a norm before fc2
    pool: Pool = "cls"
    norm_after_pool: bool = False

    @property
    def grid(self) -> int:
        """Return the number of patches per side."""
        return self.image_size // self.patch_size

    @property
    def prefix_tokens(self) -> int:
        """Return the number of tokens in front of the patches: class token and registers."""
        return int(self.class_token) + self.register_tokens

    @property
    def tokens(self) -> int:
        """Return the number of tokens of an image."""
        return self.prefix_tokens + self.grid**2

    @property
    def feature_dim(self) -> int:
        """Return the length of a feature: twice ``dim`` for ``cls+mean``."""
        return 2 * self.dim if self.pool == "cls+mean" else self.dim

    def with_pool(self, pool: Pool | None) -> "ViTConfig":
        """Return the configuration with another pooling of tokens; None keeps its own.

        Raises:
            FczooError: The pooling is unknown, or the network does not have a class token to pool.
        """
        if pool in (None, self.pool):
            return self
        if pool not in POOLS_TO_CHOOSE:
            raise FczooError(f"pool is {pool!r}; it must be one of {', '.join(POOLS_TO_CHOOSE)}")
        if "cls" in pool and not self.class_token:
            raise FczooError(f"{self.name} has no class token for pool {pool}; take pool mean")
        return replace(self, pool=pool)

    def size_advice(self, positions: tuple[int, ...]) -> str:
        """Return the advice for position rows [1, N, D] of another image size; empty for others."""
        prefix = self.prefix_tokens if self.position == "all" else 0
        if len(positions) != 3 or positions[2] != self.dim or positions[1] <= prefix:
            return ""
        side = math.isqrt(positions[1] - prefix)
        if side**2 != positions[1] - prefix:
            return ""
        return f"give --image-size {side * self.patch_size}, the size of these weights"

    def record(self) -> dict[str, Any]:
        """Return the fields for a record, without optional parts that have their default."""
        plain = {"name", "eps", "mean", "std"}
        defaults = {f.name: f.default for f in fields(self) if f.name not in plain}
        return {
            name: value
            for name, value in asdict(self).items()
            if defaults.get(name, MISSING) is MISSING or value != defaults[name]
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return weight name -> shape, without a classification head.

        The names are those of timm's ``VisionTransformer``; in addition ``attn.norm`` and
        ``mlp.norm`` of its ``Eva``.
        """
        d, p = self.dim, self.patch_size
        out: dict[str, tuple[int, ...]] = {}
        if self.class_token:
            out["cls_token"] = (1, 1, d)
        if self.register_tokens:
            out["reg_token"] = (1, self.register_tokens, d)
        if self.position != "none":
            rows = self.tokens if self.position == "all" else self.grid**2
            out["pos_embed"] = (1, rows, d)
        out["patch_embed.proj.weight"] = (d, 3, p, p)
        if self.pre_norm:
            out |= _affine("norm_pre", d)
        else:
            out["patch_embed.proj.bias"] = (d,)
        for i in range(self.depth):
            out |= {f"blocks.{i}.{name}": shape for name, shape in self._block_shapes().items()}
        out |= _affine("norm", d)
        if self.pool == "attention":
            out |= self._attention_pool_shapes()
        return out

    def _block_shapes(self) -> dict[str, tuple[int, ...]]:
        d, m = self.dim, self.mlp_dim
        out = _affine("norm1", d) | _affine("attn.qkv", 3 * d, d)
        if not self.qkv_bias:
            del out["attn.qkv.bias"]
        if self.attention_norm:
            out |= _affine("attn.norm", d)
        out |= _affine("attn.proj", d, d) | _affine("norm2", d)
        out |= _affine("mlp.fc1", 2 * m if self.swiglu else m, d)
        if self.mlp_norm:
            out |= _affine("mlp.norm", m)
        out |= _affine("mlp.fc2", d, m)
        return out | ({"ls1.gamma": (d,), "ls2.gamma": (d,)} if self.layer_scale else {})

    def _attention_pool_shapes(self) -> dict[str, tuple[int, ...]]:
        d, m = self.dim, self.mlp_dim
        layers = {"q": (d, d), "kv": (2 * d, d), "proj": (d, d), "norm": (d,)}
        layers |= {"mlp.fc1": (m, d), "mlp.fc2": (d, m)}
        out: dict[str, tuple[int, ...]] = {"attn_pool.latent": (1, 1, d)}
        for layer, shape in layers.items():
            out |= _affine(f"attn_pool.{layer}", *shape)
        return out


def _affine(name: str, *shape: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer's weight and bias."""
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
