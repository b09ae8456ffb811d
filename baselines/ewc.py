"""EWC in federated learning: Overcoming catastrophic forgetting in neural networks.

Kirkpatrick et al., PNAS 2017.
"""

from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from fczoo.baselines._tuned_backbone import TunedLinearHead
from fczoo.core.backbone import Backbone
from fczoo.core.options import option
from fczoo.core.payload import whole_tensors
from fczoo.core.registry import register_method
from fczoo.core.training import TaskPhase, Training
from fczoo.core.tree import Tree, drop, select
from fczoo.core.types import Batch, Boundary, Context, ServerContext, Task
from fczoo.functional.fisher import fisher_sums, true_fisher_sums

LOSS_SCALE = 2.0**16  # initial scale of PyTorch's gradient scaler


@register_method("ewc")
@dataclass(frozen=True)
class EWC(TunedLinearHead):
    """Online EWC: a penalty keeps weights that matter for earlier tasks near their last values.

    Clients train and send the linear head and, depending on ``tune``, all weights or LoRA pairs.
    After a task each client sends, once, its Fisher sums at the final global model. The server
    divides their sum by the number of images, which gives the Fisher of the pooled data. Memory
    beyond the model: Fisher and anchor, two copies of the trained tensors, on server and clients.
    """

    paper = (
        'Kirkpatrick et al., "Overcoming catastrophic forgetting in neural networks", PNAS '
        '2017; online form: Schwarz et al., "Progress & Compress: A scalable framework for '
        'continual learning", ICML 2018'
    )
    supports_recurring_classes = True
    formulas = r"""
    $$L = L_{ce} + \lambda \sum_i F_i (\theta_i - \theta^*_i)^2$$

    After each task $\theta^*$ becomes the global model, and with $p_y$ the probability of an
    image's label

    $$F \leftarrow \gamma F + \frac{1}{n} \sum_k \sum_{x \in D_k} p_y (\nabla_\theta \log p_y)^2$$
    """

    strength: float = option(
        1.0,
        "lambda, weight of the penalty, without a factor 1/2 (values to try: 1, 10, 100, 1e3, 1e4)",
        low=0,
        tune=(1.0, 1e4, "log"),
    )
    decay: float = option(
        0.9, "gamma, factor on the Fisher of earlier tasks after each new one", low=0, high=1
    )
    fisher: Literal["weighted", "empirical", "true"] = option(
        "weighted",
        "squared gradients in the Fisher information: weighted, of the label's loss, times its "
        "probability p_y; empirical, the same without p_y; true, of each class of the task, times "
        "its probability",
    )
    asked: Literal["trained", "all"] = option(
        "trained",
        "clients that compute the Fisher after a task: trained, those that trained in a round of "
        "it; all, all with images of it, even if never sampled",
    )
    amp_vanish: bool = option(
        False,
        "divide the penalty by 65,536, the initial loss scale of mixed precision",
        quirk="fed-mammoth: the penalty's gradient is added before loss scaling is undone",
    )
    modulo_labels: bool = option(
        False,
        "use the label y % c in a task of c classes, which is wrong if tasks differ in size "
        "(Cars-196)",
        quirk="fed-mammoth, also in its FisherAVG",
    )
    skip_last_round: bool = option(
        False,
        "skip training in the last round of a task",
        quirk="fed-mammoth, where this round only sends the global weights",
    )

    def training(self) -> Training:
        # As FedAvg; as a task ends each client also sends its Fisher sums F_k.
        training = super().training()
        return replace(
            training,
            uploads={"fisher.": whole_tensors("parameters"), **training.uploads},
            collect_at={*training.collect_at, "task_end"},
            collect_from=self.asked,
        )

    def loss(
        self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context
    ) -> tuple[Tensor, Tree]:
        if self.skip_last_round and ctx.round == ctx.rounds - 1:
            # fed-mammoth trains nothing in this round: zero gradients, without a forward pass.
            return sum((value.sum() * 0 for value in train.values()), batch.w.new_zeros(())), {}
        # L_ce, and from the second task on the penalty on all trained tensors.
        loss, sums = super().loss(backbone, train, self._relabel(batch, ctx.task), ctx)
        if self.strength and select(ctx.shared, "anchor."):
            loss = loss + self.penalty(train, ctx.shared) / (LOSS_SCALE if self.amp_vanish else 1)
        return loss, sums

    def penalty(self, train: Tree, shared: Tree) -> Tensor:
        """Compute the penalty lambda sum_i F_i (theta_i - theta*_i)^2.

        Args:
            train: Trained tensors theta.
            shared: Broadcast tensors, with ``fisher.X`` F and ``anchor.X`` theta*.

        Returns:
            The penalty, a scalar.
        """
        terms = []
        for name, value in train.items():
            change = value - shared[f"anchor.{name}"]
            terms.append((shared[f"fisher.{name}"] * change.square()).sum())
        return self.strength * sum(terms[1:], terms[0])

    def collect(
        self, phase: TaskPhase, backbone: Backbone, tree: Tree, batch: Batch, ctx: Context
    ) -> Tree:
        if phase == "task_start":
            return super().collect(phase, backbone, tree, batch, ctx)

        # Client, as a task ends, under the final global model: F_k = sum_x p_y (grad log p_y)^2,
        # image by image, with the softmax over the classes of the task.
        task = ctx.task

        def log_likelihood(params: Tree, one: Batch) -> Tensor:
            scores = self.logits(backbone, params, one)[:, task.start : task.stop].log_softmax(-1)
            return scores.gather(1, one.y[:, None] - task.start)[:, 0]

        params = self.trained_part(tree)
        if self.fisher == "true":
            sums = true_fisher_sums(log_likelihood, params, batch, task)
        else:
            weighted = self.fisher == "weighted"
            sums = fisher_sums(log_likelihood, params, self._relabel(batch, task), weighted)
        return {f"fisher.{k}": v for k, v in sums.items()}

    def _relabel(self, batch: Batch, task: Task) -> Batch:
        return batch._replace(y=batch.y % task.size + task.start) if self.modulo_labels else batch

    def update_from(self, phase: Boundary, state: Tree, sums: Tree, ctx: ServerContext) -> Tree:
        if phase == "task_start":
            return super().update_from(phase, state, sums, ctx)
        # Server, online EWC: theta* <- theta, F_t = sum_k F_k / sum_k n_k, F <- gamma F + F_t.
        state = {
            **drop(state, "anchor."),
            **{f"anchor.{k}": v for k, v in self.trained_part(state).items()},
        }
        for name, value in select(sums, "fisher.").items():
            mean = value / ctx.num_samples
            state[name] = self.decay * state[name] + mean if name in state else mean
        return state
