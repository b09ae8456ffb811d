"""PODNet in federated learning: Pooled Outputs Distillation for Small-Tasks Incremental Learning.

Douillard et al., ECCV 2020.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fczoo.baselines.proxies import ProxyHead
from fczoo.core.options import option
from fczoo.core.registry import register_method
from fczoo.core.types import Context
from fczoo.functional.cosine import cosine_distance
from fczoo.functional.feature_maps import spatial_distance


@register_method("podnet")
@dataclass(frozen=True)
class PODNet(ProxyHead):
    """Maps of four depths are distilled after pooling over height and width; several proxies per
    class.

    A ResNet's stages become the patch tokens of blocks L/4, L/2, 3L/4 and L. New proxies are drawn
    by the server about their class's mean, as clients' k-means could not be averaged. Trained and
    sent: proxies of the task's classes, the scale eta and, by choice, all weights or LoRA pairs;
    before a task, once, count, sum and squares of every local class's features of length 1; after
    it, all proxies from one more round on exemplars only. Memory beyond the model: the teacher,
    one copy of what is trained beneath the head; exemplars at the client.
    """

    paper = (
        'Douillard et al., "PODNet: Pooled Outputs Distillation for Small-Tasks Incremental '
        'Learning", ECCV 2020'
    )
    formulas = r"""
    $$L = L_{nca} + \sqrt{C_{seen} / C_{new}}\;
    \Bigl( \lambda_c \operatorname{mean}_l \lVert a_l - b_l \rVert
    + \lambda_f (1 - \cos(f, f_{old})) \Bigr)$$

    $$L_{nca} = \max\Bigl( 0,\;
    -\eta (z_y - \delta) + \log \sum_{c \neq y} \exp(\eta z_c) \Bigr)$$

    $$z_c = \sum_k \operatorname{softmax}(s_c)_k \, s_{c,k}, \quad
    s_{c,k} = 2 \cos(f, w_{c,k}) - 2$$

    $a_l$ and $b_l$ are the squared maps of block $l$ under the teacher and the model, summed over
    height and over width, of length 1.
    """

    spatial: float = option(
        3.0, "lambda_c, weight of the pooled maps (CIFAR-100; ImageNet: 8)", low=0
    )
    final: float = option(1.0, "lambda_f, weight of 1 - cos of the features (ImageNet: 10)", low=0)

    def distance(self, old: list[Tensor], new: list[Tensor], ctx: Context) -> Tensor:
        # Spatial POD: sum squared maps over height and over width, normalise to length 1, take the
        # norm (not squared) of the difference, mean over blocks. Weight lambda_c.
        distances = [spatial_distance(a, b) for a, b in zip(old, new, strict=True)]
        return self.spatial * torch.stack(distances).mean(0)

    def flat(self, old: Tensor, new: Tensor) -> Tensor:
        # Flat POD: lambda_f (1 - cos(f, f_old)) of the final features.
        return self.final * cosine_distance(new, old)
