"""GeoDL in federated learning: On Learning the Geodesic Path for Incremental Learning.

Simon et al., CVPR 2021.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.baselines._cosine_head import CosineHead
from fczoo.core.backbone import Backbone
from fczoo.core.options import option
from fczoo.core.registry import register_method
from fczoo.core.tree import Tree
from fczoo.core.types import Batch, Context

ZERO = 1e-6  # principal angles and singular values below this are 0


def subspace(features: Tensor, weights: Tensor, size: Tensor | int) -> Tensor:
    """Compute the leading left singular vectors of the features (columns of a D x n matrix).

    Each feature is normalised to length 1 and centred over its own D entries, as in released code.

    Args:
        features: Features [n, D].
        weights: Weights [n]; rows of weight 0 do not count.
        size: Number of vectors to keep; further columns are 0.

    Returns:
        Columns [D, n].
    """
    rows = F.normalize(features, dim=-1)
    rows = (rows - rows.mean(-1, keepdim=True)) * weights[:, None]
    _, values, vectors = torch.linalg.svd(rows, full_matrices=False)
    position = torch.arange(len(values), device=features.device)
    columns: Tensor = vectors.mT * ((position < size) & (values > ZERO))
    return columns


def flow_kernel(old: Tensor, new: Tensor) -> Tensor:
    """Compute the geodesic flow kernel G, the integral of Phi(u) Phi(u)^T over u from 0 to 1.

    With P^T Q = U cos(theta) V^T, X = P U, Y = Q V and Y = X cos(theta) + R sin(theta), the kernel
    is G = X L1 X^T + X L2 R^T + R L2 X^T + R L3 R^T.

    Args:
        old: Orthonormal columns P [D, k], or zeros.
        new: Orthonormal columns Q [D, k], or zeros.

    Returns:
        The kernel G [D, D].
    """
    # Principal angles theta between the subspaces, and the orthonormal directions R of the flow.
    u, cosine, v = torch.linalg.svd(old.mT @ new)
    start, end = old @ u, new @ v.mT  # X, Y
    across = end - start * cosine
    sine = torch.linalg.vector_norm(across, dim=0)
    theta = torch.atan2(sine, cosine)
    small = theta < ZERO
    residual = torch.where(small, torch.zeros_like(across), across / sine.clamp(min=ZERO))  # R
    # Diagonals of the closed form: L1 = (1 + sin 2theta / 2theta) / 2, L3 = (1 - sin 2theta /
    # 2theta) / 2, L2 = (1 - cos 2theta) / (4 theta); for theta -> 0 they are 1, 0 and 0.
    twice = torch.where(small, torch.ones_like(theta), 2 * theta)
    ratio = torch.where(small, torch.ones_like(theta), twice.sin() / twice)
    first, third = (1 + ratio) / 2, (1 - ratio) / 2  # L1, L3
    second = torch.where(small, torch.zeros_like(theta), (1 - twice.cos()) / (2 * twice))  # L2
    cross = (start * second) @ residual.mT
    kernel: Tensor = (
        (start * first) @ start.mT + cross + cross.mT + (residual * third) @ residual.mT
    )
    return kernel


def geodesic_loss(features: Tensor, old: Tensor, kernel: Tensor, distance: bool) -> Tensor:
    """Compute L_geo = 1 - a^T G b / (|G^1/2 a| |G^1/2 b|) of each image.

    Args:
        features: New features b [B, D]; they are normalised to length 1.
        old: Old features a [B, D]; they are normalised to length 1.
        kernel: The kernel G [D, D].
        distance: Compute (a - b)^T G (a - b) instead.

    Returns:
        Losses [B].
    """
    a, b = F.normalize(old, dim=-1), F.normalize(features, dim=-1)
    if distance:
        return ((a - b) @ kernel * (a - b)).sum(-1)
    inner = ((a @ kernel) * b).sum(-1)
    lengths = ((a @ kernel) * a).sum(-1) * ((b @ kernel) * b).sum(-1)
    return 1 - inner / lengths.clamp(min=torch.finfo(a.dtype).tiny).sqrt()


@register_method("geodl")
@dataclass(frozen=True)
class GeoDL(CosineHead):
    """Distillation of features along the geodesic between old and new feature subspaces.

    As in the released code, the base is LUCIR's cosine head without the margin ranking; GLFC's
    tables use iCaRL as base, which is not offered. As in the paper, the kernel is computed from the
    two subspaces of one mini-batch, here of class tokens (the released code uses a feature map of a
    ResNet). Clients train and send the head rows of the task's classes, the scale sigma and,
    depending on ``tune``, all weights or LoRA pairs. Before a task they send once count and sum of
    the normalised features of each local class. Memory beyond the model: the teacher, one copy of
    the tensors trained below the head; exemplars at the client.
    """

    paper = 'Simon et al., "On Learning the Geodesic Path for Incremental Learning", CVPR 2021'
    formulas = r"""
    $$L = -\log \operatorname{softmax}_c\bigl( \sigma \cos(f, w_c) \bigr)_y
    + \lambda \sqrt{C_{old} / C_{new}}\;
    \Bigl( 1 - \frac{a^\top G b}{\lVert G^{1/2} a \rVert \, \lVert G^{1/2} b \rVert} \Bigr)$$

    $$G = \int_0^1 \Phi(u) \Phi(u)^\top du$$

    $a$ and $b$ are the teacher's and the model's features, of length 1; $\Phi$ is the geodesic from
    the subspace of the batch's old features to that of its new ones.
    """

    strength: float = option(
        10.0,
        "lambda, weight of the distillation; multiplied by sqrt(old / new classes) (10: released "
        "command)",
        low=0,
    )
    distance: bool = option(
        False,
        "distil the squared distance under the kernel instead of the cosine",
        quirk="chrysts/geodesic_continual_learning",
    )

    def loss(
        self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context
    ) -> tuple[Tensor, Tree]:
        # L = L_ce of sigma cos(f, w_c) over the classes seen + lambda sqrt(C_old / C_new) L_geo.
        features, task = self.features(backbone, train, batch), ctx.task
        logits = train["sigma"] * self.scores(features, train, ctx)
        loss = batch.mean(F.cross_entropy(logits, batch.y, reduction="none"))
        if task.index == 0:
            return loss, {}
        weight = self.strength * math.sqrt(task.start / task.size)
        return loss + weight * batch.mean(self.geodesic(features, batch)), {}

    def geodesic(self, features: Tensor, batch: Batch) -> Tensor:
        """Compute the geodesic distillation L_geo of each image.

        Args:
            features: New features b [B, D].
            batch: Images with the teacher's features a [B, D]; padding has weight 0.

        Returns:
            1 - a^T G b / (|G^1/2 a| |G^1/2 b|) [B]; 0 in a batch of fewer than three images.
        """
        # P and Q: the n - 2 leading left singular vectors of old and new features. G gets no
        # gradient.
        size = batch.w.sum() - 2
        with torch.no_grad():
            old = subspace(batch.teacher, batch.w, size)  # P
            new = subspace(features, batch.w, size)  # Q
            # G = integral of Phi(u) Phi(u)^T over the geodesic from P to Q.
            kernel = flow_kernel(old, new)
        return (size >= 1) * geodesic_loss(features, batch.teacher, kernel, self.distance)
