"""Protocols against tables copied from the papers.

The tables below come from the papers and their released code, not from this package. HGP's
learning rates are in appendix H; the others are in each paper's experiments.
"""

from typing import Any

import pytest

from fczoo import Settings, create_method
from fczoo.backbones.timm_vit import architecture
from fczoo.core.registry import METHODS, PARTITIONERS
from fczoo.protocols.registry import PROTOCOLS

PAIRS = [
    (name, dataset)
    for name in PROTOCOLS.names("fczoo.")
    for dataset in PROTOCOLS.get(name).datasets
]

DINO, IN21K, IN1K = (
    "vit_base_patch16_224.dino",
    "vit_base_patch16_224.augreg_in21k",
    "vit_base_patch16_224.augreg_in21k_ft_in1k",
)

# protocol, data set: tasks, clients, joining, transition, participation, rounds, epochs, batch,
# split, backbone, view, seeds
SETTINGS: dict[tuple[str, str], tuple[Any, ...]] = {
    ("hgp", "cifar100"): (10, 10, 0, 1, 1, 5, 5, 16, "dirichlet 0.5", IN21K, "hgp", 3),
    ("hgp", "imagenet_r"): (10, 10, 0, 1, 1, 5, 5, 16, "dirichlet 0.5", IN21K, "hgp", 3),
    ("hgp", "imagenet_a"): (10, 10, 0, 1, 1, 5, 5, 16, "dirichlet 1", IN21K, "fppl", 3),
    ("hgp", "eurosat"): (5, 10, 0, 1, 1, 5, 5, 16, "dirichlet 1", IN21K, "hgp", 3),
    ("hgp", "cars196"): (
        (20, 20, 20, 20, 20, 20, 20, 20, 20, 16),
        10,
        0,
        1,
        1,
        5,
        5,
        16,
        "dirichlet 1",
        IN21K,
        "flip",
        3,
    ),
    ("hgp", "cub200"): (10, 10, 0, 1, 1, 5, 5, 16, "dirichlet 1", IN21K, "randomcrop", 3),
    ("pilora", "cifar100"): (10, 10, 0, 1, 1, 30, 5, 64, "quantity 6", DINO, "pilora", 1),
    ("pilora", "tinyimagenet"): (10, 10, 0, 1, 1, 30, 5, 64, "quantity 12", DINO, "pilora", 1),
    ("pilora", "imagenet_subset"): (10, 10, 0, 1, 1, 30, 5, 64, "quantity 12", DINO, "pilora", 1),
    ("fppl", "cifar100"): (10, 10, 0, 1, 1, 20, 5, 128, "dirichlet 0.5", IN1K, "fppl", 3),
    ("fppl", "imagenet_r"): (20, 10, 0, 1, 1, 10, 5, 128, "dirichlet 0.5", IN1K, "fppl", 3),
    ("fppl", "cub200"): (20, 10, 0, 1, 1, 10, 5, 128, "dirichlet 0.5", IN1K, "fppl", 3),
    ("fcilpt", "cifar100"): (10, 30, 10, 0.9, 10, 10, 5, 16, "overlap 0.6", IN21K, "none", 1),
    ("fcilpt", "miniimagenet"): (10, 30, 10, 0.9, 10, 10, 5, 16, "overlap 0.6", IN21K, "none", 1),
    ("fcilpt", "tinyimagenet"): (10, 30, 10, 0.9, 10, 10, 5, 16, "overlap 0.6", IN21K, "none", 1),
    ("glfc", "cifar100"): (10, 30, 10, 0.9, 10, 10, 20, 128, "overlap 0.6", IN21K, "crop", 1),
    ("glfc", "tinyimagenet"): (10, 30, 20, 0.9, 10, 10, 20, 128, "overlap 0.6", IN21K, "crop", 1),
    ("fedprotip", "cifar100"): (10, 5, 0, 1, 1, 20, 5, 64, "dirichlet 0.5", IN21K, "crop", 2),
    ("fedprotip", "imagenet_r"): (10, 5, 0, 1, 1, 50, 5, 64, "dirichlet 0.5", IN21K, "crop", 2),
    ("fedprotip", "domainnet"): (
        "domains",
        5,
        0,
        1,
        1,
        20,
        5,
        64,
        "dirichlet 0.5",
        IN21K,
        "crop",
        2,
    ),
    ("quick", "digits"): (5, 5, 0, 1, 1, 2, 1, 8, "dirichlet 0.5", "vit_nano_32", "none", 1),
}
APPENDIX_H = """
            cifar100        imagenet_r      imagenet_a      eurosat         cars196         cub200
ewc         1e-5            1e-5            1e-5            1e-5            1e-5            1e-5
lwf         1e-5            1e-5,1e-5,3e-5  1e-5,1e-5,3e-5  1e-5,1e-5,3e-5  1e-5,1e-5,3e-5  1e-5,1e-5,3e-5
fisheravg   1e-5            1e-5            1e-5            1e-5            1e-5            1e-5
regmean     1e-5            1e-5            1e-5            1e-5            1e-5            1e-5
ccvr        1e-5            1e-5            1e-5            1e-5            1e-5            1e-5
l2p         3e-2            3e-2            3e-2,3e-2,3e-1  3e-2            3e-2            3e-1
dualprompt  5e-2            3e-4            3e-2            1e-3            1e-1            1e-1
codap       1e-3            1e-3            1e-2            1e-3            3e-2            1e-3
fedproto    1e-5            1e-5,1e-5,3e-5  3e-5,1e-5,1e-5  3e-5,1e-5,1e-5  1e-5            1e-5
target      1e-5            1e-5            1e-4            1e-5            1e-4            1e-4
pip         5e-3            3e-4            3e-2            1e-3            1e-1            1e-1
pilora      2e-2            2e-2            2e-2,1e-2,2e-2  2e-2            1e-1            1
lorm        3e-4,1e-4,5e-4  3e-3,1e-3,1e-3  1e-2            3e-3,3e-3,1e-3  1e-2            1e-2,3e-2,3e-2
hgp         3e-3            3e-2,3e-2,1e-2  3e-2            1e-3,3e-4,1e-4  3e-3            1e-1
"""


