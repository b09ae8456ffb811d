"""FedProx: Federated Optimization in Heterogeneous Networks. Li et al., MLSys 2020."""

from dataclasses import dataclass

from fczoo import Method, Optim, Training, option, register_method
from fczoo.functional.heads import head_logits, linear_head
from fczoo.functional.losses import task_cross_entropy


@register_method("fedprox")
@dataclass(frozen=True)
class FedProx(Method):
    """A linear head on frozen features, held near the global head while a client trains."""

    paper = "Li et al., MLSys 2020"

    lr: float = option(1e-2, "learning rate of the head", low=0, tune=(1e-4, 1e-1, "log"))
    strength: float = option(
        0.1,
        "mu, weight of the squared distance to the global head",
        low=0,
        tune=(1e-3, 10.0, "log"),
    )

    def training(self):  # on frozen features, which the engine computes once and keeps
        return Training(optims={"head.": Optim(lr=self.lr)}, inputs=["query"])

    def begin_task(self, state, task, backbone, rng):
        return state or linear_head(task, backbone.dim, rng)

    def loss(self, backbone, train, batch, ctx):
        loss = task_cross_entropy(head_logits(train, batch.query), batch, ctx.task)
        drift = sum((train[name] - ctx.shared[name]).square().sum() for name in train)
        return loss + self.strength / 2 * drift, {}

    def predict(self, backbone, state, batch, task):
        return head_logits(state, batch.query)[:, : task.stop]
