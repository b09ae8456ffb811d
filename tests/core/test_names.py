"""Test that names match without regard to case, ``-`` and ``_``."""

from pathlib import Path

import pytest

from fczoo import FczooError, Settings, create_method
from fczoo.backbones.weights import split_spec
from fczoo.core.names import fold, join_first_names, match, shorten_list
from fczoo.core.options import nearest
from fczoo.core.registry import (
    AGGREGATORS,
    ATTACKS,
    DATASETS,
    LOCAL_TRAINING,
    MERGES,
    METHODS,
    PARTITIONERS,
    Registry,
    make_aggregator,
)
from fczoo.protocols.registry import PROTOCOLS, RELEASES
from fczoo.runner.api import bench

REGISTRIES = (
    METHODS,
    DATASETS,
    PARTITIONERS,
    AGGREGATORS,
    MERGES,
    ATTACKS,
    LOCAL_TRAINING,
    PROTOCOLS,
    RELEASES,
)


@pytest.mark.parametrize(
    ("word", "folded"),
    [("PILoRA", "pilora"), ("tiny-imagenet", "tinyimagenet"), ("mini_ImageNet", "miniimagenet")],
)
def test_fold_ignores_case_and_separators(word: str, folded: str) -> None:
    assert fold(word) == folded


def test_match_prefers_exact_name() -> None:
    assert match("A", ["a", "A"]) == "A"
    assert match("multi-Krum", ["krum", "multi_krum"]) == "multi_krum"
    assert match("multikrumm", ["krum", "multi_krum"]) is None


@pytest.mark.parametrize(
    ("registry", "word", "name"),
    [
        (METHODS, "PILoRA", "pilora"),
        (METHODS, "HGP", "hgp"),
        (METHODS, "Fed-CPrompt", "fedcprompt"),
        (DATASETS, "CIFAR-100", "cifar100"),
        (DATASETS, "tiny-imagenet", "tinyimagenet"),
        (DATASETS, "mini_ImageNet", "miniimagenet"),
        (DATASETS, "imagenet-r", "imagenet_r"),
        (PARTITIONERS, "IID", "iid"),
        (AGGREGATORS, "Trimmed-Mean", "trimmed_mean"),
        (MERGES, "prototype-pool", "prototype_pool"),
        (ATTACKS, "label_flip", "label-flip"),
        (LOCAL_TRAINING, "FedProx", "fedprox"),
        (PROTOCOLS, "FCILPT", "fcilpt"),
        (RELEASES, "fed_mammoth", "fed-mammoth"),
    ],
)
def test_registries_accept_other_spellings(registry: Registry, word: str, name: str) -> None:
    assert registry.find(word) == registry.canonical_name(word) == name
    assert registry.get(word) is registry.get(name)
    assert registry.about(word) == registry.about(name)
    assert registry.options(word) == registry.options(name)


@pytest.mark.parametrize("registry", REGISTRIES, ids=lambda registry: registry.decorator)
def test_folded_names_are_unique(registry: Registry) -> None:
    assert len({fold(name) for name in registry.names()}) == len(registry.names())


def test_unknown_name_is_rejected() -> None:
    assert METHODS.find("no such method") is None
    with pytest.raises(FczooError, match="no method is called 'HPG'; did you mean hgp"):
        METHODS.canonical_name("HPG")


def test_equivalent_names_are_rejected() -> None:
    registry: Registry = Registry("thing", "register_thing")
    first = type("First", (), {"__module__": "here"})
    second = type("Second", (), {"__module__": "there"})
    registry.register("tiny_net")(first)
    complaint = (
        "thing 'Tiny-Net' in there and thing 'tiny_net' in here differ only in case, - or _; "
        "rename one"
    )
    with pytest.raises(FczooError, match=complaint):
        registry.register("Tiny-Net")(second)
    assert registry.names() == ["tiny_net"]


def test_equivalent_names_in_two_files_are_rejected(tmp_path, monkeypatch) -> None:
    package = tmp_path / "alike_things"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text('@register_thing("net_a")\nclass A:\n    """A."""\n')
    (package / "b.py").write_text('@register_thing("NetA")\nclass B:\n    """B."""\n')
    monkeypatch.syspath_prepend(tmp_path)
    registry: Registry = Registry("thing", "register_thing", "alike_things")
    with pytest.raises(
        FczooError, match=r"'NetA' in alike_things.b and thing 'net_a' in alike_things.a"
    ):
        registry.names()


# ---------------------------------------------------------------- settings and the library


