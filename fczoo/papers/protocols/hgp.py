"""The experiments of HGP (Salami et al., arXiv 2406.02447)."""

from typing import Any

from fczoo.core.registry import register_protocol
from fczoo.papers.protocol import ByBeta, Protocol, Statement, state

PAPER, CODE = "paper, experiments", "released code (fed-mammoth)"

BETAS = {
    "cifar100": (0.5, 0.1, 0.05),
    "imagenet_r": (0.5, 0.1, 0.05),
    "imagenet_a": (1.0, 0.5, 0.2),
    "eurosat": (1.0, 0.5, 0.2),
    "cars196": (1.0, 0.5, 0.2),
    "cub200": (1.0, 0.5, 0.2),
}
"""Concentrations from section 4.1 and appendix H.

The header of table 2 prints 0.5, 0.1, 0.05 above EuroSAT and Cars-196.
"""

TASKS = {
    "cifar100": 10,
    "imagenet_r": 10,
    "imagenet_a": 10,
    "eurosat": 5,
    "cars196": (20,) * 9 + (16,),
    "cub200": 10,
}

LWF = (1e-5, 1e-5, 3e-5)
RATES: dict[str, tuple[float | tuple[float, ...], ...]] = {
    # CIFAR-100, ImageNet-R, ImageNet-A, EuroSAT, Cars-196, CUB-200; three numbers are those of
    # three betas
    "ewc": (1e-5, 1e-5, 1e-5, 1e-5, 1e-5, 1e-5),
    "lwf": (1e-5, LWF, LWF, LWF, LWF, LWF),
    "fisheravg": (1e-5, 1e-5, 1e-5, 1e-5, 1e-5, 1e-5),
    "regmean": (1e-5, 1e-5, 1e-5, 1e-5, 1e-5, 1e-5),
    "ccvr": (1e-5, 1e-5, 1e-5, 1e-5, 1e-5, 1e-5),
    "fedproto": (1e-5, LWF, (3e-5, 1e-5, 1e-5), (3e-5, 1e-5, 1e-5), 1e-5, 1e-5),
    "target": (1e-5, 1e-5, 1e-4, 1e-5, 1e-4, 1e-4),
    "l2p": (3e-2, 3e-2, (3e-2, 3e-2, 3e-1), 3e-2, 3e-2, 3e-1),
    "dualprompt": (5e-2, 3e-4, 3e-2, 1e-3, 1e-1, 1e-1),
    "codap": (1e-3, 1e-3, 1e-2, 1e-3, 3e-2, 1e-3),
    "pip": (5e-3, 3e-4, 3e-2, 1e-3, 1e-1, 1e-1),
    "pilora": (2e-2, 2e-2, (2e-2, 1e-2, 2e-2), 2e-2, 1e-1, 1.0),
    "lorm": (
        (3e-4, 1e-4, 5e-4),
        (3e-3, 1e-3, 1e-3),
        1e-2,
        (3e-3, 3e-3, 1e-3),
        1e-2,
        (1e-2, 3e-2, 3e-2),
    ),
    "hgp": (3e-3, (3e-2, 3e-2, 1e-2), 3e-2, (1e-3, 3e-4, 1e-4), 3e-3, 1e-1),
}
"""Learning rate of every method on every data set (appendix H)."""

NORMALISATION_SOURCE = (
    "the checkpoint's own, 0.5 and 0.5; the paper: pixels in [0, 1]; the released code: by data set"
)
HEAD = state(
    "released code (fed-mammoth): PyTorch's own start of a linear layer",
    open=True,
    head_init="default",
)
FULL = {
    **HEAD,
    "tune": Statement("full", "paper, section 4.2: methods that fine-tune train all weights"),
}
UNKNOWN = "not stated; that of the fully fine-tuned methods in appendix H"

LORM_RANKS = ((1, 16, 16), (2, 32, 16), 4, (1, 1, 4), (8, 8, 4), 1)

FIELDS = {
    "pilora": ("lr_prototype",),
    **dict.fromkeys(
        ("ewc", "lwf", "fisheravg", "regmean", "ccvr", "fedproto", "target"), ("lr", "lr_backbone")
    ),
}
"""Options that a method's one rate sets, where they are not only ``lr``."""


def column(dataset: str, row: tuple[Any, ...]) -> Any:
    """Return a data set's value in a row of the appendix: one for all betas, or one per beta."""
    values = row[list(BETAS).index(dataset)]
    return (
        ByBeta(dict(zip(BETAS[dataset], values, strict=True)))
        if isinstance(values, tuple)
        else values
    )


def _dataset(name: str) -> dict[str, dict[str, Statement]]:
    rates = {
        m: state("paper, appendix H", **_rates(m, column(name, row))) for m, row in RATES.items()
    }
    gamma, of_head = 0.5 if name == "cifar100" else 0.1, 0.3 if name == "cub200" else 0.5
    lorm = state("paper, appendix H", rank=column(name, LORM_RANKS), gamma=0.0, gamma_head=of_head)
    regmean = state("paper, appendix H", gamma=gamma, gamma_head=gamma)
    return {
        **rates,
        "lorm": {**rates["lorm"], **lorm},
        "regmean": {**rates["regmean"], **regmean},
    }


def _rates(method: str, rate: Any) -> dict[str, Any]:
    return dict.fromkeys(FIELDS.get(method, ("lr",)), rate)


