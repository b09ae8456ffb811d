"""Notes on pre-training of the backbone with the classes of a run, in every output."""

import shutil
from importlib.resources import files
from pathlib import Path

import pytest
from click.testing import CliRunner
from huggingface_hub import constants

from fczoo import FczooError, Settings
from fczoo.backbones.pretraining_overlap import (
    CLASSES,
    TITLES,
    contamination,
    identify_weights,
    pretraining_sets,
)
from fczoo.cli.app import main
from fczoo.core.registry import DATASETS
from fczoo.federation.benchmark import require_weights
from helpers_runs import write_run

TI = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
NANO = "vit_nano_32 was pre-trained on Tiny-ImageNet, with labels of"
MILD = "weights were pre-trained on images of {}, as in the papers"
STRONG = f"{NANO} these classes"


@pytest.mark.parametrize(
    ("dataset", "backbone", "note"),
    [
        ("tinyimagenet", "vit_nano_32", STRONG),
        (
            "miniimagenet",
            "vit_nano_32",
            f"{NANO} some of these classes",
        ),
        (
            "cifar100",
            "vit_nano_32",
            f"{NANO} classes similar to some of these",
        ),
        ("digits", "vit_nano_32", ""),
        ("cub200", "vit_nano_32", ""),
        ("imagefolder", "vit_nano_32", ""),
        ("tinyimagenet", TI, f"ImageNet-21k and ImageNet-1k {MILD.format('these classes')}"),
        ("imagenet_r", "vit_small_patch16_224.dino", f"ImageNet-1k {MILD.format('these classes')}"),
        (
            "imagenet_a",
            "deit_tiny_patch16_224.fb_in1k",
            f"ImageNet-1k {MILD.format('these classes')}",
        ),
        (
            "cub200",
            "vit_base_patch16_224.mae",
            f"ImageNet-1k {MILD.format('some of these classes')}",
        ),
        (
            "cub200",
            "vit_base_patch16_224.orig_in21k",
            f"ImageNet-21k {MILD.format('some of these classes')}",
        ),
        ("eurosat", TI, ""),
        ("tinyimagenet", "", ""),
        ("no such set", TI, ""),
    ],
)
def test_note_depends_on_dataset_and_backbone(dataset: str, backbone: str, note: str) -> None:
    assert contamination(dataset, backbone) == note


@pytest.mark.parametrize(
    ("spec", "sha256", "name"),
    [
        ("vit_nano_32", "b" * 64, "vit_nano_32"),
        ("vit_nano_32.safetensors", "b" * 64, "vit_nano_32"),
        (
            "mine.pth",
            "3ffadaa2e488f0de67e1f4459d5a303deca3de69e44e52619c0b0848d99d5c14",
            "vit_nano_32",
        ),
        ("mine.pth", "b" * 64, ""),
        ("vit_nano_32:mine.pth", "b" * 64, ""),  # names only the architecture, not the weights
        ("vit_nano_32:mine", "b" * 64, ""),  # as stored by a run that read it from a folder
        (f"{TI}:mine", "b" * 64, TI),
        (f"{TI}.safetensors", "b" * 64, TI),
        (f"{TI}:mine.pth", "b" * 64, TI),
        ("vit_tiny_patch16_224", "b" * 64, TI),
        ("vit_tiny_patch16_224:mine.pth", "b" * 64, ""),
    ],
)
def test_weights_are_identified_by_hash_file_or_name(spec: str, sha256: str, name: str) -> None:
    assert identify_weights(spec, sha256) == name


def test_datasets_declare_known_pretraining_sets() -> None:
    for name in DATASETS.names("fczoo.datasets"):
        overlaps = DATASETS.get(name).overlaps
        assert overlaps.keys() <= TITLES.keys() and set(overlaps.values()) <= CLASSES.keys(), name


def test_image_text_pretraining_has_no_note() -> None:
    clip = "vit_base_patch16_clip_224.openai"
    assert pretraining_sets(clip) == ("openai",)
    assert contamination("imagenet_r", clip) == ""


@pytest.mark.parametrize(
    "dataset", ["tinyimagenet", "miniimagenet", "imagenet_r", "imagenet_a", "imagenet_subset"]
)
def test_quick_uses_imagenet_weights_on_overlapping_datasets(dataset: str) -> None:
    s = Settings.for_dataset(dataset, protocol="quick")
    assert (s.backbone, s.image_size, s.train_per_class, s.test_per_class) == (TI, 64, 10, 10)


def test_quick_keeps_bundled_backbone_on_other_datasets() -> None:
    overlaps = {"tinyimagenet", "miniimagenet", "imagenet_r", "imagenet_a", "imagenet_subset"}
    for dataset in set(DATASETS.names("fczoo.datasets")) - overlaps:
        s = Settings.for_dataset(dataset, protocol="quick")
        assert (s.backbone, s.image_size) == ("vit_nano_32", None)