def test_settings_store_registered_spelling() -> None:
    settings = Settings.for_dataset(
        "CIFAR100",
        protocol="HGP",
        as_released="Fed_Mammoth",
        partition="Dirichlet:0.1",
        aggregator="Trimmed-Mean:2",
        attack="Label_Flip",
        local="FedProx:0.1",
        augment="Flip",
        backbone="VIT-Tiny_patch16_224",
    )
    assert settings.dataset == "cifar100"
    assert (settings.protocol, settings.as_released) == ("hgp", "fed-mammoth")
    assert (settings.partition, settings.aggregator) == ("dirichlet:0.1", "trimmed_mean:2")
    assert (settings.attack, settings.local, settings.augment) == (
        "label-flip",
        "fedprox:0.1",
        "flip",
    )
    assert settings.backbone == "vit_tiny_patch16_224"


@pytest.mark.parametrize(
    "field",
    [{"partition": "file:Split.json"}, {"backbone": "Weights/ViT.pth"}, {"backbone": "Net-A.pth"}],
)
def test_settings_keep_file_names(field: dict) -> None:
    settings = Settings.for_dataset("digits", **field)
    assert {name: getattr(settings, name) for name in field} == field


def test_backbone_spec_keeps_file_name() -> None:
    assert Settings(backbone="ViT-Nano-32:My/File.pth").backbone == "vit_nano_32:My/File.pth"


def test_split_spec_accepts_any_spelling_of_backbone() -> None:
    assert split_spec("VIT-Nano-32") == ("vit_nano_32", None)
    assert split_spec("ViT-Tiny-Patch16_224:A/B.pth") == ("vit_tiny_patch16_224", Path("A/B.pth"))
    assert split_spec("A/ViT.pth") == ("", Path("A/ViT.pth"))


def test_settings_keep_name_of_unregistered_data_set() -> None:
    assert Settings(dataset="My-Own_Images").dataset == "My-Own_Images"


def test_data_set_values_apply_in_any_spelling() -> None:
    method = create_method("PILoRA", "Tiny-ImageNet", LR_LoRA="1e-4")
    assert method.name == "pilora"
    assert (method.lr_lora, method.lr_prototype) == (1e-4, 5e-3)


def test_specs_accept_any_spelling() -> None:
    assert make_aggregator("Trimmed-Mean:2") == make_aggregator("trimmed_mean:2")
    assert PARTITIONERS.create("DIRICHLET:Beta=0.3") == PARTITIONERS.create("dirichlet:beta=0.3")


def test_equivalent_options_are_rejected() -> None:
    with pytest.raises(FczooError, match="hgp has 'lr' and 'LR', the same option; leave one out"):
        create_method("hgp", lr=0.1, LR=0.2)


def test_library_bench_accepts_any_spelling() -> None:
    tiny = {
        "train_per_class": 4,
        "test_per_class": 2,
        "rounds": 1,
        "epochs": 1,
        "tasks": 2,
        "clients": 2,
    }
    results = bench(["FedNCM"], dataset="Digits", options={"FEDNCM": {}}, **tiny)
    assert repr(results) == "<Results of 1 run: fedncm on digits>"
    assert len(results["FedNCM"]) == 1


# ---------------------------------------------------------------- advice


def test_nearest_ignores_case_and_dashes() -> None:
    assert nearest("CIFAR_1000", ["cifar10", "cifar100", "digits"]).startswith(
        "did you mean cifar100"
    )
    assert nearest("learning-rate", ["learning_rates", "rank"]) == "did you mean learning_rates?"


def test_nearest_matches_parts_of_names() -> None:
    names = ["alpha", "imagenet_subset", "prototype_pool", "prototype_reweight"]
    assert nearest("prototype", names) == "did you mean prototype_pool, prototype_reweight?"


def test_nearest_lists_likely_names_first() -> None:
    names = [f"a{i:02}" for i in range(30)] + ["zebra_crossing"]
    assert nearest("zqcrqq", names).startswith("known: zebra_crossing, a00, a01")
    assert nearest("qqqq", names).endswith(", ... (11 more)")
    assert nearest("", sorted(names)).startswith("known: a00, a01")


def test_first_names_are_joined_with_number_of_others() -> None:
    names = ["a", "b", "c", "d", "e", "f"]
    assert join_first_names([]) == ""
    assert join_first_names(names[:5]) == "a, b, c, d, e"
    assert join_first_names(names) == "a, b, c, d, e and 1 more"
    assert join_first_names(names, 2, "; ") == "a; b and 4 more"


def test_shortened_list_ends_with_dots() -> None:
    assert shorten_list([], 2) == ""
    assert shorten_list(["a", "b"], 2) == "a, b"
    assert shorten_list(["a", "b", "c"], 2) == "a, b, ..."