def _split(beta: float) -> str:
    return f"dirichlet:{beta:g},draw=sample,max_tries=10000"


@register_protocol("hgp")
class HGP(Protocol):
    """Ten clients, Dirichlet splits of six data sets, five short rounds a task, a supervised
    ViT-B/16.
    """

    paper = (
        "Salami et al., Federated Class-Incremental Learning with Hierarchical Generative "
        "Prototypes "
        "(arXiv 2406.02447)"
    )
    proposes = ("hgp",)
    seeds = Statement((0, 1, 2), "paper, experiments: three seeds; which is not stated")
    settings = {
        "backbone": Statement(
            "vit_base_patch16_224.augreg_in21k",
            "paper: ViT-B/16, supervised on ImageNet-21k; the tag is the released code's",
        ),
        "mean": Statement(None, NORMALISATION_SOURCE, printed=(0.0, 0.0, 0.0)),
        "std": Statement(None, NORMALISATION_SOURCE, printed=(1.0, 1.0, 1.0)),
        **state(PAPER, clients=10, participation=1.0, rounds=5, epochs=5, batch_size=16),
        "client_draw": Statement("round", "paper, appendix E; the released code draws once a task"),
        "augment": Statement(
            "hgp",
            (
                "released code (fed-mammoth): random resized crop to 224 and horizontal flip; the "
                "paper: "
                "random crop and flip"
            ),
        ),
        "test_crop": Statement(
            0.875,
            "released code (fed-mammoth): resize to 256, bicubic, centre crop 224; the paper: "
            "resized to 224",
            printed=1.0,
        ),
        "class_order": Statement("natural", CODE, open=True),
    }
    datasets = {
        name: {
            "tasks": Statement(TASKS[name], PAPER),
            "partition": Statement(
                _split(betas[0]),
                (
                    "paper, section 4.1, its least skewed split; images drawn one by one and "
                    "redrawn as in "
                    "the released code"
                ),
                open=True,
            ),
        }
        for name, betas in BETAS.items()
    }
    partitions = {name: tuple(map(_split, betas)) for name, betas in BETAS.items()}
    release = "fed-mammoth"
    methods = {
        **dict.fromkeys(("ewc", "lwf", "fisheravg", "regmean", "fedproto", "target"), FULL),
        **dict.fromkeys(("dualprompt", "codap", "lorm", "pip"), HEAD),
        "l2p": {
            **HEAD,
            "pooled": Statement(
                "cls+prompt", "released code: mean over the class token and prompts", open=True
            ),
        },
        "fedavg": {**FULL, **state(UNKNOWN, open=True, lr=1e-5, lr_backbone=1e-5)},
        "hgp": {
            **HEAD,
            **state(
                "paper, section 3.2 and experiments",
                server_epochs=5,
                server_lr=0.01,
                per_class=256,
                spread=3.0,
            ),
            "prefix_len": Statement(
                100,
                (
                    "released code: 200 rows, half for keys and half for values; read literally, "
                    "the paper "
                    "has 200 of each"
                ),
                printed=200,
            ),
            "blocks": Statement((0, 1, 2, 3, 4), "paper: the first five blocks"),
            "clip": Statement(1.0, "released code; the paper has no clipping", printed=None),
            "logit_norm": Statement(0.1, "released code; the paper has plain logits", printed=None),
            "class_weights": Statement(
                "uniform", "released code; the paper's eq. 6: counts", printed="counts"
            ),
            "draw": Statement(
                "epoch", "released code; the paper's algorithm 1: once a round", printed="round"
            ),
            "init": Statement(
                "normal", "not stated; the released prefixes start at zero", open=True
            ),
            "keep_single": Statement(
                True, "not stated; the released code drops such classes", open=True
            ),
        },
        "pilora": {
            "lr_lora": Statement(1e-4, "paper, appendix H, where the legend swaps the two rates")
        },
        "ccvr": {**FULL, "per_class": Statement(256, CODE, open=True)},
        "joint": {
            **FULL,
            "setting": Statement("central", "paper, tables 1 and 2"),
            **state(UNKNOWN, open=True, lr=1e-5, lr_backbone=1e-5),
        },
    }
    dataset_options = {name: _dataset(name) for name in BETAS}
    notes = (
        (
            "Appendix C.1 gives one rate, 0.003, for HGP on all data sets; appendix H, followed "
            "here, "
            "gives one for each."
        ),
        (
            "The header of table 2 prints beta 0.5, 0.1, 0.05 above EuroSAT and Cars-196; section "
            "4.1 and "
            "appendix H have 1.0, 0.5, 0.2."
        ),
        "All that the print says is `fczoo reproduce hgp/... --dry-run`; all that the released "
        "code does is "
        "--as-released fed-mammoth.",
        (
            "Appendix E has 100 clients on CIFAR-100 at beta 0.05: --clients 100 --participation "
            "10 (20, "
            "50, 100)."
        ),
        "The released code's optimizer is AdamW without weight decay, which is Adam.",
        (
            "LoRM's own instructions take 10 rounds a task on Cars-196 and ImageNet-A, and 3e-3 on "
            "CIFAR-100 at beta 0.5."
        ),
        "Appendix H also has TARGET's distillation weight 25 and 30 generator rounds.",
    )
