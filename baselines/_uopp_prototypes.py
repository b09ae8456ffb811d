"""Prototypes of UOPP: their average by participation, and their rectifier.

The rectifier is an ordinary differential equation that moves class means along samples (Ma'sum et
al., ICLR 2025, supplement, eqs. 5 to 7). W: ways; N: support and query samples; D: dimensions.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.core.tree import Tree, drop, strip_prefix
from fczoo.core.types import Batch, Context
from fczoo.functional.cosine import cosines

HEADS = 4  # separate estimates of the derivative
ATTENTION_HEADS = 8
KEPT_SAMPLES = 40  # largest weights that are kept per way and dimension
END, DECAY = 39.0, 40.0  # end of integration; lambda falls tenfold in 40 time units
ABSENT = -1e4  # score of classes and pairs that do not exist, far below all others
LINEAR_LAYERS = ("encode", "query", "key", "value", "join", "weigh", "gate")


class Samples(NamedTuple):
    """Samples from which prototypes are rectified: a client's images, and global prototypes."""

    x: Tensor  # [N, D] features
    label: Tensor  # [N, W] one-hot of a support sample, 1/W of a query
    weight: Tensor  # [N] 1 = real sample, 0 = padding


def start_rectifier(dim: int, ways: int, head_width: int, rng: torch.Generator) -> Tree:
    """Create the rectifier of a task.

    Args:
        dim: Feature dimension D.
        ways: Classes W of the task.
        head_width: Width of an attention head.
        rng: Random generator.

    Returns:
        ``rectifier.{head}.{layer}.weight`` and ``.bias``, linear layers with PyTorch's default
            initialisation, and scales and shifts of both norms.
    """
    hidden = ATTENTION_HEADS * head_width
    sizes = dict.fromkeys(LINEAR_LAYERS, (hidden, hidden))
    sizes |= {"encode": (5 * (dim + ways), hidden), "weigh": (hidden, dim), "gate": (2 * dim, dim)}
    tree: Tree = {}
    for head in range(HEADS):
        for layer, (inputs, outputs) in sizes.items():
            for part, shape in {"weight": (outputs, inputs), "bias": (outputs,)}.items():
                rows = torch.empty(shape).uniform_(-1, 1, generator=rng)
                tree[f"rectifier.{head}.{layer}.{part}"] = inputs**-0.5 * rows
        for norm in ("batch_norm", "layer_norm"):
            tree[f"rectifier.{head}.{norm}.weight"] = torch.ones(hidden)
            tree[f"rectifier.{head}.{norm}.bias"] = torch.zeros(hidden)
    return tree


def rectify(tree: Tree, means: Tensor, present: Tensor, samples: Samples, steps: int) -> Tensor:
    """Integrate dp/dt = lambda(t) D(p, samples) from the means at t = 0 to t = 39.

    lambda(t) = 0.1 * 0.1^(t / 40). The solver is the 3/8 rule, which is ``rk4`` of torchdiffeq.

    Args:
        tree: Tensors of ``start_rectifier``.
        means: Prototypes p [W, D] at t = 0.
        present: Whether each way has a mean [W].
        samples: Support and query.
        steps: Steps of the solver; the released class takes 39 unit steps.

    Returns:
        Rectified prototypes [W, D].
    """

    def slope(time: float, p: Tensor) -> Tensor:
        factor: float = 0.1 * 0.1 ** (time / DECAY)  # lambda(t)
        return factor * _derivative(tree, p, present, samples)

    p, h = means, END / steps
    for step in range(steps):
        t = step * h
        k1 = slope(t, p)
        k2 = slope(t + h / 3, p + h / 3 * k1)
        k3 = slope(t + 2 * h / 3, p + h * (k2 - k1 / 3))
        k4 = slope(t + h, p + h * (k1 - k2 + k3))
        p = p + h / 8 * (k1 + 3 * k2 + 3 * k3 + k4)
    return p