def values(protocol: str, dataset: str, **given: Any) -> dict[str, Any]:
    """Return the settings of a protocol, also for a data set that is not installed."""
    cls = PROTOCOLS.get(protocol)
    defaults = cls.settings_on(dataset)
    tasks = given.get("tasks", defaults["tasks"].value)
    return {
        k: v.value_for(tasks if isinstance(tasks, int) else len(tasks)) for k, v in defaults.items()
    }


def test_table_covers_every_protocol_and_dataset() -> None:
    assert set(PAIRS) == SETTINGS.keys()


@pytest.mark.parametrize(("name", "dataset"), PAIRS)
def test_settings_match_papers(name: str, dataset: str) -> None:
    v = {"joining": 0, "transition": 1.0, "participation": 1.0, **values(name, dataset)}
    partitioner = PARTITIONERS.create(v["partition"])
    split = f"{partitioner.name} {next(iter(vars(partitioner).values())):g}"
    fields = (
        "tasks",
        "clients",
        "joining",
        "transition",
        "participation",
        "rounds",
        "epochs",
        "batch_size",
    )
    seeds = len(PROTOCOLS.get(name).seeds.value)
    assert (*(v[f] for f in fields), split, v["backbone"], v["augment"], seeds) == SETTINGS[
        name, dataset
    ]


@pytest.mark.parametrize(("name", "dataset"), PAIRS)
def test_every_value_is_valid_setting_with_source(name: str, dataset: str) -> None:
    cls = PROTOCOLS.get(name)
    v = values(name, dataset)
    settings = Settings(dataset=dataset, **v)
    assert {k: getattr(settings, k) for k in v} == v
    assert all(s.source for s in cls.settings_on(dataset).values())
    assert all(
        s.source
        for m in {*cls.methods, *cls.dataset_options.get(dataset, {})}
        for s in cls.hyperparameters(m, dataset).values()
    )
    for spec in cls.partitions.get(dataset, ()):
        PARTITIONERS.create(spec)
    assert cls.settings_on(dataset)["partition"].value in cls.partitions.get(
        dataset, (v["partition"],)
    )


