"""Test held-out images of data sets without a split, and ``fczoo data check``."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from fczoo import FczooError
from fczoo.core.registry import DATASETS
from fczoo.data.dataset import Official
from fczoo.data.folder_layout import choose_test_images
from fczoo.data.stream import make_stream
from fczoo.data.verify import verify
from helpers_datasets import IDS, eurosat, tinyimagenet


@pytest.fixture(autouse=True)
def fczoo_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FCZOO_HOME", str(tmp_path / "home"))


def test_one_fifth_of_each_class_is_held_out() -> None:
    rng = np.random.default_rng(0)
    sizes = (
        51 + rng.multinomial(30_000 - 200 * 51, rng.dirichlet([2] * 200))
    ).tolist()  # as many as ImageNet-R has
    folders = {f"c{i}": [f"c{i}/{j}.jpg" for j in range(n)] for i, n in enumerate(sizes)}
    test = choose_test_images(folders, 0)
    assert len(test) == 6_000
    counts = [sum(name in test for name in images) for images in folders.values()]
    assert all(abs(count - n / 5) < 1 for count, n in zip(counts, sizes, strict=True))
    reverse_folders = {name: images[::-1] for name, images in folders.items()}
    assert choose_test_images(reverse_folders, 0) == test != choose_test_images(folders, 1)


def test_held_out_split_is_fixed() -> None:
    assert sorted(
        choose_test_images({"a": [f"a/{i}.jpg" for i in range(10)], "b": ["b/0.jpg", "b/1.jpg"]}, 0)
    ) == ["a/3.jpg", "a/7.jpg", "b/1.jpg"]


def test_test_list_replaces_default_split(tmp_path: Path) -> None:
    eurosat(tmp_path)
    folder = tmp_path / "eurosat" / "2750"
    assert (
        DATASETS.get("eurosat")().load(tmp_path).split
        == make_stream("eurosat", tmp_path).split
        == "a fifth of every class by sha256, seed 0"
    )
    (folder / "test.txt").write_text("".join(f"Land{i}/Land{i}_5.jpg\n" for i in range(10)))
    assert (
        DATASETS.get("eurosat")().load(tmp_path).split
        == f"test.txt, sha256 {hashlib.sha256((folder / 'test.txt').read_bytes()).hexdigest()}"
    )
    data = DATASETS.get("eurosat")().load(tmp_path)
    assert data.test.names == tuple(f"Land{i}/Land{i}_5.jpg" for i in range(10))
    assert len(data.train.labels) == 50
    (folder / "test.txt").write_text("Land0/none.jpg\n")
    with pytest.raises(FczooError, match=r"test\.txt names Land0/none\.jpg, which is not in"):
        DATASETS.get("eurosat")().load(tmp_path)
    (folder / "test.txt").write_text("".join(f"Land4/Land4_{j}.jpg\n" for j in range(6)))
    with pytest.raises(FczooError, match=r"class Land4 in .* has no training image left"):
        DATASETS.get("eurosat")().load(tmp_path)


# ---------------------------------------------------------------- checks


def test_check_reports_missing_images(tmp_path: Path) -> None:
    tinyimagenet(tmp_path)
    table, wrong = verify("tinyimagenet", tmp_path)
    assert "100000" in table
    assert "400" in table
    assert "unreadable" in table
    assert wrong == ["400 training images, not 100000", "200 test images, not 10000"]


def test_check_reports_unreadable_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    eurosat(tmp_path)
    monkeypatch.setattr(DATASETS.get("eurosat"), "official", Official(48, 12))
    assert verify("eurosat", tmp_path)[1] == []
    broken = tmp_path / "eurosat" / "2750" / "Land2" / "Land2_3.jpg"
    broken.write_bytes(broken.read_bytes()[:100])
    table, wrong = verify("eurosat", tmp_path)
    assert wrong == ["1 unreadable file"]
    assert f"cannot read image {broken}" in table


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        ("annotations", "no file .*val_annotations.txt"),
        ("class", "names no class of"),
        ("images", "no image in"),
        ("train", "no folder .*train"),
    ],
)
def test_incomplete_tinyimagenet_is_rejected(harm: str, says: str, tmp_path: Path) -> None:
    tinyimagenet(tmp_path)
    folder = tmp_path / "tiny-imagenet-200"
    if harm == "annotations":
        (folder / "val" / "val_annotations.txt").unlink()
    elif harm == "class":
        (folder / "train" / IDS[5]).rename(tmp_path / "elsewhere")
    elif harm == "images":
        for file in (folder / "train" / IDS[5] / "images").iterdir():
            file.unlink()
    else:
        (folder / "train").rename(folder / "trian")
    with pytest.raises(FczooError, match=says):
        DATASETS.get("tinyimagenet")().load(tmp_path)
