"""The experiments of FedProTIP (Cha et al., arXiv 2509.21606), as far as its released
configurations say.
"""

from fczoo.core.registry import register_protocol
from fczoo.papers.protocol import Protocol, Statement, state

CODE = "released configuration"
HEAD = state("not stated; PyTorch's own start of a linear layer", open=True, head_init="default")
RATES = state("released code, for a ViT", optimizer="sgd", weight_decay=5e-4, lr=1e-3)


@register_protocol("fedprotip")
class FedProTIP(Protocol):
    """Five clients; ImageNet-R in 5, 10 or 20 tasks, DomainNet's domains one after another,
    CIFAR-100.
    """

    paper = "Cha et al., arXiv 2509.21606"
    proposes = ("fedprotip", "fot", "fedavg")
    seeds = Statement((42, 44), CODE)
    settings = {
        "backbone": Statement(
            "vit_base_patch16_224.augreg_in21k", "a ViT-B/16; its weights are not stated", open=True
        ),
        **state(
            CODE, clients=5, partition="dirichlet:0.5", participation=1.0, epochs=5, batch_size=64
        ),
        "aggregator": Statement("uniform", "released code"),
        "augment": Statement("crop", "not read", open=True),
        "class_order": Statement("natural", CODE),
    }
    datasets = {
        "cifar100": state(CODE, tasks=10, rounds=20),
        "imagenet_r": {
            "tasks": Statement(10, f"{CODE}; also 5 and 20"),
            "rounds": Statement(50, CODE),
        },
        "domainnet": {"tasks": Statement("domains", CODE), "rounds": Statement(20, CODE)},
    }
    methods = {
        "fedprotip": {
            **HEAD,
            **RATES,
            **state("released code, for a ViT", lr_backbone=1e-3, threshold=0.7),
        },
        "fot": {
            **HEAD,
            **RATES,
            **state("released code, for a ViT", lr_backbone=1e-3, threshold=0.87),
        },
        "fedavg": {
            **HEAD,
            **RATES,
            **state("released code, for a ViT", lr_backbone=1e-3, tune="full"),
        },
    }
    notes = (
        "The released code infers the task of a test batch from the whole batch, which comes from "
        "one task; here fedprotip infers it for each image.",
        "On DomainNet labels come back, which fedprotip and fot refuse: --methods fedavg.",
        "Its comparison trains the lower six blocks in the first task only; here all are trained "
        "throughout.",
    )