@pytest.mark.parametrize("backbone", [DINO, IN21K, IN1K])
def test_protocol_backbones_are_vit_base(backbone: str) -> None:
    config = architecture(backbone)
    assert (config.image_size, config.patch_size, config.dim, config.depth, config.heads) == (
        224,
        16,
        768,
        12,
        12,
    )


@pytest.mark.parametrize(("name", "dataset"), PAIRS)
def test_every_hyperparameter_fits_its_method(name: str, dataset: str) -> None:
    """Create every installed method with the options of the protocol."""
    cls = PROTOCOLS.get(name)
    methods = [
        m
        for m in {*cls.methods, *cls.dataset_options.get(dataset, {}), *cls.proposes}
        if m in METHODS.names()
    ]
    for method in methods:
        options = cls.options(method, dataset, partition_beta(values(name, dataset)["partition"]))
        built = create_method(method, dataset, **options)
        assert {k: getattr(built, k) for k in options} == options


def partition_beta(spec: str) -> float | None:
    return getattr(PARTITIONERS.create(spec), "beta", None)


def test_hgp_learning_rates_match_appendix_h() -> None:
    head, *lines = APPENDIX_H.strip().splitlines()
    betas = {"cifar100": (0.5, 0.1, 0.05), "imagenet_r": (0.5, 0.1, 0.05)}
    cls, comparisons = PROTOCOLS.get("hgp"), 0
    for line in lines:
        method, *cells = line.split()
        for dataset, cell in zip(head.split(), cells, strict=True):
            columns = [float(x) for x in cell.split(",")] * (3 if "," not in cell else 1)
            for beta, rate in zip(betas.get(dataset, (1.0, 0.5, 0.2)), columns, strict=True):
                options = cls.options(method, dataset, beta)
                rates = [
                    v
                    for k, v in options.items()
                    if k.startswith("lr") and (method, k) != ("pilora", "lr_lora")
                ]
                assert rates and set(rates) == {rate}, (method, dataset, beta)
                comparisons += 1
    assert comparisons == 14 * 6 * 3
    ranks = {
        "cifar100": (1, 16, 16),
        "imagenet_r": (2, 32, 16),
        "imagenet_a": (4, 4, 4),
        "eurosat": (1, 1, 4),
        "cars196": (8, 8, 4),
        "cub200": (1, 1, 1),
    }
    for dataset, triple in ranks.items():
        assert (
            tuple(
                cls.options("lorm", dataset, b)["rank"] for b in betas.get(dataset, (1.0, 0.5, 0.2))
            )
            == triple
        )
        assert cls.options("pilora", dataset, 0.5)["lr_lora"] == 1e-4


def test_method_rates_on_hgp_datasets_are_in_appendix_h() -> None:
    """Use a rate of appendix H on HGP's data sets, also without a protocol.

    HGP and PILoRA are excluded: they follow their own papers.
    """
    head, *lines = APPENDIX_H.strip().splitlines()
    for method, *cells in map(str.split, lines):
        for dataset, cell in zip(head.split(), cells, strict=True):
            if method not in ("hgp", "pilora"):
                rate = create_method(method, dataset).lr
                assert rate in map(float, cell.split(",")), (method, dataset, rate)