def rectify_batch(
    tree: Tree, features: Tensor, batch: Batch, ctx: Context, repeats: int, steps: int
) -> tuple[Tensor, Tensor]:
    """Rectify the class means of a batch, which is the support S.

    The query Q has each global prototype ``repeats`` times, with the uniform label 1/W.

    Args:
        tree: Tensors of ``start_rectifier``.
        features: Prompted features [B, D].
        batch: Labels and weights [B].
        ctx: Context with the global prototypes, ``mean`` [W, D] and ``held`` [W].
        repeats: Copies of each query: the shots.
        steps: Steps of the solver.

    Returns:
        Prototypes [W, D], and which classes the batch has [W].
    """
    task = ctx.task
    hot = F.one_hot(batch.y - task.start, task.size).to(features) * batch.w[:, None]
    count = hot.sum(0)
    means = hot.mT @ features / count[:, None].clamp(min=1)
    query = ctx.shared["mean"].to(features).repeat(repeats, 1)
    label = query.new_full((len(query), task.size), 1 / task.size)
    weight = torch.cat([batch.w, ctx.shared["held"].to(batch.w).repeat(repeats)])
    samples = Samples(torch.cat([features, query]), torch.cat([hot, label]), weight)
    return rectify(tree, means, count, samples, steps), (count > 0).to(features)


def query_loss(rectified: Tensor, present: Tensor, shared: Tree, scale: float) -> Tensor:
    """Compute L_ode: cross-entropy of the global prototypes against the rectified ones.

    Args:
        rectified: Rectified prototypes [W, D].
        present: Mask of the classes with a rectified prototype [W]; the loss is over these.
        shared: Tree with the global prototypes, ``mean`` [W, D] and ``held`` [W].
        scale: Scale of the cosines.

    Returns:
        The loss, a scalar.
    """
    scores = scale * cosines(shared["mean"].to(rectified), rectified)
    scores = torch.where(present > 0, scores, ABSENT)
    truth = torch.arange(len(rectified), device=rectified.device)
    weight = shared["held"].to(present) * present
    per_class = F.cross_entropy(scores, truth, reduction="none")
    return (weight * per_class).sum() / weight.sum().clamp(min=1)


def _derivative(tree: Tree, p: Tensor, present: Tensor, samples: Samples) -> Tensor:
    """Return dp/dt up to lambda(t) [W, D]: the heads' estimates, weighted by inverse variances."""
    estimates, precisions = [], []
    for head in range(HEADS):
        part = strip_prefix(tree, f"rectifier.{head}.")
        share, pull = _shares(part, p, present, samples), _pulls(part, p, samples)  # [W, N, D]
        mean = (share * pull).sum(1)  # weighted over samples
        estimates.append(mean)
        precisions.append(1 / ((share * (pull - mean[:, None]).square()).sum(1) + 1e-6))
    precision = torch.stack(precisions)
    return (torch.stack(estimates) * precision).sum(0) / precision.sum(0)  # by inverse variance


def _linear(part: Tree, layer: str, x: Tensor) -> Tensor:
    return F.linear(x, part[f"{layer}.weight"], part[f"{layer}.bias"])


def _pulls(part: Tree, p: Tensor, samples: Samples) -> Tensor:
    """Return 2 sigmoid(net(x, p)) * x - p of every way and sample [W, N, D]."""
    x = samples.x[None].expand(len(p), -1, -1)
    start = p[:, None].expand_as(x)
    gate = torch.sigmoid(_linear(part, "gate", torch.cat([x, start], -1)))
    return 2 * gate * x - start


def _shares(part: Tree, p: Tensor, present: Tensor, samples: Samples) -> Tensor:
    """Return the weight of each sample for each way [W, N, D]; weights sum to 1 over samples."""
    ways, number = len(p), len(samples.x)
    exists = ((present[:, None] > 0) & (samples.weight > 0)).flatten()  # [W N] pairs
    hidden = _attend(part, _encode(part, p, samples), exists)
    scores = _linear(part, "weigh", hidden).view(ways, number, -1)
    scores = torch.where(present[:, None, None] > 0, scores, ABSENT)
    share = scores.softmax(0) * samples.weight[None, :, None]
    # Keep the 40 samples with the largest weights per way and dimension, and renormalise.
    least = share.topk(min(KEPT_SAMPLES, number), dim=1).values[:, -1:]
    share = torch.where(share >= least, share, 0)
    return share / share.sum(1, keepdim=True).clamp(min=1e-12)


