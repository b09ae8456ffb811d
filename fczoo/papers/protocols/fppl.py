"""The experiments of FPPL (He et al., arXiv 2411.01904)."""

from fczoo.core.registry import register_protocol
from fczoo.papers.protocol import Protocol, Statement, state

PAPER, CODE = "paper, experiments", "released code"
HEAD = state("released code: PyTorch's own start of a linear layer", open=True, head_init="default")
SLOW = {
    **HEAD,
    **state(
        "paper: fully fine-tuned methods learn slowly below the head",
        tune="full",
        lr=1e-2,
        lr_backbone=1e-4,
    ),
}
PROMPT = {**HEAD, **state("paper: prompt methods", lr=1e-3)}


def _split(beta: float) -> str:
    return f"dirichlet:{beta:g},scope=dataset,cap=on,min_size=10"


@register_protocol("fppl")
class FPPL(Protocol):
    """Ten clients, one Dirichlet split of the whole data set, 200 rounds over all tasks, a
    ViT-B/16.
    """

    paper = (
        "He et al., FPPL: An Efficient and Non-IID Robust Federated Continual Learning Framework "
        "(arXiv "
        "2411.01904)"
    )
    proposes = ("fppl",)
    seeds = Statement((2023, 2024, 2025), PAPER)
    settings = {
        "backbone": Statement(
            "vit_base_patch16_224.augreg_in21k_ft_in1k",
            "released code: timm 0.6.7's vit_base_patch16_224; the paper: ViT-B/16, ImageNet",
            open=True,
        ),
        **state(
            "released code: pixels in [0, 1], not normalised",
            open=True,
            mean=(0.0, 0.0, 0.0),
            std=(1.0, 1.0, 1.0),
        ),
        **state(PAPER, clients=10, participation=1.0, epochs=5, batch_size=128),
        "rounds": Statement(
            lambda tasks: max(200 // tasks, 1),
            "paper: 200 rounds over all tasks, so 20 of 10 tasks and 10 of 20",
        ),
        "partition": Statement(
            _split(0.5),
            "paper: beta 0.5; drawn once over all classes, capped and redrawn as in the released "
            "code",
            open=True,
        ),
        "augment": Statement(
            "fppl",
            "released code: random resized crop of 5 to 100 % of the area, horizontal flip",
            open=True,
        ),
        "test_crop": Statement(
            0.875, "released code: resize to 256, bicubic, centre crop 224", open=True
        ),
        "class_order_seed": Statement(
            2023, "paper: a random order for each of its seeds", open=True
        ),
        "vary": Statement(
            ("training", "partition", "class-order"),
            "paper: an order for each seed, which draws the split",
        ),
    }
    datasets = {
        "imagenet_r": {"tasks": Statement(20, PAPER)},
        "cub200": {"tasks": Statement(20, PAPER)},
        "cifar100": {"tasks": Statement(10, PAPER)},
    }
    partitions = {
        **dict.fromkeys(("imagenet_r", "cub200"), tuple(map(_split, (1.0, 0.5, 0.1, 0.05, 0.01)))),
        "cifar100": (_split(0.5), "iid"),
    }
    release = "fppl"
    methods = {
        "fppl": {
            **HEAD,
            **state(PAPER, length=20, blocks=(0, 1, 2, 3, 4), lr=1e-3, unify=1.0, temperature=0.2),
            **state(
                "released code",
                open=True,
                server_lr=1e-3,
                server_epochs=5,
                server_batch=128,
                view="test",
            ),
        },
        **dict.fromkeys(("fedavg", "ewc", "lwf", "slca"), SLOW),
        "glfc": {**SLOW, "memory": Statement(200, "paper: 200 images per client")},
        **dict.fromkeys(("l2p", "dualprompt", "codap"), PROMPT),
        "fedcprompt": HEAD,
    }
    notes = (
        "The paper shuffles the classes again for each seed; so does a bench (--vary). The orders "
        "themselves "
        "are drawn by fczoo and are not the paper's.",
        "Table IV has 20, 30 and 40 clients on ImageNet-R: --clients 20 and so on.",
        "The comparison with Fed-CPrompt takes 40 rounds a task and 1e-4 for clients and server.",
    )
