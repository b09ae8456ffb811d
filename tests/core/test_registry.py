"""Test the registries, and the options of methods and runs."""

from dataclasses import dataclass
from importlib.metadata import EntryPoints, entry_points
from pathlib import Path

import pytest

from fczoo import FczooError, Settings, create_method, option
from fczoo.core import discovery
from fczoo.core.discovery import load_plugins, plugin_registrations
from fczoo.core.files import shorten
from fczoo.core.registry import AGGREGATORS, ATTACKS, DATASETS, METHODS, PARTITIONERS, Registry


@pytest.mark.parametrize(
    ("registry", "typo", "complaint"),
    [
        (METHODS, "pilra", "no method is called 'pilra'; did you mean pilora"),
        (METHODS, "", "no method is called ''; known: "),
        (DATASETS, "cifar1000", "no data set is called 'cifar1000'; did you mean cifar100"),
        (PARTITIONERS, "iidd", "no partitioner is called 'iidd'; did you mean iid"),
        (AGGREGATORS, "fedavgg", "no aggregator is called 'fedavgg'; did you mean fedavg"),
    ],
)
def test_unknown_name_suggests_nearest(registry: Registry, typo: str, complaint: str) -> None:
    with pytest.raises(FczooError) as caught:
        registry.get(typo)
    assert complaint in str(caught.value)


def test_names_are_discovered_and_sorted() -> None:
    assert {"fcilpt", "fedavg", "fedncm", "fppl", "hgp", "pilora"} <= set(METHODS.names())
    assert METHODS.names() == sorted(METHODS.names())
    assert set(METHODS.names("fczoo.baselines")) >= {"fedavg", "fedncm"}
    assert not {"fedavg", "fedncm"} & set(METHODS.names("fczoo.methods"))
    for registry in (METHODS, DATASETS, PARTITIONERS, AGGREGATORS):
        for name in registry.names():
            assert registry.get(name).name == name


def test_duplicate_name_is_rejected() -> None:
    registry = Registry("thing", "register_thing")
    first = type("First", (), {"__module__": "here"})
    second = type("Second", (), {"__module__": "there"})
    again = type("First", (), {"__module__": "here"})  # the same module, imported again
    assert registry.register("a")(first) is first and first.name == "a"
    with pytest.raises(
        FczooError, match="thing 'a' is defined twice, in here and in there; rename one"
    ):
        registry.register("a")(second)
    assert registry.get("a") is first
    registry.register("a")(again)
    assert registry.get("a") is again
    registry.register("b")(second)
    assert registry.names() == ["a", "b"] and registry.names("here") == ["a"]


def test_empty_registry_rejects_any_name() -> None:
    with pytest.raises(FczooError, match="no thing is called 'a'; known: none"):
        Registry("thing", "register_thing").get("a")


def test_plugins_are_scanned_once_per_search_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scans: list[str] = []

    def scan(group: str) -> EntryPoints:
        scans.append(group)
        return entry_points(group=group)

    monkeypatch.setattr(discovery, "entry_points", scan)
    monkeypatch.syspath_prepend(tmp_path / "first")
    for kind in ("method", "dataset"):
        Registry(kind, f"register_{kind}", f"fczoo.{kind}s").names()
    load_plugins()
    assert scans == ["fczoo.plugins"]
    folder = tmp_path / "second" / "late-1.dist-info"
    folder.mkdir(parents=True)
    (folder / "entry_points.txt").write_text("[fczoo.plugins]\nlate = late_plugin\n")
    (folder.parent / "late_plugin.py").write_text('@register_thing("late")\nclass Late: "It."\n')
    monkeypatch.syspath_prepend(folder.parent)
    assert [entry.name for entry in plugin_registrations("register_thing")] == ["late"]
    assert scans == ["fczoo.plugins"] * 2


def test_options_override_spec() -> None:
    @dataclass(frozen=True)
    class Knobs:
        rate: float = option(0.5, "a number")
        rank: int = option(4, "a whole number")
        sort: bool = option(True, "a switch")

    registry = Registry("thing", "register_thing")
    registry.register("knobs")(Knobs)
    assert registry.create("knobs:0.1").rate == 0.1
    assert registry.create("knobs:rank=3,sort=false", rate=1.5) == registry.create(
        "knobs:1.5,rank=3,sort=false"
    )
    assert registry.create("knobs:rank=3", rank=5).rank == 5


@pytest.mark.parametrize("end", ["", " ", ","])
@pytest.mark.parametrize(
    ("registry", "name", "valid_form"),
    [
        (PARTITIONERS, "dirichlet", "dirichlet:0.5"),
        (PARTITIONERS, "Dirichlet", "dirichlet:0.5"),
        (PARTITIONERS, "iid", "iid"),
        (ATTACKS, "scale", "scale:10"),
        (ATTACKS, "label-flip", "label-flip"),
        (AGGREGATORS, "trimmed_mean", "trimmed_mean:1"),
    ],
)
def test_empty_value_after_colon_is_rejected(
    registry: Registry, name: str, valid_form: str, end: str
) -> None:
    with pytest.raises(FczooError) as caught:
        registry.create(f"{name}:{end}")
    problem = f"{registry.kind} {f'{name}:{end}'!r} has no value after the colon"
    assert str(caught.value) == f"{problem}; write {valid_form}"
    assert registry.canonical(f"{name}:{end}") == f"{name}:{end}"  # no other spec in its place


