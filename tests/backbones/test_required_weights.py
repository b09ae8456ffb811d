"""Test weights that a run needs: downloads, the hub cache and files."""

from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import constants

from fczoo import FczooError
from fczoo.backbones.load import load_backbone
from fczoo.backbones.weights import (
    describe_missing_weights,
    download_megabytes,
    weights_to_download,
)

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
    assert weights_to_download(spec) == "" and describe_missing_weights(spec) == ""
    assert weights_to_download("vit_small_patch16_224.dino") == "vit_small_patch16_224.dino"


@pytest.mark.parametrize(
    ("spec", "file"),
    [("vit_nano_32:x", "x"), (f"{TINY}:x.h5", "x.h5"), (f"{TINY}:", "the text after the colon")],
)
@pytest.mark.parametrize("function", [weights_to_download, describe_missing_weights, load_backbone])
def test_file_without_suffix_of_weights_is_rejected(
    hub: Path, function: Callable[[str], object], spec: str, file: str
) -> None:
    with pytest.raises(FczooError) as caught:
        function(spec)
    message = str(caught.value)
    assert f"{spec} names no weight file: {file} must end with .safetensors or .npz" in message
    assert "\n" not in message


def test_incomplete_download_is_ignored(hub: Path) -> None:
    write_cached_file(hub, TINY, "model.safetensors.incomplete")
    assert weights_to_download(TINY) == TINY


def test_advice_names_size_and_file(hub: Path) -> None:
    assert describe_missing_weights(TINY) == (
        f"the weights {TINY} are not on this machine; --backbone vit_tiny_patch16_224 downloads "
        "them (23 MB), or give a copy as --backbone FILE"
    )
    dino = "vit_small_patch16_224.dino"  # without its tag the name represents other weights
    assert f"--backbone {dino} downloads them (88 MB)" in describe_missing_weights(dino)


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