def _encode(part: Tree, p: Tensor, samples: Samples) -> Tensor:
    """Encode every pair of prototype and sample [W N, hidden].

    The batch norm uses mean 0 and variance 1, as released code does in evaluation: a few images do
    not give usable statistics.
    """
    hot = torch.eye(len(p), dtype=p.dtype, device=p.device)
    ours = torch.cat([p, hot], 1)[:, None]  # [W, 1, D + W]
    theirs = torch.cat([samples.x, samples.label], 1)[None]  # [1, N, D + W]
    x, y = torch.broadcast_tensors(ours, theirs)
    pairs = torch.cat([x * y, x * x, y * y, x, y], -1).flatten(0, 1)
    hidden = F.elu(_linear(part, "encode", pairs))
    return hidden * part["batch_norm.weight"] + part["batch_norm.bias"]


def _attend(part: Tree, pairs: Tensor, exists: Tensor) -> Tensor:
    """Let all pairs attend to those that exist; residual, then layer norm [W N, hidden]."""

    def heads(layer: str) -> Tensor:
        rows: Tensor = F.elu(_linear(part, layer, pairs)).unflatten(-1, (ATTENTION_HEADS, -1))
        return rows.transpose(0, 1)  # [heads, W N, width]

    query, key, value = (heads(layer) for layer in ("query", "key", "value"))
    scores = query @ key.mT * query.shape[-1] ** -0.5
    scores = torch.where(exists, scores, ABSENT)
    joined = (scores.softmax(-1) @ value).transpose(0, 1).flatten(1)
    hidden = pairs + F.elu(_linear(part, "join", joined))
    shape = (hidden.shape[-1],)
    return F.layer_norm(hidden, shape, part["layer_norm.weight"], part["layer_norm.bias"])


def moved_sums(sums: Tree, prototypes: Tensor) -> Tree:
    """Return ``proto.sum`` and ``proto.squares`` [W, D] for new means and unchanged variances."""
    count, total = sums["proto.count"][:, None].to(sums["proto.sum"]), sums["proto.sum"]
    moved = count * prototypes.to(total)
    change = (moved.square() - total.square()) / count.clamp(min=1)
    return {"proto.sum": moved, "proto.squares": sums["proto.squares"] + change}


def merge_by_weight(uploads: Tree, weight: Tensor) -> Tree:
    """Average uploads with given weights; prototypes only over clients that hold the class.

    Args:
        uploads: Tensors [K, ...]; ``proto.count`` [K, c], ``proto.sum`` and ``proto.squares``
            [K, c, D].
        weight: Weights [K] of the clients.

    Returns:
        Averages [...]. ``proto.*`` are sums whose mean is the weighted mean of the clients' means,
            and whose variance is that of all images together.
    """
    # Prompts and keys: mean over clients with weights ``weight``.
    averages = {
        k: torch.tensordot(weight.to(v) / weight.sum().to(v), v, 1)
        for k, v in drop(uploads, "proto.").items()
    }
    # Prototypes: weighted mean of the class means; variance of all images together.
    count = uploads["proto.count"][..., None].to(uploads["proto.sum"])
    means = uploads["proto.sum"] / count.clamp(min=1)
    share = weight.to(means)[:, None, None] * (count > 0)
    total = share.sum(0)
    mean = (share * means).sum(0) / total.clamp(min=1)
    images = count.sum(0).clamp(min=1)
    pooled_mean = uploads["proto.sum"].sum(0) / images
    variance = uploads["proto.squares"].sum(0) / images - pooled_mean.square()
    return {
        **averages,
        "proto.count": total[:, 0],
        "proto.sum": total * mean,
        "proto.squares": total * (variance + mean.square()),
    }
