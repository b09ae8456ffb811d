"""Precedence of given values, protocol, data set and defaults."""

import logging
from typing import Any

import pytest

from fczoo import FczooError, Settings, create_method
from fczoo.cli.info import source_page
from fczoo.core.options import spaces
from fczoo.core.registry import DATASETS, METHODS
from fczoo.data.stream import make_tasks
from fczoo.protocols.registry import PROTOCOLS
from fczoo.protocols.stated_values import ValuesByBeta
from fczoo.reports.archive import read_archive
from fczoo.reports.run_config import configure_run
from helpers_results import QUICK

# trials of the first search; rows that a later search of four trials did not change name eight
WHOLE_EFFORT = 8

PAIRS = [
    (name, dataset)
    for name in PROTOCOLS.names("fczoo.")
    for dataset in PROTOCOLS.get(name).datasets
]


def tuned_values() -> dict[str, dict[str, Any]]:
    """Return the values of protocol quick that a search found, by method."""
    return {
        method: {name: s.value for name, s in statements.items() if s.chosen_for}
        for method, statements in PROTOCOLS.get("quick").methods.items()
        if any(s.chosen_for for s in statements.values())
    }


def test_given_settings_override_protocol_and_dataset() -> None:
    plain, protocol = (
        Settings.for_dataset("cifar100"),
        Settings.for_dataset("cifar100", protocol="pilora"),
    )
    assert (
        plain.rounds,
        protocol.rounds,
        Settings.for_dataset("cifar100", protocol="pilora", rounds=7).rounds,
    ) == (5, 30, 7)
    dino = "vit_base_patch16_224.dino"
    assert protocol.train_per_class == 400
    assert protocol.backbone == dino
    assert plain.backbone != dino
    explicit = Settings.for_dataset(
        "cifar100", protocol="pilora", backbone="vit_nano_32", partition="iid", mean=(0.1, 0.1, 0.1)
    )
    assert (explicit.backbone, explicit.partition, explicit.mean) == (
        "vit_nano_32",
        "iid",
        (0.1, 0.1, 0.1),
    )


@pytest.mark.parametrize(("name", "dataset"), PAIRS)
def test_protocol_tasks_fit_dataset_classes(name: str, dataset: str) -> None:
    settings = Settings.for_dataset(dataset, protocol=name)
    sizes = [
        task.size for task in make_tasks(dataset, DATASETS.get(dataset).classes, settings.tasks)
    ]
    assert (
        sizes == [20] * 9 + [16]
        if dataset == "cars196"
        else len(set(sizes)) == 1 and len(sizes) == settings.task_count
    )


def test_given_class_order_replaces_shuffled_order() -> None:
    assert Settings.for_dataset("cifar100", protocol="fppl").class_order_seed == 2023
    natural = Settings.for_dataset("cifar100", protocol="fppl", class_order="natural")
    assert (natural.class_order, natural.class_order_seed) == ("natural", None)


def test_method_options_are_layered() -> None:
    """Override a method's default by its data set, its protocol and the given value."""
    assert (create_method("pilora").lr_lora, create_method("pilora", "tinyimagenet").lr_lora) == (
        1e-5,
        5e-6,
    )
    settings = Settings.for_dataset("cifar100", protocol="hgp")
    hgp = configure_run("hgp", settings, {"spread": 2}).create_method()
    pilora = configure_run("pilora", settings, {}).create_method()
    assert (pilora.lr_lora, pilora.lr_prototype, hgp.spread, hgp.server_lr) == (
        1e-4,
        2e-2,
        2.0,
        0.01,
    )
    assert configure_run("pilora", settings, {"lr_lora": 1e-3}).options["lr_lora"] == 1e-3
    assert configure_run("pilora", Settings.for_dataset("cifar100"), {}).options["lr_lora"] == 1e-5


def test_missing_beta_column_uses_first_and_warns(caplog) -> None:
    columns = ValuesByBeta({1.0: 3, 0.5: 4})
    assert [columns.at(b) for b in (1.0, 0.5, 0.2, None)] == [3, 4, 3, 3]
    assert [columns.covers(b) for b in (1.0, 0.5, 0.2, None)] == [
        True,
        True,
        False,
        False,
    ]
    assert ValuesByBeta({1.0: 3, 0.5: 3}).covers(None)
    with caplog.at_level(logging.WARNING, logger="fczoo"):
        assert PROTOCOLS.get("hgp").options("hgp", "eurosat", 0.3)["lr"] == 1e-3
        assert (
            "states hgp.lr as 0.001 | 0.0003 | 0.0001 at beta 1.0 | 0.5 | 0.2; this run uses the first value"
            in caplog.text
        )
        caplog.clear()
        PROTOCOLS.get("hgp").options("hgp", "cifar100", None)
        assert not caplog.records


def test_unknown_dataset_or_protocol_is_rejected() -> None:
    assert PROTOCOLS.get("hgp").options("no such method", "cub200", 1.0) == {}
    with pytest.raises(FczooError, match="protocol glfc does not use digits; known"):
        PROTOCOLS.get("glfc").settings_on("digits")
    with pytest.raises(FczooError, match="no protocol is called 'hpg'; did you mean hgp"):
        Settings.for_dataset("digits", protocol="hpg")
    with pytest.raises(FczooError, match="protocol hgp does not use digits"):
        Settings.for_dataset("digits", protocol="hgp")


