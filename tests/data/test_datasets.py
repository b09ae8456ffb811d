"""Test every data set with a small copy in its published layout."""

import inspect
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from fczoo import FczooError
from fczoo.core.registry import DATASETS
from fczoo.data.dataset import Images
from fczoo.data.fetch import fetch
from fczoo.data.stream import make_stream
from fczoo.data.verify import verify
from fczoo.testing import check_dataset
from helpers_datasets import (
    ARRAYS,
    SETS,
    cifar10,
    emnist,
    fashionmnist,
    hub_folder,
    imagenet_subset,
    number_of,
)

VARIANTS = [name for name in ARRAYS if ":" in name]
LOADERS = (
    *("omnibenchmark", "objectnet", "vtab", "core50", "officehome", "pacs", "fed_isic2019"),
    *("medmnist", "svhn", "emnist"),
)
"""Data sets with fixed protocols from the literature."""
FAMILIES = {"medmnist"}  # these need a variant


@pytest.fixture(autouse=True)
def fczoo_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FCZOO_HOME", str(tmp_path / "home"))


@pytest.fixture
def no_checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda path, md5=None: True)


@pytest.mark.parametrize(
    "name", [*(n for n in DATASETS.names("fczoo.datasets") if n not in FAMILIES), *VARIANTS]
)
def test_dataset_passes_conformance_check(name: str, tmp_path: Path, no_checksums: None) -> None:
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
def test_published_layout_is_read(name: str, tmp_path: Path) -> None:
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


# both are read as vtab is, with more classes
@pytest.mark.parametrize("name", sorted(SETS.keys() - {"omnibenchmark", "objectnet"}))
def test_default_stored_size(name: str, tmp_path: Path) -> None:
    SETS[name][0](tmp_path)
    sizes = {"tinyimagenet": 64, "eurosat": 64, "miniimagenet": 84, "core50": 128}
    stream = make_stream(name, tmp_path, tasks=5, train_per_class=1, test_per_class=1)
    assert stream.test.pixels.shape[1:] == (sizes.get(name, 256),) * 2 + (3,)


def test_truncated_cars_annotations_are_rejected(tmp_path: Path) -> None:
    """Truncate the file at many lengths, for which scipy raises different errors."""
    SETS["cars196"][0](tmp_path)
    file = tmp_path / "stanford_cars" / "devkit" / "cars_train_annos.mat"
    content = file.read_bytes()
    for length in range(0, len(content) - 1, len(content) // 40):
        file.write_bytes(content[:length])
        with pytest.raises(FczooError, match=r"Stanford Cars in .* is incomplete") as caught:
            make_stream("cars196", tmp_path, tasks=5, stored_size=8)
        assert "\n" not in str(caught.value)


def test_imagenet_subset_classes_are_fixed(tmp_path: Path) -> None:
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
def test_published_arrays_are_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ARRAYS[name](tmp_path)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda path, md5=None: True)
    data = DATASETS.get(name)().load(tmp_path)
    train, test, start, classes = {
        "cifar10": (100, 20, 100, 10),
        "cifar100": (100, 100, 100, 100),
        "fashionmnist": (20, 10, 0, 10),
        "svhn": (20, 10, 0, 10),
        "emnist": (47, 47, 0, 47),
        "emnist:letters": (26, 26, 0, 26),
        "medmnist:organamnist": (11, 11, 0, 11),
        "medmnist:bloodmnist": (8, 8, 0, 8),
    }[name]
    for images, count, first in ((data.train, train, 0), (data.test, test, start)):
        assert isinstance(images, Images)
        assert images.pixels[:, 0, 0, 0].tolist() == list(range(first, first + count))
        assert images.labels.tolist() == [i % classes for i in range(count)]
        assert images.pixels.shape[3] == 3
    assert len(data.classes) == classes
    make_stream(name, tmp_path)
    assert not (tmp_path / "home").exists()  # arrays need no cache


def test_cifar10_with_wrong_checksum_is_rejected(tmp_path: Path) -> None:
    cifar10(tmp_path)
    with pytest.raises(FczooError, match=r"checksums differ"):
        DATASETS.get("cifar10")().load(tmp_path)


