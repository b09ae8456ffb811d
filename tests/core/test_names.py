"""Names are matched without regard to case, ``-`` and ``_``; the registered spelling is kept."""

from pathlib import Path

import pytest

from fczoo import FczooError, Settings, create_method
from fczoo.backbones.weights import split_spec
from fczoo.core.names import fold, match
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
def test_fold(word: str, folded: str) -> None:
    assert fold(word) == folded


def test_match_prefers_the_exact_name() -> None:
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
def test_registries_match_other_spellings(registry: Registry, word: str, name: str) -> None:
    assert registry.find(word) == registry.canonical_name(word) == name
    assert registry.get(word) is registry.get(name)
    assert registry.about(word) == registry.about(name)
    assert registry.options(word) == registry.options(name)


@pytest.mark.parametrize("registry", REGISTRIES, ids=lambda registry: registry.decorator)
def test_every_name_has_a_spelling_of_its_own(registry: Registry) -> None:
    assert len({fold(name) for name in registry.names()}) == len(registry.names())


def test_unknown_names_have_no_spelling() -> None:
    assert METHODS.find("no such method") is None
    with pytest.raises(FczooError, match="no method is called 'HPG'; did you mean hgp"):
        METHODS.canonical_name("HPG")


def test_two_names_that_differ_only_in_case_are_refused() -> None:
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


def test_names_of_two_source_files_that_differ_only_in_case_are_refused(
    tmp_path, monkeypatch
) -> None:
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


def test_settings_keep_the_registered_spelling() -> None:
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
def test_settings_leave_names_of_files_alone(field: dict) -> None:
    settings = Settings.for_dataset("digits", **field)
    assert {name: getattr(settings, name) for name in field} == field


def test_a_backbone_of_a_file_keeps_the_file() -> None:
    assert Settings(backbone="ViT-Nano-32:My/File.pth").backbone == "vit_nano_32:My/File.pth"


def test_weights_are_found_in_any_spelling_of_a_backbone() -> None:
    assert split_spec("VIT-Nano-32") == ("vit_nano_32", None)
    assert split_spec("ViT-Tiny-Patch16_224:A/B.pth") == ("vit_tiny_patch16_224", Path("A/B.pth"))
    assert split_spec("A/ViT.pth") == ("", Path("A/ViT.pth"))


def test_settings_keep_images_that_were_handed_over() -> None:
    assert Settings(dataset="My-Own_Images").dataset == "My-Own_Images"


def test_methods_take_the_values_of_a_data_set_however_it_is_spelled() -> None:
    method = create_method("PILoRA", "Tiny-ImageNet", LR_LoRA="1e-4")
    assert method.name == "pilora"
    assert (method.lr_lora, method.lr_prototype) == (1e-4, 5e-3)


def test_specs_match_names_and_fields() -> None:
    assert make_aggregator("Trimmed-Mean:2") == make_aggregator("trimmed_mean:2")
    assert PARTITIONERS.create("DIRICHLET:Beta=0.3") == PARTITIONERS.create("dirichlet:beta=0.3")


def test_options_that_fold_to_one_field_are_refused() -> None:
    with pytest.raises(
        FczooError, match="hgp has 'lr' and 'LR', which are one option; leave one out"
    ):
        create_method("hgp", lr=0.1, LR=0.2)


def test_library_bench_matches_names() -> None:
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


def test_nearest_looks_past_case_and_dashes() -> None:
    assert nearest("CIFAR_1000", ["cifar10", "cifar100", "digits"]).startswith(
        "did you mean cifar100"
    )
    assert nearest("learning-rate", ["learning_rates", "rank"]) == "did you mean learning_rates?"


def test_nearest_finds_parts_of_names() -> None:
    names = ["alpha", "imagenet_subset", "prototype_pool", "prototype_reweight"]
    assert nearest("prototype", names) == "did you mean prototype_pool, prototype_reweight?"


def test_a_list_of_names_is_not_cut_before_the_likely_ones() -> None:
    names = [f"a{i:02}" for i in range(30)] + ["zebra_crossing"]
    assert nearest("zqcrqq", names).startswith("known: zebra_crossing, a00, a01")
    assert nearest("qqqq", names).endswith(", ... (11 more)")
    assert nearest("", sorted(names)).startswith("known: a00, a01")