@pytest.mark.parametrize(
    ("protocol", "dataset", "method", "expected"),
    [
        (
            "pilora",
            "cifar100",
            "pilora",
            {
                "lr_prototype": 2e-2,
                "lr_lora": 1e-5,
                "rank": 4,
                "pull": 1e-3,
                "ortho": 0.5,
                "temperature": 0.2,
            },
        ),
        ("pilora", "cifar100", "pilora", {"sparse": 0, "weight_decay": 0}),
        ("pilora", "tinyimagenet", "pilora", {"lr_prototype": 5e-3, "lr_lora": 5e-6}),
        ("pilora", "cifar100", "ewc", {"tune": "lora", "rank": 4, "blocks": (0,)}),
        ("pilora", "cifar100", "joint", {"setting": "federated"}),
        ("hgp", "cifar100", "joint", {"setting": "central"}),
        (
            "hgp",
            "cub200",
            "hgp",
            {
                "server_epochs": 5,
                "server_lr": 0.01,
                "per_class": 256,
                "spread": 3.0,
                "blocks": (0, 1, 2, 3, 4),
            },
        ),
        (
            "hgp",
            "cifar100",
            "ccvr",
            {
                "gaussian": "mixture",
                "calibrate": "each_round",
                "covariance": "diagonal",
                "calibrated": "current",
                "logit_norm": 0.1,
                "per_class": 256,
            },
        ),
        (
            "hgp",
            "cub200",
            "fedproto",
            {"strength": 0.1, "per_sample": False, "infer": "head", "lr": 1e-5},
        ),
        ("hgp", "cifar100", "fisheravg", {"fisher": "weighted"}),
        *((name, "cifar100", "lwf", {"strength": 0.5}) for name in ("hgp", "pilora", "fppl")),
        ("hgp", "cifar100", "regmean", {"gamma": 0.5, "gamma_head": 0.5}),
        ("hgp", "cub200", "regmean", {"gamma": 0.1, "gamma_head": 0.1}),
        (
            "fppl",
            "cub200",
            "fppl",
            {
                "length": 20,
                "lr": 1e-3,
                "unify": 1.0,
                "temperature": 0.2,
                "server_lr": 1e-3,
                "server_batch": 128,
            },
        ),
        ("fppl", "cub200", "ewc", {"tune": "full", "lr": 1e-2, "lr_backbone": 1e-4}),
        ("fppl", "cub200", "codap", {"lr": 1e-3}),
        ("fppl", "cifar100", "glfc", {"lr": 1e-2, "lr_backbone": 1e-4, "memory": 200}),
        (
            "fcilpt",
            "cifar100",
            "fcilpt",
            {"lr": 0.03, "size": 10, "chosen": 5, "length": 5, "common_length": 5},
        ),
        (
            "fcilpt",
            "miniimagenet",
            "fcilpt",
            {"size": 19, "chosen": 4, "length": 6, "common_length": 5},
        ),
        (
            "fcilpt",
            "tinyimagenet",
            "fcilpt",
            {"size": 24, "chosen": 8, "length": 5, "common_length": 1},
        ),
        (
            "glfc",
            "cifar100",
            "glfc",
            {"memory": 2000, "threshold": 1.2, "inversion_steps": 250, "reconstructions": 20},
        ),
    ],
)
def test_hyperparameters_match_papers(
    protocol: str, dataset: str, method: str, expected: dict[str, Any]
) -> None:
    options = PROTOCOLS.get(protocol).options(method, dataset, 0.5)
    assert {k: options.get(k) for k in expected} == expected


@pytest.mark.parametrize(
    ("tasks", "joining", "rounds", "last"), [(5, 20, 20, 110), (10, 10, 10, 120), (20, 5, 10, 125)]
)
def test_fcilpt_clients_depend_on_task_count(
    tasks: int, joining: int, rounds: int, last: int
) -> None:
    settings = Settings.for_dataset("cifar100", protocol="fcilpt", tasks=tasks)
    assert (
        settings.joining,
        settings.rounds,
        settings.clients + settings.joining * (tasks - 1),
    ) == (
        joining,
        rounds,
        last,
    )


@pytest.mark.parametrize(("tasks", "rounds"), [("10", 20), ("20", 10), ("50,10,10,10,10,10", 33)])
def test_fppl_rounds_depend_on_task_count(tasks: str, rounds: int) -> None:
    assert Settings.for_dataset("cifar100", protocol="fppl", tasks=tasks).rounds == rounds


def test_protocols_have_dataset_specific_values() -> None:
    """Check values that a protocol has only on some data sets.

    FCILPT stores Mini-ImageNet at 224 pixels. FPPL has IID only on CIFAR-100 and several betas
    only on the other data sets.
    """
    sizes = {
        d: Settings.for_dataset(d, protocol="fcilpt").stored_size
        for d in ("miniimagenet", "tinyimagenet", "cifar100")
    }
    assert sizes == {"miniimagenet": 224, "tinyimagenet": None, "cifar100": None}
    splits = {
        d: [s.partition(",")[0] for s in specs]
        for d, specs in PROTOCOLS.get("fppl").partitions.items()
    }
    betas = [f"dirichlet:{b}" for b in (1, 0.5, 0.1, 0.05, 0.01)]
    assert splits == {"imagenet_r": betas, "cub200": betas, "cifar100": ["dirichlet:0.5", "iid"]}