def test_fashionmnist_ignores_processed_files(tmp_path: Path) -> None:
    """Read only the raw files of Fashion-MNIST.

    torchvision would use the processed tensors next to them.
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
def test_damaged_fashionmnist_is_rejected(harm: str, tmp_path: Path) -> None:
    fashionmnist(tmp_path)
    file = tmp_path / "FashionMNIST" / "raw" / "train-images-idx3-ubyte"
    length = {"missing": 0, "short": -50, "headless": 6}[harm]
    file.unlink() if harm == "missing" else file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(FczooError, match="incomplete or corrupt"):
        DATASETS.get("fashionmnist")().load(tmp_path)


def test_emnist_letters_are_upright_and_named(tmp_path: Path) -> None:
    emnist(tmp_path)
    data = DATASETS.get("EMNIST:letters")().load(tmp_path)
    assert data.train.take(np.array([5])).pixels[0, :2, :2, 0].tolist() == [[5, 5], [99, 5]]
    assert (data.classes[0], data.classes[25]) == ("a", "z")
    names = DATASETS.get("emnist")().load(tmp_path).classes
    assert (names[9], names[10], names[35], names[36], names[46]) == ("9", "A", "Z", "a", "t")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("emnist:byclass", "no split of EMNIST is called 'byclass'; known: balanced, letters"),
        ("medmnist:chestmnist", "no set of MedMNIST is called 'chestmnist'; known: pathmnist"),
        ("medmnist", "name one set of MedMNIST: medmnist:pathmnist, medmnist:dermamnist"),
    ],
)
def test_invalid_variants_are_rejected(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(FczooError, match=message):
        make_stream(name, tmp_path)
    if name == "medmnist":
        with pytest.raises(FczooError, match=message):
            verify(name, tmp_path)
        with pytest.raises(FczooError, match="has several data sets; name one"):
            fetch(name, tmp_path)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("svhn", "svhn/test_32x32.mat"),
        ("emnist", "EMNIST/gzip/emnist-balanced-test-labels-idx1-ubyte.gz"),
        ("medmnist:bloodmnist", "bloodmnist/bloodmnist.npz"),
    ],
)
def test_truncated_arrays_are_rejected(name: str, file: str, tmp_path: Path) -> None:
    ARRAYS[name](tmp_path)
    content = (tmp_path / file).read_bytes()
    (tmp_path / file).write_bytes(content[: len(content) // 2])
    with pytest.raises(FczooError, match=r"corrupt; (get|unpack)"):
        DATASETS.get(name)().load(tmp_path)


@pytest.mark.parametrize(
    ("name", "groups", "each"),
    [
        ("officehome", range(4), 65),
        ("pacs", range(4), 7 * 2),
        ("core50", [1, 2, 4, 5, 6, 8, 9, 11], 50),  # without the sessions 3, 7 and 10
        ("fed_isic2019", [1, 2, 3], 8),
    ],
)
def test_domains_sessions_and_centres_are_groups(
    name: str, groups: Sequence[int], each: int, tmp_path: Path
) -> None:
    SETS[name][0](tmp_path)
    stream = make_stream(name, tmp_path, tasks=2, pixels=False)
    assert np.unique(stream.groups, return_counts=True)[1].tolist() == [each] * len(groups)
    assert np.unique(stream.groups).tolist() == list(groups)


def test_damaged_lists_and_folders_are_rejected(tmp_path: Path) -> None:
    for name, file, old, new, message in (
        ("pacs", "PACS/photo_train_kfold.txt", "photo/dog/a", "dog/a", "expected photo/CLASS/FILE"),
        ("pacs", "PACS/photo_crossval_kfold.txt", "dog", "cat", "lack the class of photo/cat"),
        ("fed_isic2019", "fed_isic2019/train_test_split", "train", "val", "is damaged"),
    ):
        SETS[name][0](tmp_path)
        path = tmp_path / file
        path.write_text(path.read_text().replace(old, new))
        with pytest.raises(FczooError, match=message):
            DATASETS.get(name)().load(tmp_path)
    for name, folder, message in (
        ("core50", "core50/core50_128x128/s7/o50", "no folder o50 in"),
        ("officehome", "OfficeHomeDataset_10072016/Art/Thing_07", "such as Thing_07; unpack"),
    ):
        SETS[name][0](tmp_path)
        shutil.rmtree(tmp_path / folder)
        with pytest.raises(FczooError, match=message):
            DATASETS.get(name)().load(tmp_path)


@pytest.mark.parametrize("name", LOADERS)
def test_loader_is_short_and_has_official_counts(name):
    entry = DATASETS.get({"medmnist": "medmnist:bloodmnist"}.get(name, name))
    assert entry.official.train and entry.official.test
    module = inspect.getmodule(DATASETS.get(name))
    assert len(inspect.getsource(module).splitlines()) <= 60
