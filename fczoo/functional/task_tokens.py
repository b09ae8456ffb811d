"""Task tokens, and the block in which they attend to an image (DyTox, Douillard et al., CVPR 2022)."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.tree import Tree, select

EPS = 1e-5  # of the layer norms


def drawn_block(dim: int, hidden: int, rng: torch.Generator) -> Tree:
    """A task-attention block ``tab.*``: its linear layers start as PyTorch's do; q, k and v have no bias."""
    tree: Tree = {}
    for name in ("q", "k", "v"):
        tree[f"tab.{name}.weight"] = _uniform((dim, dim), dim, rng)
    for name, (out, width) in {"proj": (dim, dim), "fc1": (hidden, dim), "fc2": (dim, hidden)}.items():
        tree[f"tab.{name}.weight"] = _uniform((out, width), width, rng)
        tree[f"tab.{name}.bias"] = _uniform((out,), width, rng)
    for name in ("norm1", "norm2"):
        tree[f"tab.{name}.weight"], tree[f"tab.{name}.bias"] = torch.ones(dim), torch.zeros(dim)
    return tree


def copied_block(backbone: Backbone) -> Tree:
    """A task-attention block with the weights of the backbone's last one, without biases of q, k and v."""
    kept = {}
    for name, value in select(backbone.full_weights(), f"full.blocks.{backbone.depth - 1}.").items():
        layer, _, part = name.removeprefix(f"full.blocks.{backbone.depth - 1}.").rpartition(".")
        if layer != "attn.qkv":
            kept[f"tab.{layer.rpartition('.')[2]}.{part}"] = value
        elif part == "weight":
            kept |= {f"tab.{p}.weight": w.clone() for p, w in zip("qkv", value.chunk(3), strict=True)}
    return kept


def drawn_task(classes: int, dim: int, rng: torch.Generator) -> Tree:
    """A task's token [1, D] and classifier: a layer norm [1, D] and rows of ``classes`` classes."""
    token = torch.nn.init.trunc_normal_(torch.empty(1, dim), std=0.02, generator=rng)
    return {"token": token, **drawn_classifier(classes, dim, rng)}


def drawn_classifier(classes: int, dim: int, rng: torch.Generator) -> Tree:
    """A layer norm ``norm_weight``, ``norm_bias`` [1, D], and ``weight`` [c, D], ``bias`` [c] behind it."""
    return {
        "norm_weight": torch.ones(1, dim),
        "norm_bias": torch.zeros(1, dim),
        "weight": _uniform((classes, dim), dim, rng),
        "bias": _uniform((classes,), dim, rng),
    }


def image_tokens(backbone: Backbone, images: Tensor, plugs: Mapping[str, Tensor]) -> Tensor:
    """All tokens [B, N, D] of images after the final norm, the class token first, in at least float32."""
    last = f"blocks.{backbone.depth - 1}"
    _, seen = backbone.tapped(images, [last], plugs)
    weight, bias = (plugs.get(f"full.norm.{p}", backbone.weights[f"norm.{p}"]) for p in ("weight", "bias"))
    dtype = torch.promote_types(backbone.dtype, torch.float32)
    return F.layer_norm(
        seen[last].to(dtype), (backbone.dim,), weight.to(dtype), bias.to(dtype), backbone.config.eps
    )


def task_embeddings(tab: Mapping[str, Tensor], tokens: Tensor, image: Tensor, heads: int) -> Tensor:
    """Embeddings e [B, t, D] of the tokens theta [t, D] of t tasks, for images of tokens x [B, N, D].

    Each attends to itself and to x, never to another one, in the one block that they share.
    """

    def split(rows: Tensor, part: str) -> Tensor:
        apart: Tensor = F.linear(rows, tab[f"tab.{part}.weight"]).unflatten(-1, (heads, -1))
        return apart.transpose(-3, -2)

    theta, x = _norm(tokens, tab, "norm1"), _norm(image, tab, "norm1")
    query = split(theta, "q") * (tokens.shape[-1] // heads) ** -0.5  # [H, t, d]
    own = (query * split(theta, "k")).sum(-1, keepdim=True)  # [H, t, 1]
    others = query @ split(x, "k").mT  # [B, H, t, N]
    weights = torch.cat([own.expand(*others.shape[:-1], 1), others], -1).softmax(-1)
    attended = weights[..., :1] * split(theta, "v") + weights[..., 1:] @ split(x, "v")  # [B, H, t, d]
    attended = attended.transpose(-3, -2).flatten(-2)
    e = tokens + F.linear(attended, tab["tab.proj.weight"], tab["tab.proj.bias"])
    inner = F.gelu(F.linear(_norm(e, tab, "norm2"), tab["tab.fc1.weight"], tab["tab.fc1.bias"]))
    return e + F.linear(inner, tab["tab.fc2.weight"], tab["tab.fc2.bias"])


def task_logits(classifier: Mapping[str, Tensor], embeddings: Tensor, owner: Tensor) -> Tensor:
    """Logits [B, C]: class c reads the embedding [B, t, D] of its own task ``owner`` [C] alone."""
    normal = F.layer_norm(embeddings, embeddings.shape[-1:], eps=EPS)
    normal = normal * classifier["norm_weight"] + classifier["norm_bias"]
    return (normal[:, owner] * classifier["weight"]).sum(-1) + classifier["bias"]


def _norm(rows: Tensor, tab: Mapping[str, Tensor], name: str) -> Tensor:
    return F.layer_norm(rows, rows.shape[-1:], tab[f"tab.{name}.weight"], tab[f"tab.{name}.bias"], EPS)


def _uniform(shape: tuple[int, ...], width: int, rng: torch.Generator) -> Tensor:
    bound = width**-0.5
    return torch.empty(shape).uniform_(-bound, bound, generator=rng)
