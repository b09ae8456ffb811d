"""FedAvg: Communication-Efficient Learning of Deep Networks from Decentralized Data.

McMahan et al., AISTATS 2017.
"""

from dataclasses import dataclass

from fczoo.baselines.finetune import TunedLinearHead
from fczoo.core.registry import register_method


@register_method("fedavg")
@dataclass(frozen=True)
class FedAvg(TunedLinearHead):
    """Plain federated training on one task after another, with nothing against forgetting: the
    lower bound.

    Trained and sent: the linear head and, by choice, all weights or LoRA pairs.
    """

    paper = (
        'McMahan et al., "Communication-Efficient Learning of Deep Networks from '
        'Decentralized Data", AISTATS 2017'
    )
    supports_recurring_classes = True
    formulas = r"""
    $$w \leftarrow \sum_k \frac{n_k}{n} w_k$$

    $w_k$ is what client $k$ trained on its $n_k$ images from $w$, with cross-entropy over the
    task's classes.
    """
