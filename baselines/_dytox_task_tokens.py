"""Task tokens and the task-attention block (DyTox, Douillard et al., CVPR 2022)."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.tree import Tree, select

EPS = 1e-5  # epsilon of the layer norms


def init_block(dim: int, hidden: int, rng: torch.Generator) -> Tree:
    """Create a task-attention block (TAB) with random weights.

    Its linear layers have PyTorch's default initialisation; q, k and v have no bias.

    Args:
        dim: Embedding dimension D.
        hidden: Width of the MLP.
        rng: Random generator.

    Returns:
        Weights ``tab.*``.
    """
    tree: Tree = {}
    for name in ("q", "k", "v"):
        tree[f"tab.{name}.weight"] = _uniform((dim, dim), dim, rng)
    for name, (out, width) in {
        "proj": (dim, dim),
        "fc1": (hidden, dim),
        "fc2": (dim, hidden),
    }.items():
        tree[f"tab.{name}.weight"] = _uniform((out, width), width, rng)
        tree[f"tab.{name}.bias"] = _uniform((out,), width, rng)
    for name in ("norm1", "norm2"):
        tree[f"tab.{name}.weight"], tree[f"tab.{name}.bias"] = torch.ones(dim), torch.zeros(dim)
    return tree


def copy_block(backbone: Backbone) -> Tree:
    """Create a task-attention block from the backbone's last block, without biases of q, k and v.

    Args:
        backbone: The backbone.

    Returns:
        Weights ``tab.*``.
    """
    weights = {}
    for name, value in select(
        backbone.full_weights(), f"full.blocks.{backbone.depth - 1}."
    ).items():
        layer, _, part = name.removeprefix(f"full.blocks.{backbone.depth - 1}.").rpartition(".")
        if layer != "attn.qkv":
            weights[f"tab.{layer.rpartition('.')[2]}.{part}"] = value
        elif part == "weight":
            weights |= {
                f"tab.{p}.weight": w.clone() for p, w in zip("qkv", value.chunk(3), strict=True)
            }
    return weights


def init_task(classes: int, dim: int, rng: torch.Generator) -> Tree:
    """Create a task's token and classifier.

    Args:
        classes: Number c of classes of the classifier.
        dim: Embedding dimension D.
        rng: Random generator.

    Returns:
        ``token`` [1, D] and the tensors of ``init_classifier``.
    """
    token = torch.nn.init.trunc_normal_(torch.empty(1, dim), std=0.02, generator=rng)
    return {"token": token, **init_classifier(classes, dim, rng)}


def init_classifier(classes: int, dim: int, rng: torch.Generator) -> Tree:
    """Create a classifier: a layer norm, then a linear layer.

    Args:
        classes: Number c of classes.
        dim: Embedding dimension D.
        rng: Random generator.

    Returns:
        ``norm_weight`` and ``norm_bias`` [1, D], ``weight`` [c, D] and ``bias`` [c].
    """
    return {
        "norm_weight": torch.ones(1, dim),
        "norm_bias": torch.zeros(1, dim),
        "weight": _uniform((classes, dim), dim, rng),
        "bias": _uniform((classes,), dim, rng),
    }


def image_tokens(backbone: Backbone, images: Tensor, plugs: Mapping[str, Tensor]) -> Tensor:
    """Compute all tokens of images after the final norm, the class token first.

    Args:
        backbone: The backbone.
        images: Images [B, 3, H, W].
        plugs: Tensors to insert into the backbone.

    Returns:
        Tokens [B, N, D] in at least float32.
    """
    last = f"blocks.{backbone.depth - 1}"
    _, outputs = backbone.features_and_taps(images, [last], plugs)
    weight, bias = (
        plugs.get(f"full.norm.{p}", backbone.weights[f"norm.{p}"]) for p in ("weight", "bias")
    )
    dtype = torch.promote_types(backbone.dtype, torch.float32)
    return F.layer_norm(
        outputs[last].to(dtype),
        (backbone.token_dim,),
        weight.to(dtype),
        bias.to(dtype),
        backbone.config.eps,
    )


def task_embeddings(tab: Mapping[str, Tensor], tokens: Tensor, image: Tensor, heads: int) -> Tensor:
    """Compute e_i = TAB(theta_i, x) for each task token theta_i.

    A task token attends to itself and to the image's tokens, not to other task tokens. All tasks
    share the block.

    Args:
        tab: Weights ``tab.*`` of the task-attention block.
        tokens: Tokens theta [t, D] of t tasks.
        image: Tokens x [B, N, D] of images.
        heads: Number H of attention heads.

    Returns:
        Embeddings e [B, t, D].
    """

    def split(rows: Tensor, part: str) -> Tensor:
        per_head: Tensor = F.linear(rows, tab[f"tab.{part}.weight"]).unflatten(-1, (heads, -1))
        return per_head.transpose(-3, -2)

    # Attention with the query of theta_i only; keys and values of theta_i and all rows of x.
    theta, x = _norm(tokens, tab, "norm1"), _norm(image, tab, "norm1")
    query = split(theta, "q") * (tokens.shape[-1] // heads) ** -0.5  # [H, t, d]
    self_scores = (query * split(theta, "k")).sum(-1, keepdim=True)  # [H, t, 1]
    image_scores = query @ split(x, "k").mT  # [B, H, t, N]
    weights = torch.cat(
        [self_scores.expand(*image_scores.shape[:-1], 1), image_scores], -1
    ).softmax(-1)
    values = weights[..., :1] * split(theta, "v") + weights[..., 1:] @ split(x, "v")  # [B, H, t, d]
    values = values.transpose(-3, -2).flatten(-2)
    # e_i = theta_i + projected attention, then e_i + MLP(norm(e_i)).
    e = tokens + F.linear(values, tab["tab.proj.weight"], tab["tab.proj.bias"])
    inner = F.gelu(F.linear(_norm(e, tab, "norm2"), tab["tab.fc1.weight"], tab["tab.fc1.bias"]))
    return e + F.linear(inner, tab["tab.fc2.weight"], tab["tab.fc2.bias"])


def task_logits(classifier: Mapping[str, Tensor], embeddings: Tensor, owner: Tensor) -> Tensor:
    """Compute logits z_c = w_c^T norm_i(e_i) + b_c, where task i owns class c.

    Args:
        classifier: Layer norm and rows of all tasks.
        embeddings: Embeddings [B, t, D].
        owner: Index of each class's task [C].

    Returns:
        Logits [B, C].
    """
    normal = F.layer_norm(embeddings, embeddings.shape[-1:], eps=EPS)
    normal = normal * classifier["norm_weight"] + classifier["norm_bias"]
    return (normal[:, owner] * classifier["weight"]).sum(-1) + classifier["bias"]


def _norm(rows: Tensor, tab: Mapping[str, Tensor], name: str) -> Tensor:
    return F.layer_norm(
        rows, rows.shape[-1:], tab[f"tab.{name}.weight"], tab[f"tab.{name}.bias"], EPS
    )


def _uniform(shape: tuple[int, ...], width: int, rng: torch.Generator) -> Tensor:
    bound = width**-0.5
    return torch.empty(shape).uniform_(-bound, bound, generator=rng)
