"""FisherAvg: Merging Models with Fisher-Weighted Averaging. Matena and Raffel, NeurIPS 2022."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from fczoo.baselines._tuned_backbone import TunedWithStatistics
from fczoo.core.backbone import Backbone
from fczoo.core.options import option
from fczoo.core.payload import Payload, whole_tensors
from fczoo.core.registry import register_method
from fczoo.core.training import TaskPhase, Training
from fczoo.core.tree import Tree
from fczoo.core.types import Batch, Context, ServerAggregator
from fczoo.functional.fisher import fisher_sums, true_fisher_sums
from fczoo.functional.heads import head_logits

EPSILON = 1e-12  # added to Fisher information, so that all weights are positive


@register_method("fisheravg")
@dataclass(frozen=True)
class FisherAvg(TunedWithStatistics):
    """FedAvg with each parameter weighted by its Fisher information on the client's images.

    Clients train and send the linear head and, depending on ``tune``, all weights or LoRA pairs. In
    every round they also send Fisher information of the same size, from squared gradients on their
    images. The server merges each parameter by these weights; it is the uniform mean where the
    Fisher information is 0 at all clients.
    """

    paper = 'Matena and Raffel, "Merging Models with Fisher-Weighted Averaging", NeurIPS 2022'
    formulas = r"""
    $$\theta = \frac{\sum_k F_k \odot \theta_k}{\sum_k F_k}$$

    $$F_k = \frac{1}{n_k} \sum_{x \in D_k} \sum_c p_c (\nabla_\theta \log p_c)^2$$

    $c$ are the classes of the task.
    """

    fisher: Literal["true", "weighted"] = option(
        "true",
        "Fisher information from squared gradients: true, expectation over the task's classes, "
        "mean over images (paper); weighted, that of the label times its probability, summed over "
        "images (HGP's code)",
    )

    def training(self) -> Training:
        # As FedAvg; in each round clients also send their Fisher sums.
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
        # Client, after local training: sum over images of the squared gradients in F_k. The server
        # divides it by n_k; with ``weighted`` it does not, so larger clients weigh more.
        task = ctx.task

        def log_likelihood(trained: Tree, one: Batch) -> Tensor:
            logits = head_logits(trained, self.statistics_features(backbone, trained, one))
            scores = logits[:, task.start : task.stop].log_softmax(-1)
            return scores.gather(1, one.y[:, None] - task.start)[:, 0]

        if self.fisher == "true":
            sums = true_fisher_sums(log_likelihood, tree, batch, task)
        else:
            sums = fisher_sums(log_likelihood, tree, batch)
        return {f"fisher.{k}": v for k, v in sums.items()}

    def aggregate(self, payloads: Sequence[Payload], average: ServerAggregator) -> Tree:
        """Compute theta = sum_k F_k theta_k / sum_k F_k, entry by entry.

        The computed form is the first client's theta plus the weighted mean of the differences to
        it: entries that no client changes stay bit for bit.

        Args:
            payloads: Uploads of the clients: trained tensors and their ``fisher.X``.
            average: Aggregator of F_k and of F_k times the difference; by default the plain mean.

        Returns:
            The merged tensors.
        """
        # Server: F_k + epsilon and (F_k + epsilon) (theta_k - theta_1) per client, then the means.
        first = payloads[0].drop("fisher.")
        products = []
        for payload in payloads:
            tree: Tree = {}
            images = payload.num_samples if self.fisher == "true" else 1
            for name, start in first.items():
                fisher = payload[f"fisher.{name}"].double() / images + EPSILON
                tree |= {f"fisher.{name}": fisher, name: fisher * (payload[name] - start)}
            products.append(payload.holding(tree))
        mean = average(products)
        return {k: (v + mean[k] / mean[f"fisher.{k}"]).to(v) for k, v in first.items()}
