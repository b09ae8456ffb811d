"""FisherAvg: Merging Models with Fisher-Weighted Averaging. Matena and Raffel, NeurIPS 2022."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from fczoo.baselines.finetune import TunedWithStatistics
from fczoo.core.backbone import Backbone
from fczoo.core.payload import Payload, whole_tensors
from fczoo.core.registry import register_method
from fczoo.core.training import TaskPhase, Training
from fczoo.core.tree import Tree
from fczoo.core.types import Batch, Context, ServerAggregator
from fczoo.functional.fisher import fisher_sums
from fczoo.functional.heads import head_logits

EPSILON = 1e-12  # weight of a parameter on which a client's images do not depend


@register_method("fisheravg")
@dataclass(frozen=True)
class FisherAvg(TunedWithStatistics):
    """FedAvg in which each parameter counts by how much the client's images depend on it.

    Trained and sent: the linear head and, by choice, all weights or LoRA pairs; as much again of
    Fisher information, squared gradients summed over the client's images, every round. Where
    no one's images depend on a parameter it is the plain mean.
    """

    paper = (
        'Matena and Raffel, "Merging Models with Fisher-Weighted Averaging", NeurIPS 2022; '
        "form of fed-mammoth"
    )
    formulas = r"""
    $$\theta = \frac{\sum_k F_k \odot \theta_k}{\sum_k F_k}$$

    $$F_k = \sum_{x \in D_k} p_y (\nabla_\theta \log p_y)^2$$
    """

    def training(self) -> Training:
        training = super().training()
        return replace(
            training,
            uploads={"fisher.": whole_tensors("parameters"), **training.uploads},
            averaging="uniform",
            collect_at={*training.collect_at, "after_training"},
        )

    def collect(
        self, phase: TaskPhase, backbone: Backbone, tree: Tree, batch: Batch, ctx: Context
    ) -> Tree:
        if phase == "task_start":
            return super().collect(phase, backbone, tree, batch, ctx)
        # Client, after every round: F_k = sum_x p_y (grad log p_y)^2, image by image. As a sum it
        # gives clients with more images more weight.
        task = ctx.task

        def log_likelihood(trained: Tree, one: Batch) -> Tensor:
            logits = head_logits(trained, self.statistics_features(backbone, trained, one))
            scores = logits[:, task.start : task.stop].log_softmax(-1)
            return scores.gather(1, one.y[:, None] - task.start)[:, 0]

        return {f"fisher.{k}": v for k, v in fisher_sums(log_likelihood, tree, batch).items()}

    def aggregate(self, payloads: Sequence[Payload], average: ServerAggregator) -> Tree:
        """Compute theta = sum_k F_k theta_k / sum_k F_k, entry by entry.

        It is computed as the first client's theta plus the weighted mean of the differences to it,
        so that entries that no client changes stay bit for bit.

        Args:
            payloads: Uploads of the clients: trained tensors and their ``fisher.X``.
            average: Averages F_k and F_k times the difference, by default without weights.

        Returns:
            The merged tensors.
        """
        first = payloads[0].drop("fisher.")
        products = []
        for payload in payloads:
            tree: Tree = {}
            for name, start in first.items():
                fisher = payload[f"fisher.{name}"].double() + EPSILON
                tree |= {f"fisher.{name}": fisher, name: fisher * (payload[name] - start)}
            products.append(payload.holding(tree))
        mean = average(products)
        return {k: (v + mean[k] / mean[f"fisher.{k}"]).to(v) for k, v in first.items()}