# ---------------------------------------------------------------- methods and settings


@pytest.mark.parametrize(
    ("method", "dataset", "expected"),
    [
        ("pilora", None, {"lr_prototype": 2e-2, "lr_lora": 1e-5, "rank": 4}),
        ("pilora", "cifar100", {"lr_prototype": 2e-2, "lr_lora": 1e-5}),
        ("pilora", "tinyimagenet", {"lr_prototype": 5e-3, "lr_lora": 5e-6, "rank": 4}),
        ("hgp", "cub200", {"lr": 1e-1}),
        ("hgp", "eurosat", {"lr": 1e-3}),
        ("fcilpt", "cifar100", {"size": 10, "chosen": 5, "length": 5, "common_length": 5}),
        ("fcilpt", "miniimagenet", {"size": 19, "chosen": 4, "length": 6, "common_length": 5}),
        ("fcilpt", "tinyimagenet", {"size": 24, "chosen": 8, "length": 5, "common_length": 1}),
        (
            "fppl",
            "eurosat",
            {"lr": 1e-3, "length": 20},
        ),  # no values for this data set: the defaults
    ],
)
def test_methods_use_values_of_paper(method: str, dataset: str | None, expected: dict) -> None:
    instance = create_method(method, dataset)
    assert {k: getattr(instance, k) for k in expected} == expected


def test_options_override_data_set_values() -> None:
    method = create_method("pilora", "tinyimagenet", lr_lora="1e-4", blocks="0,2", merge="first")
    assert (method.lr_lora, method.lr_prototype, method.blocks, method.merge) == (
        1e-4,
        5e-3,
        (0, 2),
        "first",
    )


@pytest.mark.parametrize("name", METHODS.names("fczoo."))
def test_every_data_set_value_is_valid_option(name: str) -> None:
    for dataset in METHODS.get(name).dataset_options:
        assert create_method(name, dataset).name == name


@pytest.mark.parametrize(
    ("method", "options", "complaint"),
    [
        ("pilroa", {}, "did you mean pilora"),
        ("pilora", {"rnak": 8}, "pilora has no option 'rnak'; did you mean rank"),
        ("pilora", {"rank": 0}, "pilora.rank is 0; it must be at least 1"),
        ("pilora", {"temperature": 0}, "pilora.temperature is 0"),
        ("hgp", {"lr": 4e37}, "hgp.lr is 4e+37; it must be at most 1e+30"),
        ("fcilpt", {"size": 3}, "fcilpt.chosen is 5, more than the 3 prompts"),
        ("hgp", {"logit_norm": 0}, "hgp.logit_norm is 0"),
        ("fppl", {"fusion": "firm"}, "fppl.fusion is 'firm'; it must be soft | hard"),
    ],
)
def test_methods_reject_invalid_options(method: str, options: dict, complaint: str) -> None:
    with pytest.raises(FczooError) as caught:
        create_method(method, **options)
    assert complaint in str(caught.value)


def test_settings_use_defaults_of_data_set() -> None:
    settings = Settings.for_dataset("digits", rounds="7", clients=None, mean="0.1,0.2,0.3")
    defaults = DATASETS.get("digits").defaults
    assert (settings.rounds, settings.clients, settings.mean) == (
        7,
        defaults.clients,
        (0.1, 0.2, 0.3),
    )
    assert (settings.backbone, settings.partition) == (defaults.backbone, defaults.partition)
    assert Settings.for_dataset("cifar100").tasks == 10


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"rounds": 0}, "must be at least 1"),
        ({"participation": 1.5}, "must be a share up to 1 or a whole number"),
        ({"precision": "fp16"}, "must be fp32 | bf16 | fp64"),
        ({"batchsize": 3}, "did you mean batch_size"),
        ({"partition_seed": -1}, "must be at least 0"),
        ({"class_order_seed": -1}, "must be at least 0"),
    ],
)
def test_settings_reject_invalid_values(changes: dict, complaint: str) -> None:
    with pytest.raises(FczooError) as caught:
        Settings.for_dataset("digits", **changes)
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    ("word", "short"),
    [
        ("vit_nano_32", "vit_nano_32"),
        ("/a/b/c.safetensors", "c.safetensors"),
        ("vit:/a/c.npz", "vit:c.npz"),
        ("data/sets/", "sets"),
        (None, None),
    ],
)
def test_recorded_paths_have_no_folders(word, short):
    assert shorten(word) == short