@pytest.mark.parametrize(("name", "dataset"), PAIRS)
def test_source_page_lists_every_value(name: str, dataset: str) -> None:
    cls, page = PROTOCOLS.get(name), " ".join(source_page(PROTOCOLS.get(name), dataset).split())
    for value in cls.settings_on(dataset).values():
        assert value.source.split()[-1] in page
    for field in cls.settings_on(dataset):
        assert f" {field} " in page
    for method in {*cls.methods, *cls.dataset_options.get(dataset, {})}:
        for field in cls.hyperparameters(method, dataset):
            assert f"{method} {field} " in page or f"{method} (not installed) {field} " in page
    assert dataset in source_page(PROTOCOLS.get(name), None)


def test_quick_on_digits_equals_no_protocol() -> None:
    plain, quick = Settings.for_dataset("digits"), Settings.for_dataset("digits", protocol="quick")
    assert {k: v for k, v in vars(plain).items() if k != "protocol"} == {
        k: v for k, v in vars(quick).items() if k != "protocol"
    }
    cifar = Settings.for_dataset("cifar100", protocol="quick")
    assert (cifar.train_per_class, cifar.tasks, cifar.clients) == (20, 10, 10)
    assert cifar.method_options("fedncm") == {}
    assert cifar.method_options("pilora")["head_tune"] is True
    assert cifar.method_options("fcilpt").items() >= {"head_init": "means", "pooled": "cls"}.items()
    assert not plain.method_options("fcilpt") and not quick.method_options("fcilpt")


@pytest.mark.parametrize("name", METHODS.names())
def test_quick_has_complete_tuned_options_per_method(name: str) -> None:
    """Set every searched option of a tuned method, or none.

    A method without rates keeps its defaults: a ridge tuned on 30 classes does not fit 100.
    """
    space, settings = spaces(METHODS.get(name)), Settings.for_dataset("cifar100", protocol="quick")
    tuned_options = tuned_values().get(name, {})
    if tuned_options:
        assert tuned_options.keys() == space.keys()
        assert any("lr" in option.split("_") for option in space)
    method = create_method(name, "cifar100", **settings.method_options(name))
    assert {option: getattr(method, option) for option in tuned_options} == tuned_options


def test_quick_initialises_heads_at_class_means_except_two() -> None:
    quick = Settings.for_dataset("cifar100", protocol="quick")
    starts = {name: quick.method_options(name).get("head_init") for name in METHODS.names()}
    assert {name for name, start in starts.items() if start == "zeros"} == {"joint", "ssil"}
    assert all(starts[name] == "means" for name in ("bic", "fedavg", "fppl", "hgp"))


def test_quick_values_match_archived_runs() -> None:
    """Compare the values of protocol quick with complete searches, to three digits."""
    run_options = {}
    for runs in read_archive(QUICK):
        (record,) = runs.records
        assert record.bench_file.tuned["trials"] >= WHOLE_EFFORT
        options = record.result.options
        run_options[record.method] = {
            name: round_to_three_digits(value) for name, value in options.items()
        }
    assert tuned_values().keys() == run_options.keys() and len(run_options) > 20
    for name, tuned_options in tuned_values().items():
        assert run_options[name].items() >= tuned_options.items(), name


def round_to_three_digits(value: object) -> object:
    return float(f"{value:.3g}") if isinstance(value, float) else value


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (
            "ccvr",
            {
                "gaussian": "pooled",
                "calibrate": "once",
                "covariance": "full",
                "calibrated": "all",
                "logit_norm": None,
            },
        ),
        ("fedproto", {"strength": 1, "per_sample": True, "infer": "ncm"}),
        ("fisheravg", {"fisher": "true"}),
        ("lwf", {"strength": 1, "temperature": 2, "distill_current": False}),
        ("regmean", {"gamma": 0.9, "gamma_head": 0.9, "view": "test"}),
    ],
)
def test_baseline_defaults_follow_their_papers(method: str, expected: dict[str, Any]) -> None:
    for dataset in ("digits", "cifar100", "cub200"):
        options = vars(create_method(method, dataset))
        assert {k: options[k] for k in expected} == expected, dataset


@pytest.mark.parametrize("source", [{"protocol": "hgp"}, {"as_released": "fed-mammoth"}])
def test_augmentation_matches_fed_mammoth_loaders(source: dict[str, str]) -> None:
    """Compare training view and test crop with the loaders at commit 09a9508."""
    loaders = {
        "cifar100": ("hgp", 0.875),
        "imagenet_r": ("hgp", 0.875),
        "imagenet_a": ("fppl", 0.875),
        "eurosat": ("hgp", 1.0),
        "cars196": ("flip", 1.0),
        "cub200": ("randomcrop", 0.875),
    }
    for dataset, view in loaders.items():
        settings = Settings.for_dataset(dataset, **source)
        assert (settings.augment, settings.test_crop) == view, dataset


def test_resize_mode_matches_papers() -> None:
    """Resize whole images for HGP and for FCILPT on Mini-ImageNet; crop the centre for others."""
    squash = {
        (name, dataset)
        for name, dataset in PAIRS
        if Settings.for_dataset(dataset, protocol=name).resize == "squash"
    }
    assert squash == {pair for pair in PAIRS if pair[0] == "hgp"} | {("fcilpt", "miniimagenet")}
    released = {
        name: Settings.for_dataset("imagenet_r", as_released=name).resize
        for name in ("fed-mammoth", "fppl", "pilora", "glfc", "coda")
    }
    assert {name for name, resize in released.items() if resize == "squash"} == {"fed-mammoth"}
