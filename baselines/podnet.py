"""PODNet in federated learning: Pooled Outputs Distillation for Small-Tasks Incremental Learning.

Douillard et al., ECCV 2020.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fczoo.baselines._proxy_head import ProxyHead
from fczoo.core.options import option
from fczoo.core.registry import register_method
from fczoo.core.types import Context
from fczoo.functional.cosine import cosine_distance
from fczoo.functional.feature_maps import spatial_distance


@register_method("podnet")
@dataclass(frozen=True)
class PODNet(ProxyHead):
    """Distillation of pooled maps at four depths, and a head with several proxies per class.

    The maps are those of patch tokens after blocks L/4, L/2, 3L/4 and L, instead of a ResNet's
    stages. They are pooled over height and over width. The server draws new proxies around the mean
    feature of their class, as k-means results of clients could not be averaged. Clients train and
    send the proxies of the task's classes, the scale eta and, depending on ``tune``, all weights or
    LoRA pairs. Before a task they send once count, sum and sum of squares of the normalised
    features of each local class. After each task but the first they train all proxies in one more
    round, only on exemplars, and send them. Memory beyond the model: the teacher, one copy of the
    tensors trained below the head; exemplars at the client.
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

    $a_l$ and $b_l$ are vectors of the squared maps of block $l$ under the teacher and the model.
    Each joins the sums over height and the sums over width, and is divided by its norm.
    """

    spatial: float = option(
        3.0, "lambda_c, weight of the distance of pooled maps (CIFAR-100: 3; ImageNet: 8)", low=0
    )
    final: float = option(
        1.0, "lambda_f, weight of the cosine distance of final features (ImageNet: 10)", low=0
    )

    def distance(self, old: list[Tensor], new: list[Tensor], ctx: Context) -> Tensor:
        # Spatial POD: sum squared maps over height and over width, normalise to length 1, take the
        # norm (not squared) of the difference, mean over blocks. Weight lambda_c.
        distances = [spatial_distance(a, b) for a, b in zip(old, new, strict=True)]
        return self.spatial * torch.stack(distances).mean(0)

    def flat(self, old: Tensor, new: Tensor) -> Tensor:
        # Flat POD: lambda_f (1 - cos(f, f_old)) of the final features.
        return self.final * cosine_distance(new, old)
