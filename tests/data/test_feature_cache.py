"""Test frozen features on disk: identical values and damaged files."""

import logging
from pathlib import Path

import pytest
import torch

from fczoo.core.tree import sha256_of
from fczoo.data import feature_cache
from fczoo.data.feature_cache import FeatureFile, pixels_sha256
from fczoo.data.views import ImageStore
from fczoo.federation.benchmark import open_stores
from fczoo.testing.toy_benchmark import toy_backbone, toy_stream

ALL = torch.arange(70)


@pytest.fixture(autouse=True)
def feature_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FCZOO_HOME", str(tmp_path))
    return tmp_path / "cache" / "features"


def store(test_crop: float = 1.0) -> ImageStore:
    return next(open_stores([toy_stream().train], toy_backbone(), test_crop))


def fail_if_called(*_: object) -> None:
    raise AssertionError("the backbone is asked again")


def test_stored_features_are_reused(feature_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = ImageStore(toy_stream().train, toy_backbone()).query(ALL)
    first = store()
    first.query(ALL[:5])
    assert not feature_folder.exists()  # written once all images have features
    assert torch.equal(first.query(ALL), plain)
    assert [file.suffix for file in feature_folder.iterdir()] == [".safetensors"]
    monkeypatch.setattr(ImageStore, "_compute", fail_if_called)
    assert torch.equal(store().query(ALL), plain)
    assert torch.equal(first.with_labels(toy_stream().train.labels[::-1].copy()).query(ALL), plain)


def test_feature_file_depends_on_view_backbone_and_pixels(
    feature_folder: Path,
) -> None:
    store().query(ALL)
    store(0.5).query(ALL)
    backbone = toy_backbone().to(dtype=torch.float32)
    next(open_stores([toy_stream().train], backbone, 1.0)).query(ALL)
    pixels = toy_stream().train.pixels.copy()
    pixels[0, 0, 0, 0] ^= 1
    next(open_stores([toy_stream().train._replace(pixels=pixels)], toy_backbone(), 1.0)).query(ALL)
    assert len(list(feature_folder.iterdir())) == 4


def test_hashes_depend_on_pixels_and_weights() -> None:
    pixels, weights = toy_stream().train.pixels, toy_backbone().weights
    assert pixels_sha256(pixels) == pixels_sha256(pixels.copy()) != pixels_sha256(pixels[:-1])
    new_weights = {**weights, "norm.bias": weights["norm.bias"] + 1e-12}
    assert (
        sha256_of(weights) == sha256_of(dict(reversed(weights.items()))) != sha256_of(new_weights)
    )


@pytest.mark.parametrize("harm", ["cut short", "one bit", "nothing", "foreign"])
def test_damaged_feature_file_is_recomputed(harm: str, feature_folder: Path, caplog) -> None:
    reference = store().query(ALL)
    (file,) = feature_folder.iterdir()
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    contents = {
        "cut short": bytes(content[:-9]),
        "one bit": bytes(content),
        "nothing": b"",
        "foreign": b"no features at all, and longer than a header",
    }
    file.write_bytes(contents[harm])
    with caplog.at_level(logging.WARNING):
        assert torch.equal(store().query(ALL), reference)
    assert "is damaged or was not written by fczoo" in caplog.text
    caplog.clear()
    store().query(ALL)
    assert not caplog.text


def test_feature_file_of_other_key_is_rejected(feature_folder: Path, caplog) -> None:
    first, second = FeatureFile({"a": 1}), FeatureFile({"a": 2})
    first.save(torch.ones(3, 2))
    second.path.write_bytes(first.path.read_bytes())
    assert second.load() is None and "is damaged" in caplog.text


def test_least_recently_used_file_is_removed(
    feature_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [FeatureFile({"number": i}) for i in range(3)]
    for age, file in enumerate(files[:2]):
        file.save(torch.ones(100, 10))
        feature_cache.os.utime(file.path, (1000 + age, 1000 + age))
    assert files[0].load() is not None  # now the second is the oldest
    monkeypatch.setattr(feature_cache, "MAX_CACHE_BYTES", 10_000)
    files[2].save(torch.ones(100, 10))
    assert [file.path.exists() for file in files] == [True, False, True]
    monkeypatch.setattr(feature_cache, "MAX_CACHE_BYTES", 100)
    FeatureFile({"number": 9}).save(torch.ones(100, 10))
    assert not FeatureFile({"number": 9}).path.exists()


def test_unwritable_cache_is_warning(feature_folder: Path, caplog) -> None:
    feature_folder.parent.mkdir(parents=True)
    feature_folder.write_text("no folder")
    reference = ImageStore(toy_stream().train, toy_backbone()).query(ALL)
    assert torch.equal(store().query(ALL), reference)
    assert "cannot cache features" in caplog.text
