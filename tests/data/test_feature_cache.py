"""Frozen features on disk: the same bits, and a damaged file is never trusted."""

import logging
from pathlib import Path

import pytest
import torch

from fczoo.core.tree import sha256_of
from fczoo.data import feature_cache
from fczoo.data.feature_cache import FeatureFile, pixels_sha256
from fczoo.data.views import ImageStore
from fczoo.federation.benchmark import open_stores
from fczoo.testing.world import toy_backbone, toy_stream

ALL = torch.arange(70)


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FCZOO_HOME", str(tmp_path))
    return tmp_path / "cache" / "features"


def store(test_crop: float = 1.0) -> ImageStore:
    return next(open_stores([toy_stream().train], toy_backbone(), test_crop))


def never(*_: object) -> None:
    raise AssertionError("the backbone is asked again")


def test_another_process_starts_from_what_was_kept(
    own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = ImageStore(toy_stream().train, toy_backbone()).query(ALL)
    first = store()
    first.query(ALL[:5])
    assert not own_home.exists()  # only when the last image has its feature
    assert torch.equal(first.query(ALL), plain)
    assert [file.suffix for file in own_home.iterdir()] == [".safetensors"]
    monkeypatch.setattr(ImageStore, "_compute", never)
    assert torch.equal(store().query(ALL), plain)
    assert torch.equal(first.with_labels(toy_stream().train.labels[::-1].copy()).query(ALL), plain)


def test_another_view_other_weights_and_other_pixels_have_a_file_of_their_own(
    own_home: Path,
) -> None:
    store().query(ALL)
    store(0.5).query(ALL)
    backbone = toy_backbone().to(dtype=torch.float32)
    next(open_stores([toy_stream().train], backbone, 1.0)).query(ALL)
    pixels = toy_stream().train.pixels.copy()
    pixels[0, 0, 0, 0] ^= 1
    next(open_stores([toy_stream().train._replace(pixels=pixels)], toy_backbone(), 1.0)).query(ALL)
    assert len(list(own_home.iterdir())) == 4


def test_hashes_tell_what_differs() -> None:
    pixels, weights = toy_stream().train.pixels, toy_backbone().weights
    assert pixels_sha256(pixels) == pixels_sha256(pixels.copy()) != pixels_sha256(pixels[:-1])
    new_weights = {**weights, "norm.bias": weights["norm.bias"] + 1e-12}
    assert (
        sha256_of(weights) == sha256_of(dict(reversed(weights.items()))) != sha256_of(new_weights)
    )


@pytest.mark.parametrize("harm", ["cut short", "one bit", "nothing", "foreign"])
def test_a_file_that_is_not_sound_is_computed_anew(harm: str, own_home: Path, caplog) -> None:
    reference = store().query(ALL)
    (file,) = own_home.iterdir()
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
    assert "is damaged or not a file of fczoo" in caplog.text
    caplog.clear()
    store().query(ALL)
    assert not caplog.text


def test_features_of_another_key_are_not_taken_under_a_copied_name(own_home: Path, caplog) -> None:
    first, second = FeatureFile({"a": 1}), FeatureFile({"a": 2})
    first.save(torch.ones(3, 2))
    second.path.write_bytes(first.path.read_bytes())
    assert second.load() is None and "is damaged" in caplog.text


def test_what_was_unused_for_longest_makes_room(
    own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [FeatureFile({"number": i}) for i in range(3)]
    for age, file in enumerate(files[:2]):
        file.save(torch.ones(100, 10))
        feature_cache.os.utime(file.path, (1000 + age, 1000 + age))
    assert files[0].load() is not None  # now the second is the oldest
    monkeypatch.setattr(feature_cache, "LARGEST", 10_000)
    files[2].save(torch.ones(100, 10))
    assert [file.path.exists() for file in files] == [True, False, True]
    monkeypatch.setattr(feature_cache, "LARGEST", 100)
    FeatureFile({"number": 9}).save(torch.ones(100, 10))
    assert not FeatureFile({"number": 9}).path.exists()


def test_a_disk_that_takes_nothing_costs_a_warning(own_home: Path, caplog) -> None:
    own_home.parent.mkdir(parents=True)
    own_home.write_text("no folder")
    reference = ImageStore(toy_stream().train, toy_backbone()).query(ALL)
    assert torch.equal(store().query(ALL), reference)
    assert "features are not kept" in caplog.text
