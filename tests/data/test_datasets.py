"""Every data set of image files, from small generated copies in its published layout, and from archives of such copies."""

import gzip
import hashlib
import io
import pickle
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from fczoo import FczooError
from fczoo.core.registry import DATASETS
from fczoo.data.dataset import Archive, Images, Official
from fczoo.data.fetch import fetch, file_name
from fczoo.data.image_files import held_out
from fczoo.data.stream import make_stream
from fczoo.data.verify import check

IDS = [f"n{7 * i:08d}" for i in range(200)]
CARS = [f"Maker Model {i}" for i in range(196)]


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FCZOO_HOME", str(tmp_path / "home"))


def picture(number: int, kind: str = "JPEG") -> bytes:
    """A plain 12x10 image whose colour tells its class, also after JPEG."""
    out = io.BytesIO()
    Image.new("RGB", (12, 10), (50 * (number % 5), 50 * (number // 5 % 5), 30 * (number // 25))).save(
        out, kind
    )
    return out.getvalue()


def number_of(pixels: np.ndarray) -> np.ndarray:
    """The class that ``picture`` was told, for each image."""
    red, green, blue = (np.rint(pixels.mean((1, 2)) / np.array([50, 50, 30])).astype(int)).T
    return red + 5 * green + 25 * blue


def write(folder: Path, number: int, names: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(picture(number))


def tinyimagenet(root: Path) -> None:
    place, notes = root / "tiny-imagenet-200", []
    for i, wnid in enumerate(IDS):
        write(place / "train" / wnid / "images", i, [f"{wnid}_{j}.JPEG" for j in range(2)])
        (place / "train" / wnid / f"{wnid}_boxes.txt").write_text("")
        write(place / "val" / "images", i, [f"val_{i}.JPEG"])
        notes.append(f"val_{i}.JPEG\t{wnid}\t0\t32\t44\t62\n")
    (place / "val" / "val_annotations.txt").write_text("".join(reversed(notes)))
    write(place / "test" / "images", 0, ["test_0.JPEG"])
    (place / "words.txt").write_text(
        "".join(f"{wnid}\tthing {i // 2}, other word\n" for i, wnid in enumerate(IDS))
    )


def miniimagenet(root: Path) -> None:
    for i, wnid in enumerate(IDS[:100]):
        write(root / "mini-imagenet" / "train" / wnid, i, [f"{wnid}{j:08d}.jpg" for j in range(2)])
        write(root / "mini-imagenet" / "val" / wnid, i, [f"{wnid}00001299.jpg"])


def renditions(root: Path, name: str) -> None:
    for i, wnid in enumerate(IDS):
        write(root / name / wnid, i, [f"art_{j}.jpg" for j in range(3 + i % 4)])
        (root / name / wnid / "._art_0.jpg").write_bytes(b"macOS")
    (root / name / "README.txt").write_text(
        "About.\n\n" + "".join(f"{wnid} big_thing_{i}\n" for i, wnid in enumerate(IDS))
    )


def imagenet_r(root: Path) -> None:
    renditions(root, "imagenet-r")


def imagenet_a(root: Path) -> None:
    renditions(root, "imagenet-a")


def cub200(root: Path) -> None:
    place, images, labels, split, k = root / "CUB_200_2011", [], [], [], 0
    for i in range(200):
        folder = f"{i + 1:03d}.Some_Bird_{i}"
        write(place / "images" / folder, i, [f"Bird_{j}.jpg" for j in range(3)])
        for j in range(3):
            k += 1
            images.append(f"{k} {folder}/Bird_{j}.jpg\n")
            labels.append(f"{k} {i + 1}\n")
            split.append(f"{k} {int(j != 1)}\n")
    for name, lines in (
        ("images.txt", images),
        ("image_class_labels.txt", labels),
        ("train_test_split.txt", split),
    ):
        (place / name).write_text("".join(lines))
    (place / "classes.txt").write_text("".join(f"{i + 1} {i + 1:03d}.Some_Bird_{i}\n" for i in range(200)))
    (root / "attributes.txt").write_text("beside the folder, as in the archive\n")


def cars196(root: Path) -> None:
    place = root / "stanford_cars"
    (place / "devkit").mkdir(parents=True)
    for part, notes, each in (
        ("cars_train", "devkit/cars_train_annos.mat", 2),
        ("cars_test", "cars_test_annos_withlabels.mat", 1),
    ):
        rows = []
        for i in range(196):
            for j in range(each):
                rows.append((i + 1, f"{each * i + j + 1:05d}.jpg"))
                write(place / part, i, [rows[-1][1]])
        savemat(place / notes, {"annotations": np.array(rows, [("class", np.uint8), ("fname", object)])})
    savemat(place / "devkit" / "cars_meta.mat", {"class_names": np.array(CARS, object)})


def eurosat(root: Path) -> None:
    for i in range(10):
        write(root / "eurosat" / "2750" / f"Land{i}", i, [f"Land{i}_{j}.jpg" for j in range(6)])


def imagenet_subset(root: Path) -> None:
    for i in range(1000):
        for part in ("train", "val"):
            write(root / "imagenet" / part / f"n{i:08d}", i % 200, ["a.JPEG"])
    (root / "imagenet" / "LOC_synset_mapping.txt").write_text(
        "".join(f"n{i:08d} word {i}, more\n" for i in range(1000))
    )


def cifar10(root: Path) -> None:
    place = root / "cifar-10-batches-py"
    place.mkdir(parents=True)
    for number, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        rows = np.repeat(np.arange(20, dtype=np.uint8)[:, None] + 20 * number, 3072, 1)
        (place / name).write_bytes(pickle.dumps({"data": rows, "labels": [i % 10 for i in range(20)]}))
    (place / "batches.meta").write_bytes(pickle.dumps({"label_names": [f"kind {i}" for i in range(10)]}))


def cifar100(root: Path) -> None:
    place = root / "cifar-100-python"
    place.mkdir(parents=True)
    for number, name in enumerate(["train", "test"]):
        rows = np.repeat(np.arange(100, dtype=np.uint8)[:, None] + 100 * number, 3072, 1)
        (place / name).write_bytes(
            pickle.dumps({"data": rows, "fine_labels": list(range(100)), "coarse_labels": [0] * 100})
        )
    (place / "meta").write_bytes(pickle.dumps({"fine_label_names": [f"kind {i}" for i in range(100)]}))


def fashionmnist(root: Path) -> None:
    place = root / "FashionMNIST" / "raw"
    place.mkdir(parents=True)
    for name, count in (("train", 20), ("t10k", 10)):
        pixels = np.repeat(np.arange(count, dtype=np.uint8), 784)
        (place / f"{name}-images-idx3-ubyte").write_bytes(
            struct.pack(">4i", 2051, count, 28, 28) + pixels.tobytes()
        )
        (place / f"{name}-labels-idx1-ubyte").write_bytes(
            struct.pack(">2i", 2049, count) + bytes(i % 10 for i in range(count))
        )


SETS: dict[
    str, tuple[Callable[[Path], None], int, int, str]
] = {  # builder, training and test images, name of class 3
    "tinyimagenet": (tinyimagenet, 400, 200, f"thing 1 ({IDS[3]})"),
    "miniimagenet": (miniimagenet, 200, 100, IDS[3]),
    "imagenet_r": (imagenet_r, 700, 200, "big thing 3"),
    "imagenet_a": (imagenet_a, 700, 200, "big thing 3"),
    "cub200": (cub200, 400, 200, "Some Bird 3"),
    "cars196": (cars196, 392, 196, "Maker Model 3"),
    "eurosat": (eurosat, 48, 12, "Land3"),
    "imagenet_subset": (imagenet_subset, 200, 200, ""),
}
ARRAYS = {"cifar10": cifar10, "cifar100": cifar100, "fashionmnist": fashionmnist}


@pytest.mark.parametrize("name", SETS)
def test_a_copy_in_the_published_layout(name: str, tmp_path: Path) -> None:
    build, train, test, third = SETS[name]
    build(tmp_path)
    cls = DATASETS.get(name)
    for root in (tmp_path, tmp_path / cls.folder):
        stream = make_stream(name, root, tasks=5, stored_size=8)
        assert len(stream.classes) == cls.classes == len(set(stream.classes))
        for images, count in ((stream.train, train), (stream.test, test)):
            assert (
                images.pixels.shape == (count, 8, 8, 3)
                and images.pixels.dtype == np.uint8
                and images.labels.dtype == np.int64
            )
            assert set(images.labels) == set(range(cls.classes))
            if name != "imagenet_subset":
                assert np.array_equal(number_of(images.pixels), images.labels)
        assert not third or stream.classes[3] == third


@pytest.mark.parametrize("name", SETS)
def test_the_stored_size_is_the_data_sets_own_unless_told_otherwise(name: str, tmp_path: Path) -> None:
    SETS[name][0](tmp_path)
    sizes = {"tinyimagenet": 64, "eurosat": 64, "miniimagenet": 84}
    stream = make_stream(name, tmp_path, tasks=5, train_per_class=1, test_per_class=1)
    assert stream.test.pixels.shape[1:] == (sizes.get(name, 256),) * 2 + (3,)


def test_the_classes_of_the_imagenet_subset_are_drawn_once_and_for_all(tmp_path: Path) -> None:
    imagenet_subset(tmp_path)
    names = make_stream("imagenet_subset", tmp_path, stored_size=8).classes
    numbers = [int(name.removeprefix("word ")) for name in names]
    assert numbers == sorted(numbers) and numbers[:6] == [7, 12, 33, 34, 38, 40]
    (tmp_path / "imagenet" / "train" / "n00000000" / "a.JPEG").unlink()
    (tmp_path / "imagenet" / "train" / "n00000000").rmdir()
    with pytest.raises(FczooError, match="has 999 class folders; the draw needs all 1,000"):
        make_stream("imagenet_subset", tmp_path)


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_in_the_published_layout(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ARRAYS[name](tmp_path)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda path, md5=None: True)
    data = DATASETS.get(name)().load(tmp_path)
    train, test, start, classes = {
        "cifar10": (100, 20, 100, 10),
        "cifar100": (100, 100, 100, 100),
        "fashionmnist": (20, 10, 0, 10),
    }[name]
    for images, count, first in ((data.train, train, 0), (data.test, test, start)):
        assert isinstance(images, Images) and images.pixels.shape[3] == 3 and images.labels.dtype == np.int64
        assert images.pixels[:, 0, 0, 0].tolist() == list(range(first, first + count))
        assert images.labels.tolist() == [i % classes for i in range(count)]
    assert len(data.classes) == classes
    make_stream(name, tmp_path)
    assert not (tmp_path / "home").exists()  # arrays need no cache


def test_cifar10_is_read_after_its_checksums_only(tmp_path: Path) -> None:
    cifar10(tmp_path)
    with pytest.raises(FczooError, match=r"checksums differ"):
        DATASETS.get("cifar10")().load(tmp_path)


@pytest.mark.parametrize("harm", ["missing", "short"])
def test_broken_fashionmnist(harm: str, tmp_path: Path) -> None:
    fashionmnist(tmp_path)
    file = tmp_path / "FashionMNIST" / "raw" / "train-images-idx3-ubyte"
    file.unlink() if harm == "missing" else file.write_bytes(file.read_bytes()[:-50])
    with pytest.raises(FczooError, match="incomplete or corrupt"):
        DATASETS.get("fashionmnist")().load(tmp_path)


# ---------------------------------------------------------------- downloads, each from an archive in its published form


def packed(name: str, source: Path, served: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pack a copy as its official archives are packed, with their names but checksums of its own."""
    cls, archives = DATASETS.get(name), []
    served.mkdir()
    for archive in cls.archives:
        file = served / file_name(archive.url)
        if archive.into == "FashionMNIST/raw":
            file.write_bytes(gzip.compress((source / archive.into / file.stem).read_bytes()))
        elif file.suffix == ".zip":
            with zipfile.ZipFile(file, "w") as out:
                for path in sorted((source / archive.into).rglob("*")):
                    out.write(path, path.relative_to(source / archive.into))
        else:
            with tarfile.open(file, "w" if file.suffix == ".tar" else "w:gz") as out:
                for path in sorted(source.iterdir()):
                    out.add(path, path.name)
        content = file.read_bytes()
        archives.append(Archive(archive.url, hashlib.md5(content).hexdigest(), len(content), archive.into))
    monkeypatch.setattr(cls, "archives", tuple(archives))


@pytest.mark.parametrize("name", [n for n in (*SETS, *ARRAYS) if DATASETS.get(n).archives])
def test_fetch_gives_what_load_reads(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, root = tmp_path / "source", tmp_path / "root"
    {**ARRAYS, **{n: entry[0] for n, entry in SETS.items()}}[name](source)
    packed(name, source, tmp_path / "served", monkeypatch)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda path, md5=None: True)
    said = fetch(name, root, (tmp_path / "served").as_uri())
    cls = DATASETS.get(name)
    assert str(root / cls.folder) in said and cls.licence in said
    visible = [p.name for p in root.iterdir() if not p.name.startswith(".")]
    assert visible == [Path(cls.folder).parts[0]] and not (root / f".fetch-{name}").exists()
    ours, theirs = DATASETS.get(name)().load(root), DATASETS.get(name)().load(source)
    assert ours.classes == theirs.classes
    for a, b in ((ours.train, theirs.train), (ours.test, theirs.test)):
        assert np.array_equal(a.labels, b.labels) and getattr(a, "names", None) == getattr(b, "names", None)
    assert "already there" in fetch(name, root, "http://nowhere.invalid")


@pytest.mark.parametrize("name", ["miniimagenet", "cars196", "imagenet_subset"])
def test_what_may_not_be_downloaded_is_said_with_its_place_and_layout(name: str, tmp_path: Path) -> None:
    cls = DATASETS.get(name)
    with pytest.raises(FczooError) as caught:
        fetch(name, tmp_path)
    for word in (
        "cannot be downloaded automatically",
        cls.source,
        cls.layout,
        str(tmp_path),
        f"fczoo data check {name}",
    ):
        assert word in str(caught.value)


# ---------------------------------------------------------------- splits


def test_a_fifth_is_held_out_of_every_class() -> None:
    rng = np.random.default_rng(0)
    sizes = (
        51 + rng.multinomial(30_000 - 200 * 51, rng.dirichlet([2] * 200))
    ).tolist()  # as many as ImageNet-R has
    folders = {f"c{i}": [f"c{i}/{j}.jpg" for j in range(n)] for i, n in enumerate(sizes)}
    test = held_out(folders, 0)
    assert len(test) == 6_000
    counts = [sum(name in test for name in images) for images in folders.values()]
    assert all(abs(count - n / 5) < 1 for count, n in zip(counts, sizes, strict=True))
    mixed = {name: images[::-1] for name, images in folders.items()}
    assert held_out(mixed, 0) == test != held_out(folders, 1)


def test_the_split_that_results_name_never_changes() -> None:
    assert sorted(held_out({"a": [f"a/{i}.jpg" for i in range(10)], "b": ["b/0.jpg", "b/1.jpg"]}, 0)) == [
        "a/3.jpg",
        "a/7.jpg",
        "b/1.jpg",
    ]


def test_a_list_beside_the_images_replaces_the_rule(tmp_path: Path) -> None:
    eurosat(tmp_path)
    place = tmp_path / "eurosat" / "2750"
    assert (
        DATASETS.get("eurosat")().load(tmp_path).split
        == make_stream("eurosat", tmp_path).split
        == "a fifth of every class by sha256, seed 0"
    )
    (place / "test.txt").write_text("".join(f"Land{i}/Land{i}_5.jpg\n" for i in range(10)))
    assert (
        DATASETS.get("eurosat")().load(tmp_path).split
        == f"test.txt, sha256 {hashlib.sha256((place / 'test.txt').read_bytes()).hexdigest()}"
    )
    data = DATASETS.get("eurosat")().load(tmp_path)
    assert (
        data.test.names == tuple(f"Land{i}/Land{i}_5.jpg" for i in range(10)) and len(data.train.labels) == 50
    )
    (place / "test.txt").write_text("Land0/none.jpg\n")
    with pytest.raises(FczooError, match=r"test\.txt names Land0/none\.jpg, which is not in"):
        DATASETS.get("eurosat")().load(tmp_path)
    (place / "test.txt").write_text("".join(f"Land4/Land4_{j}.jpg\n" for j in range(6)))
    with pytest.raises(FczooError, match=r"class Land4 in .* has no training image left"):
        DATASETS.get("eurosat")().load(tmp_path)


# ---------------------------------------------------------------- checks


def test_check_of_a_part_says_what_is_missing(tmp_path: Path) -> None:
    tinyimagenet(tmp_path)
    table, wrong = check("tinyimagenet", tmp_path)
    assert "100000" in table and "400" in table and "unreadable" in table
    assert wrong == ["400 training images, not 100000", "200 test images, not 10000"]


def test_check_of_a_whole_copy_and_of_broken_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    eurosat(tmp_path)
    monkeypatch.setattr(DATASETS.get("eurosat"), "official", Official(48, 12))
    assert check("eurosat", tmp_path)[1] == []
    broken = tmp_path / "eurosat" / "2750" / "Land2" / "Land2_3.jpg"
    broken.write_bytes(broken.read_bytes()[:100])
    table, wrong = check("eurosat", tmp_path)
    assert wrong == ["1 unreadable files"] and f"cannot read image {broken}" in table


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        ("annotations", "no file .*val_annotations.txt"),
        ("class", "names no class of"),
        ("images", "no image in"),
        ("train", "no folder .*train"),
    ],
)
def test_an_incomplete_tinyimagenet(harm: str, says: str, tmp_path: Path) -> None:
    tinyimagenet(tmp_path)
    place = tmp_path / "tiny-imagenet-200"
    if harm == "annotations":
        (place / "val" / "val_annotations.txt").unlink()
    elif harm == "class":
        (place / "train" / IDS[5]).rename(tmp_path / "elsewhere")
    elif harm == "images":
        for file in (place / "train" / IDS[5] / "images").iterdir():
            file.unlink()
    else:
        (place / "train").rename(place / "trian")
    with pytest.raises(FczooError, match=says):
        DATASETS.get("tinyimagenet")().load(tmp_path)
