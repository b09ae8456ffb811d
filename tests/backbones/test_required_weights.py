"""Test weights that a run needs: downloads, the hub cache and files."""

from pathlib import Path

import pytest
from huggingface_hub import constants

from fczoo.backbones.weights import download_megabytes, weights_needed, weights_to_download

TINY = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide an empty cache of the hub's client."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def write_cached_file(hub: Path, name: str, file: str) -> None:
    """Write a file into the cache as the hub's client does.

    Args:
        hub: The cache.
        name: Name of the model.
        file: Name of its file.
    """
    folder = hub / f"models--timm--{name}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "snapshots" / "abc" / file).write_bytes(b"weights")


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("vit_nano_32", ""),
        ("weights.safetensors", ""),
        (f"{TINY}:weights.safetensors", ""),
        (TINY, TINY),
        ("vit_tiny_patch16_224", TINY),  # timm's default weights
        ("vit_small_patch16_224.dino", "vit_small_patch16_224.dino"),
    ],
)
def test_only_names_need_download(hub: Path, spec: str, name: str) -> None:
    assert weights_to_download(spec) == name


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("spec", [TINY, "vit_tiny_patch16_224"])
def test_cached_weights_need_no_download(hub: Path, spec: str, file: str) -> None:
    write_cached_file(hub, TINY, file)
    assert weights_to_download(spec) == "" and weights_needed(spec) == ""
    assert weights_to_download("vit_small_patch16_224.dino") == "vit_small_patch16_224.dino"


def test_incomplete_download_is_ignored(hub: Path) -> None:
    write_cached_file(hub, TINY, "model.safetensors.incomplete")
    assert weights_to_download(TINY) == TINY


def test_advice_names_size_and_file(hub: Path) -> None:
    assert weights_needed(TINY) == (
        f"the weights {TINY} are not on this machine; --backbone vit_tiny_patch16_224 downloads "
        "them "
        "(23 MB), --backbone FILE reads a copy"
    )
    dino = "vit_small_patch16_224.dino"  # without its tag the name represents other weights
    assert f"--backbone {dino} downloads them (88 MB)" in weights_needed(dino)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        (TINY, 23),
        ("vit_small_patch8_224.dino", 88),
        ("vit_base_patch16_224.mae", 346),
        ("vit_tiny_patch16_224.augreg_in21k", 39),  # 9.7 million parameters with the head
        ("vit_base_patch16_224.augreg_in21k", 410),
        ("flexivit", None),
    ],
)
def test_download_size_follows_from_name(name: str, size: int | None) -> None:
    assert download_megabytes(name) == size
