"""The experiments of PILoRA (Guo et al., ECCV 2024)."""

from fczoo.core.registry import register_protocol
from fczoo.papers.protocol import Protocol, Statement, state

PAPER, CODE = "paper, experiments", "released code"
BETAS = (0.5, 0.1, 0.05)
HEAD = state("not stated; PyTorch's own start of a linear layer", open=True, head_init="default")
PAIRS = state("paper: every method trains the same LoRA", rank=4, blocks=(0,))
LORA = {**HEAD, **PAIRS, "tune": Statement("lora", "paper: every method trains the same LoRA")}
TUNED_SOURCE = ("fedavg", "ewc", "lwf", "fedclm", "icarl", "target", "glfc", "lga", "joint")
RATES = (
    "rates of the methods that it compares with are not printed; those of its prototypes and LoRA"
)


def _rates(prototype: float, lora: float) -> dict[str, dict[str, Statement]]:
    """Return learning rates of the compared methods: the head's and LoRA's."""
    rates = state(RATES, open=True, lr=prototype, lr_backbone=lora)
    return {
        **dict.fromkeys(TUNED_SOURCE, rates),
        "l2p": state(RATES, open=True, lr=prototype, lr_lora=lora),
    }


def _splits(*alphas: int) -> tuple[str, ...]:
    return (
        *(f"quantity:{a}" for a in alphas),
        *(f"dirichlet:{b:g},cap=on,min_size=10" for b in BETAS),
    )


@register_protocol("pilora")
class PILoRA(Protocol):
    """Ten clients with few classes each or Dirichlet splits, 30 rounds a task, a self-supervised
    ViT-B/16.
    """

    paper = (
        "Guo et al., PILoRA: Prototype Guided Incremental LoRA for Federated Class-Incremental "
        "Learning "
        "(ECCV 2024)"
    )
    proposes = ("pilora",)
    seeds = Statement((2023,), "released code; one run")
    settings = {
        "backbone": Statement(
            "vit_base_patch16_224.dino", "paper: ViT-B/16, DINO; timm's name of it"
        ),
        **state(
            "released code, on both data sets",
            open=True,
            mean=(0.5071, 0.4867, 0.4408),
            std=(0.2675, 0.2565, 0.2761),
        ),
        **state(PAPER, tasks=10, clients=10, participation=1.0, rounds=30, epochs=5, batch_size=64),
        "augment": Statement(
            "pilora", "released code: resize to 224, horizontal flip, brightness 63/255", open=True
        ),
        "test_crop": Statement(1.0, "released code: resize to 224", open=True),
        "class_order": Statement("natural", CODE, open=True),
    }
    datasets = {
        "cifar100": {
            "partition": Statement(
                "quantity:6", "paper, table 1, its mildest quantity-based split", open=True
            ),
            "train_per_class": Statement(
                400, "released code: the first 80 % of each class", open=True
            ),
        },
        "tinyimagenet": {
            "partition": Statement(
                "quantity:12", "paper, table 2, its mildest quantity-based split", open=True
            ),
            "train_per_class": Statement(
                400, "released code: the first 80 % of each class", open=True
            ),
        },
        "imagenet_subset": {
            "partition": Statement(
                "quantity:12",
                "as on Tiny-ImageNet, which has as many classes; the supplement was not at hand",
                open=True,
            ),
            **state(
                "as on the other two; the supplement was not at hand",
                mean=(0.5071, 0.4867, 0.4408),
                std=(0.2675, 0.2565, 0.2761),
            ),
        },
    }
    partitions = {
        "cifar100": _splits(6, 4, 2),
        "tinyimagenet": _splits(12, 8, 4),
        "imagenet_subset": _splits(12, 8, 4),
    }
    release = "pilora"
    methods = {
        "pilora": {
            **state(
                PAPER, rank=4, blocks=(0,), pull=1e-3, ortho=0.5, sharpness=1.0, schedule="cosine"
            ),
            **state(
                "paper, which has no such term; the released code: 0.01 and 1e-5",
                sparse=0.0,
                weight_decay=0.0,
            ),
            "temperature": Statement(
                0.2,
                "paper: eta = 0.2, a divisor as in the released code; eq. 13: a factor",
                printed=5.0,
            ),
            "distance": Statement(
                "rms", "released code; the paper's eq. 8: squared", printed="squared"
            ),
            "reweight": Statement(
                "distance", "released code; the paper's eq. 11: squared", printed="squared"
            ),
            "merge": Statement(
                "sum", "fed-mammoth; the paper's eq. 6: (sum B)(sum A)", printed="factor_sum"
            ),
            **state(
                "not stated; see `fczoo list quirks` for the released code",
                open=True,
                local="merged",
                means="after",
                unheld="average",
            ),
        },
        **dict.fromkeys(TUNED_SOURCE, LORA),
        "l2p": {
            **HEAD,
            **PAIRS,
            "lora": Statement(True, "paper: every method trains the same LoRA"),
        },
        "joint": {
            **LORA,
            "setting": Statement("federated", "paper, tables 1 and 2: it varies with the split"),
        },
    }
    dataset_options = {
        "cifar100": {**_rates(2e-2, 1e-5), "pilora": state(PAPER, lr_prototype=2e-2, lr_lora=1e-5)},
        "tinyimagenet": {
            **_rates(5e-3, 5e-6),
            "pilora": {
                "lr_prototype": Statement(5e-3, PAPER),
                "lr_lora": Statement(5e-6, "released scripts; the paper's print is garbled"),
            },
        },
        "imagenet_subset": {
            **_rates(5e-3, 5e-6),
            "pilora": state(
                "as on Tiny-ImageNet; the supplement was not at hand",
                lr_prototype=5e-3,
                lr_lora=5e-6,
            ),
        },
    }
    notes = (
        "The methods that it compares with run at constant rates, without the cosine schedule of "
        "PILoRA.",
        "The released code draws shards instead of classes (--partition shards:6) and, like its "
        "Dirichlet split, draws them again for every client in "
        "every round; here a split holds for its task.",
        "The released scripts train prototypes at 2e-3 and leave the number of epochs at 10.",
        "PILoRA+HeadTune is pilora with --set pilora.head_tune=on.",
    )
