"""FisherAvg: Merging Models with Fisher-Weighted Averaging. Matena and Raffel, NeurIPS 2022."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fczoo.baselines.finetune import TunedWithStatistics
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.payload import Payload, whole
from fczoo.core.registry import register_method
from fczoo.core.tree import Tree
from fczoo.core.types import Batch, Context, ServerAggregator, Training
from fczoo.functional.fisher import fisher_sums
from fczoo.functional.heads import head_logits

EPSILON = 1e-12  # weight of a parameter of which a client's images say nothing


@register_method("fisheravg")
@dataclass(frozen=True)
class FisherAvg(TunedWithStatistics):
    """FedAvg in which each parameter counts by how much the client's images depend on it.

    Trained and sent: the linear head and, by choice, all weights or LoRA pairs; as much again of Fisher
    information, squared gradients summed over the client's images, every round. Where nobody's images
    depend on a parameter it is the plain mean.
    """

    paper = "Matena and Raffel, NeurIPS 2022; form of fed-mammoth"
    formulas = r"""
    $$\theta = \frac{\sum_k F_k \odot \theta_k}{\sum_k F_k}$$

    $$F_k = \sum_{x \in D_k} p_y (\nabla_\theta \log p_y)^2$$
    """

    def training(self) -> Training:
        uploads = {"fisher.": whole("parameters"), **self.head_uploads()}
        return replace(super().training(), uploads=uploads, averaging="uniform", stats="test")

    def stats(self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context) -> Tree:
        task = ctx.task

        def log_likelihood(tree: Tree, one: Batch) -> Tensor:
            logits = head_logits(tree, self.statistics_features(backbone, tree, one))
            scores = logits[:, task.start : task.stop].log_softmax(-1)
            return scores.gather(1, one.y[:, None] - task.start)[:, 0]

        return {f"fisher.{k}": v for k, v in fisher_sums(log_likelihood, train, batch).items()}

    def aggregate(self, payloads: Sequence[Payload], average: ServerAggregator) -> Tree:
        """sum_k F_k theta_k / sum_k F_k.

        As the first client's theta plus the weighted mean of what differs from it, so that what all clients
        leave alone stays bit for bit.
        """
        first = payloads[0].drop("fisher.")
        weighted = []
        for payload in payloads:
            tree: Tree = {}
            for name, start in first.items():
                fisher = payload[f"fisher.{name}"].double() + EPSILON
                tree |= {f"fisher.{name}": fisher, name: fisher * (payload[name] - start)}
            weighted.append(payload.holding(tree))
        mean = average(weighted)
        return {k: (v + mean[k] / mean[f"fisher.{k}"]).to(v) for k, v in first.items()}
