"""FedAvg: Communication-Efficient Learning of Deep Networks from Decentralized Data.

McMahan et al., AISTATS 2017.
"""

from dataclasses import dataclass

from fczoo.baselines._tuned_backbone import TunedLinearHead
from fczoo.core.registry import register_method


@register_method("fedavg")
@dataclass(frozen=True)
class FedAvg(TunedLinearHead):
    """Sequential federated training without measures against forgetting: the lower bound.

    Clients train and send the linear head and, depending on ``tune``, all weights or LoRA pairs.
    The server averages them, weighted by the clients' numbers of images.
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
