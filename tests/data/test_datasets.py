"""Every data set, from small imitations in its published layout."""

from pathlib import Path

import numpy as np
import pytest
import torch

from fczoo import FczooError
from fczoo.core.registry import DATASETS
from fczoo.data.dataset import Images
from fczoo.data.stream import make_stream
from fczoo.testing import check_dataset
from helpers_datasets import (
    ARRAYS,
    SETS,
    cifar10,
    fashionmnist,
    hub_folder,
    imagenet_subset,
    number_of,
)


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FCZOO_HOME", str(tmp_path / "home"))


@pytest.fixture
def no_checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda path, md5=None: True)


@pytest.mark.parametrize("name", DATASETS.names("fczoo.datasets"))
def test_every_data_set_keeps_the_rules(name: str, tmp_path: Path, no_checksums: None) -> None:
    if name in SETS:
        SETS[name][0](tmp_path)
        check_dataset(name, tmp_path, stored_size=8)
    elif name in ARRAYS:
        ARRAYS[name](tmp_path)
        check_dataset(name, tmp_path)
    elif name == "imagefolder":
        SETS["eurosat"][0](tmp_path)
        check_dataset(name, tmp_path / "eurosat" / "2750", stored_size=8)
    elif name == "hf":
        pytest.importorskip("datasets", reason="needs Hugging Face's datasets (extra hf)")
        check_dataset(name, hub_folder(tmp_path), stored_size=8)
    else:
        check_dataset(name)


@pytest.mark.parametrize("name", SETS)
def test_a_copy_in_the_published_layout(name: str, tmp_path: Path) -> None:
    build, train, test, third = SETS[name]
    build(tmp_path)
    cls = DATASETS.get(name)
    for root in (tmp_path, tmp_path / cls.folder):
        stream = make_stream(name, root, tasks=5, stored_size=8)
        for images, count in ((stream.train, train), (stream.test, test)):
            assert images.pixels.shape == (count, 8, 8, 3)
            if name != "imagenet_subset":
                assert np.array_equal(number_of(images.pixels), images.labels % 200)
        assert not third or stream.classes[3] == third


@pytest.mark.parametrize("name", SETS)
def test_the_stored_size_is_the_data_sets_own_unless_told_otherwise(
    name: str, tmp_path: Path
) -> None:
    SETS[name][0](tmp_path)
    sizes = {"tinyimagenet": 64, "eurosat": 64, "miniimagenet": 84}
    stream = make_stream(name, tmp_path, tasks=5, train_per_class=1, test_per_class=1)
    assert stream.test.pixels.shape[1:] == (sizes.get(name, 256),) * 2 + (3,)


def test_the_classes_of_the_imagenet_subset_are_drawn_once_and_for_all(tmp_path: Path) -> None:
    imagenet_subset(tmp_path)
    names = make_stream("imagenet_subset", tmp_path, stored_size=8).classes
    numbers = [int(name.removeprefix("word ")) for name in names]
    assert numbers == sorted(numbers)
    assert numbers[:6] == [7, 12, 33, 34, 38, 40]
    (tmp_path / "imagenet" / "train" / "n00000000" / "a.JPEG").unlink()
    (tmp_path / "imagenet" / "train" / "n00000000").rmdir()
    with pytest.raises(FczooError, match="has 999 class folders; the draw needs all 1,000"):
        make_stream("imagenet_subset", tmp_path)


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_in_the_published_layout(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ARRAYS[name](tmp_path)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda path, md5=None: True)
    data = DATASETS.get(name)().load(tmp_path)
    train, test, start, classes = {
        "cifar10": (100, 20, 100, 10),
        "cifar100": (100, 100, 100, 100),
        "fashionmnist": (20, 10, 0, 10),
    }[name]
    for images, count, first in ((data.train, train, 0), (data.test, test, start)):
        assert isinstance(images, Images)
        assert images.pixels[:, 0, 0, 0].tolist() == list(range(first, first + count))
        assert images.labels.tolist() == [i % classes for i in range(count)]
    make_stream(name, tmp_path)
    assert not (tmp_path / "home").exists()  # arrays need no cache


def test_cifar10_is_read_after_its_checksums_only(tmp_path: Path) -> None:
    cifar10(tmp_path)
    with pytest.raises(FczooError, match=r"checksums differ"):
        DATASETS.get("cifar10")().load(tmp_path)


def test_fashionmnist_is_read_from_its_raw_files_alone(tmp_path: Path) -> None:
    """Read only the raw files of Fashion-MNIST.

    torchvision would use the tensors of an older version that are next to them.
    """
    fashionmnist(tmp_path)
    beside = tmp_path / "FashionMNIST" / "processed"
    beside.mkdir()
    for part in ("training", "test"):
        torch.save(
            (torch.zeros(3, 28, 28, dtype=torch.uint8), torch.zeros(3)), beside / f"{part}.pt"
        )
    data = DATASETS.get("fashionmnist")().load(tmp_path)
    assert (len(data.train.labels), len(data.test.labels)) == (20, 10)


@pytest.mark.parametrize("harm", ["missing", "short", "headless"])
def test_broken_fashionmnist(harm: str, tmp_path: Path) -> None:
    fashionmnist(tmp_path)
    file = tmp_path / "FashionMNIST" / "raw" / "train-images-idx3-ubyte"
    length = {"missing": 0, "short": -50, "headless": 6}[harm]
    file.unlink() if harm == "missing" else file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(FczooError, match="incomplete or corrupt"):
        DATASETS.get("fashionmnist")().load(tmp_path)