def test_quick_rejects_missing_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(FczooError) as caught:
        require_weights(Settings.for_dataset("tinyimagenet", protocol="quick"))
    assert str(caught.value) == (
        f"protocol quick uses {TI} on tinyimagenet (fczoo: the bundled vit_nano_32 was trained "
        f"with labels of these classes); the weights {TI} are not on this machine; --backbone "
        "vit_tiny_patch16_224 downloads them (23 MB), or give a copy as --backbone FILE"
    )
    for backbone in ("vit_nano_32", "vit_tiny_patch16_224", str(tmp_path / "weights.safetensors")):
        require_weights(Settings.for_dataset("tinyimagenet", protocol="quick", backbone=backbone))
    require_weights(
        Settings.for_dataset("cifar100", protocol="hgp")
    )  # the user asked for its backbone


def test_quick_checks_weights_before_loading_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    write_tiny_imagenet(tmp_path / "data")
    words = ["--dataset", "tinyimagenet", "--data-root", str(tmp_path / "data"), "--device", "cpu"]
    result = CliRunner().invoke(
        main, ["bench", "--methods", "fedncm", *words, "--out", str(tmp_path / "out")]
    )
    assert result.exit_code == 1 and result.stdout == ""
    assert result.stderr.startswith(f"Error: protocol quick uses {TI} on tinyimagenet (")
    assert result.stderr.count("\n") == 1 and "decoding" not in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.fixture
def old_folder(tmp_path: Path) -> Path:
    """Write a run folder as older versions did, without a note on pre-training."""
    return write_run(tmp_path / "run", {"fedncm": {0: 50.0}}, dataset="tinyimagenet")


@pytest.mark.parametrize("style", ["text", "markdown", "latex", "csv", "json"])
def test_report_of_old_folder_has_note(old_folder: Path, style: str) -> None:
    result = CliRunner().invoke(main, ["report", str(old_folder), "--format", style])
    note = STRONG.replace("_", r"\_") if style == "latex" else STRONG
    assert result.exit_code == 0 and note in result.output.replace("\n", " ")


def test_page_and_archive_have_note(old_folder: Path, tmp_path: Path) -> None:
    page, archive = tmp_path / "page.html", tmp_path / "runs.csv"
    for words in (["--html", str(page)], ["--archive", str(archive)]):
        assert CliRunner().invoke(main, ["report", str(old_folder), *words]).exit_code == 0
    assert STRONG in page.read_text(encoding="utf-8")
    assert STRONG in archive.read_text(encoding="utf-8")
    assert STRONG in CliRunner().invoke(main, ["report", str(archive)]).output


def test_run_writes_note_to_screen_log_and_summaries(tmp_path: Path) -> None:
    weights = tmp_path / "mine.safetensors"
    shutil.copy(str(files("fczoo") / "assets" / "vit_nano_32.safetensors"), weights)
    write_tiny_imagenet(tmp_path / "data")
    words = [
        "--dataset",
        "tinyimagenet",
        "--data-root",
        str(tmp_path / "data"),
        "--backbone",
        str(weights),
    ]
    small = ["--image-size", "32", "--tasks", "2", "--clients", "2", "--partition", "iid"]
    out = tmp_path / "out"
    result = CliRunner().invoke(
        main, ["bench", "--methods", "fedncm", *words, *small, "--out", str(out)]
    )
    assert result.exit_code == 0, result.output
    assert f"tinyimagenet: {STRONG}" in result.stderr and STRONG in result.stdout
    for name in ("log.txt", "summary.json", "summary.csv", "summary.md"):
        assert STRONG in (out / name).read_text(encoding="utf-8"), name
    assert "vit_nano_32 at 32 px (" in result.stdout
    assert "10 per class)" in result.stdout


def write_tiny_imagenet(root: Path) -> None:
    """Write two classes of four images each in the layout of Tiny-ImageNet."""
    from PIL import Image

    top, notes = root / "tiny-imagenet-200", []
    (top / "val" / "images").mkdir(parents=True)
    for number, name in enumerate(("n01443537", "n01629819")):
        (top / "train" / name / "images").mkdir(parents=True)
        for i in range(4):
            picture = Image.new("RGB", (64, 64), (60 * i, 200 * number, 30))
            picture.save(top / "train" / name / "images" / f"{name}_{i}.JPEG")
        picture.save(top / "val" / "images" / f"val_{number}.JPEG")
        notes.append(f"val_{number}.JPEG\t{name}\t0\t0\t62\t62")
    (top / "val" / "val_annotations.txt").write_text("\n".join(notes) + "\n")
    (top / "words.txt").write_text("n01443537\tgoldfish\nn01629819\tsalamander\n")
