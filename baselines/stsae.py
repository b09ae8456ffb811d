"""STSA-E: STSA with a Gram matrix estimated from class sums. Guan et al., WWW 2026."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from fczoo.baselines.stsa import STSA
from fczoo.core.backbone import Backbone
from fczoo.core.options import option
from fczoo.core.registry import register_method
from fczoo.core.training import TaskPhase, Training
from fczoo.core.tree import Tree
from fczoo.core.types import Batch, Boundary, Context, ServerContext
from fczoo.functional.gaussians import class_sums
from fczoo.functional.ridge import gram_of_groups


@register_method("stsae")
@dataclass(frozen=True)
class STSAE(STSA):
    """STSA with a Gram matrix estimated from class sums over random parts of clients' images.

    Once per task clients send count and sum of the random features of every class, for each of q
    random parts of their images. The differences between the sums of the parts show how much
    features vary within a class; the estimate is unbiased over random splits. The server needs the
    sums of each client separately.
    """

    title = "STSA-E"
    formulas = r"""
    $$G_c = \frac{N_c - 1}{J_c - 1} \sum_j \frac{s_{j,c} s_{j,c}^\top}{n_{j,c}}
    - \frac{N_c - J_c}{(J_c - 1) N_c} Q_c Q_c^\top$$

    $$W = \Bigl( \sum_c G_c + \lambda I \Bigr)^{-1} Q$$

    $s_{j,c}$ is the sum of $\varphi = \max(0,\; R^\top f)$ over the $n_{j,c}$ images of class $c$
    in part $j$; $j$ numbers the parts of all clients. $J_c$ parts hold the class; $Q_c$ is the sum
    over all its $N_c$ images.
    """

    parts: int = option(
        5, "q, number of equal random parts into which a client splits its images", low=1
    )
    count_all_groups: bool = option(
        False,
        "in the estimate for a class, also count the parts without images of it, which makes the "
        "variance within the class too small",
        quirk="Yuqin-G/STSA",
    )

    def training(self) -> Training:
        # The estimate needs the sums of each client's parts separately.
        uploads = {f"part{j}.": self.class_group("count", "sum") for j in range(self.parts)}
        return replace(
            super().training(),
            uploads=uploads,
            draws=1,
            stratified_draws=True,
            per_client_statistics=True,
        )

    def collect(
        self, phase: TaskPhase, backbone: Backbone, tree: Tree, batch: Batch, ctx: Context
    ) -> Tree:
        # Client, once per task: split its images at random into q equal parts j; per part and class
        # the sum s_{j,c} and count n_{j,c}.
        phi = self.lift_features(tree, self.features(backbone, tree, batch))
        part = F.one_hot((self.parts * batch.draws[:, 0]).long(), self.parts) * batch.w[:, None]
        sums: Tree = {}
        for j in range(self.parts):
            part_sums = class_sums(phi, batch._replace(w=part[:, j]), ctx.task)
            sums |= {name.replace("class", f"part{j}"): value for name, value in part_sums.items()}
        return sums

    def update_from(self, phase: Boundary, state: Tree, sums: Tree, ctx: ServerContext) -> Tree:
        # Server: estimate G_c from the sums of all parts, then solve with G = sum_c G_c.
        count = torch.cat([sums[f"part{j}.count"] for j in range(self.parts)])  # [J, c]
        total = torch.cat([sums[f"part{j}.sum"] for j in range(self.parts)])
        gram = gram_of_groups(count, total, len(count) if self.count_all_groups else None)
        moments = {"class.count": count.sum(0), "class.sum": total.sum(0), "gram": gram}
        return super().update_from(phase, state, moments, ctx)
