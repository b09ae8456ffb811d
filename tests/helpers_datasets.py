"""Small imitations of every data set of image files, in its published layout."""

import gzip
import io
import pickle
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from scipy.io import savemat

from fczoo.data.hub_files import import_library

IDS = [f"n{7 * i:08d}" for i in range(200)]
CARS = [f"Maker Model {i}" for i in range(196)]


def picture(number: int, kind: str = "JPEG") -> bytes:
    """Draw a plain 12x10 image whose colour identifies its class, also after JPEG.

    Args:
        number: The class.
        kind: The format, as Pillow names it.

    Returns:
        The content of the image file.
    """
    out = io.BytesIO()
    Image.new(
        "RGB", (12, 10), (50 * (number % 5), 50 * (number // 5 % 5), 30 * (number // 25))
    ).save(out, kind)
    return out.getvalue()


def number_of(pixels: np.ndarray) -> np.ndarray:
    """Read the class that ``picture`` was given from each image.

    Args:
        pixels: Images [n, height, width, 3].

    Returns:
        Classes [n].
    """
    red, green, blue = (np.rint(pixels.mean((1, 2)) / np.array([50, 50, 30])).astype(int)).T
    return red + 5 * green + 25 * blue


def write(folder: Path, number: int, names: list[str]) -> None:
    """Write image files of one class into a folder, which is created if it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(picture(number))


def tinyimagenet(root: Path) -> None:
    folder, notes = root / "tiny-imagenet-200", []
    for i, wnid in enumerate(IDS):
        write(folder / "train" / wnid / "images", i, [f"{wnid}_{j}.JPEG" for j in range(2)])
        (folder / "train" / wnid / f"{wnid}_boxes.txt").write_text("")
        write(folder / "val" / "images", i, [f"val_{i}.JPEG"])
        notes.append(f"val_{i}.JPEG\t{wnid}\t0\t32\t44\t62\n")
    (folder / "val" / "val_annotations.txt").write_text("".join(reversed(notes)))
    write(folder / "test" / "images", 0, ["test_0.JPEG"])
    (folder / "words.txt").write_text(
        "".join(f"{wnid}\tthing {i // 2}, other word\n" for i, wnid in enumerate(IDS))
    )


def miniimagenet(root: Path) -> None:
    for i, wnid in enumerate(IDS[:100]):
        write(root / "mini-imagenet" / "train" / wnid, i, [f"{wnid}{j:08d}.jpg" for j in range(2)])
        write(root / "mini-imagenet" / "val" / wnid, i, [f"{wnid}00001299.jpg"])


def renditions(root: Path, name: str) -> None:
    """Write the layout of ImageNet-R and ImageNet-A: a folder per class and a list of names."""
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
    base, images, labels, split, k = root / "CUB_200_2011", [], [], [], 0
    for i in range(200):
        folder = f"{i + 1:03d}.Some_Bird_{i}"
        write(base / "images" / folder, i, [f"Bird_{j}.jpg" for j in range(3)])
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
        (base / name).write_text("".join(lines))
    (base / "classes.txt").write_text(
        "".join(f"{i + 1} {i + 1:03d}.Some_Bird_{i}\n" for i in range(200))
    )
    (root / "attributes.txt").write_text("next to the folder, as in the archive\n")


def cars196(root: Path) -> None:
    folder = root / "stanford_cars"
    (folder / "devkit").mkdir(parents=True)
    for part, notes, each in (
        ("cars_train", "devkit/cars_train_annos.mat", 2),
        ("cars_test", "cars_test_annos_withlabels.mat", 1),
    ):
        rows = []
        for i in range(196):
            for j in range(each):
                rows.append((i + 1, f"{each * i + j + 1:05d}.jpg"))
                write(folder / part, i, [rows[-1][1]])
        savemat(
            folder / notes,
            {"annotations": np.array(rows, [("class", np.uint8), ("fname", object)])},
        )
    savemat(folder / "devkit" / "cars_meta.mat", {"class_names": np.array(CARS, object)})


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


def domainnet(root: Path) -> None:
    """Write every class in two of the six domains, one training and one test image in each."""
    domains, lists = (
        ("clipart", "infograph", "painting", "quickdraw", "real", "sketch"),
        dict[str, str](),
    )
    for i in range(345):
        for d in (i % 6, (i + 1) % 6):
            class_folder = f"{domains[d]}/some_thing_{i}"
            write(root / "domainnet" / class_folder, i % 200, ["a.jpg", "b.jpg"])
            for part, file in (("train", "a.jpg"), ("test", "b.jpg")):
                name = f"{domains[d]}_{part}.txt"
                lists[name] = lists.get(name, "") + f"{class_folder}/{file} {i}\n"
    for name, content in lists.items():
        (root / "domainnet" / name).write_text(content)


def cifar10(root: Path) -> None:
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for number, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        rows = np.repeat(np.arange(20, dtype=np.uint8)[:, None] + 20 * number, 3072, 1)
        (folder / name).write_bytes(
            pickle.dumps({"data": rows, "labels": [i % 10 for i in range(20)]})
        )
    (folder / "batches.meta").write_bytes(
        pickle.dumps({"label_names": [f"kind {i}" for i in range(10)]})
    )


def cifar100(root: Path) -> None:
    folder = root / "cifar-100-python"
    folder.mkdir(parents=True)
    for number, name in enumerate(["train", "test"]):
        rows = np.repeat(np.arange(100, dtype=np.uint8)[:, None] + 100 * number, 3072, 1)
        (folder / name).write_bytes(
            pickle.dumps(
                {"data": rows, "fine_labels": list(range(100)), "coarse_labels": [0] * 100}
            )
        )
    (folder / "meta").write_bytes(
        pickle.dumps({"fine_label_names": [f"kind {i}" for i in range(100)]})
    )


def fashionmnist(root: Path) -> None:
    folder = root / "FashionMNIST" / "raw"
    folder.mkdir(parents=True)
    for name, count in (("train", 20), ("t10k", 10)):
        pixels = np.repeat(np.arange(count, dtype=np.uint8), 784)
        (folder / f"{name}-images-idx3-ubyte").write_bytes(
            struct.pack(">4i", 2051, count, 28, 28) + pixels.tobytes()
        )
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(
            struct.pack(">2i", 2049, count) + bytes(i % 10 for i in range(count))
        )


def svhn(root: Path) -> None:
    folder = root / "svhn"
    folder.mkdir(parents=True)
    for name, count in (("train", 20), ("test", 10)):  # label 10 is the digit 0
        pixels = np.broadcast_to(np.arange(count, dtype=np.uint8), (32, 32, 3, count))
        labels = np.array([[i % 10 or 10] for i in range(count)], np.uint8)
        savemat(folder / f"{name}_32x32.mat", {"X": pixels, "y": labels})


def emnist(root: Path) -> None:
    """Write the splits ``balanced`` and ``letters``; the second pixel of a column is 99."""
    folder = root / "EMNIST" / "gzip"
    folder.mkdir(parents=True)
    for split, classes, first in (("balanced", 47, 0), ("letters", 26, 1)):
        for part in ("train", "test"):
            pixels = np.repeat(np.arange(classes, dtype=np.uint8), 784).reshape(-1, 28, 28)
            pixels[:, 0, 1] = 99
            images = struct.pack(">4i", 2051, classes, 28, 28) + pixels.tobytes()
            labels = struct.pack(">2i", 2049, classes) + bytes(i + first for i in range(classes))
            for kind, content in (("images-idx3", images), ("labels-idx1", labels)):
                file = folder / f"emnist-{split}-{part}-{kind}-ubyte.gz"
                file.write_bytes(gzip.compress(content))


def medmnist(root: Path) -> None:
    """Write a grey and a coloured set."""
    for name, classes, channels in (("organamnist", 11, ()), ("bloodmnist", 8, (3,))):
        (root / name).mkdir(parents=True)
        arrays = {}
        for part in ("train", "val", "test"):
            column = np.arange(classes, dtype=np.uint8).reshape(-1, 1, 1, *[1 for _ in channels])
            arrays[f"{part}_images"] = np.broadcast_to(column, (classes, 28, 28, *channels))
            arrays[f"{part}_labels"] = np.arange(classes, dtype=np.uint8)[:, None]
        np.savez(root / name / f"{name}.npz", **arrays)


def parts_of_classes(root: Path, classes: int) -> None:
    """Write ``train/CLASS/*`` and ``test/CLASS/*``, as LAMDA-PILOT cuts data sets."""
    for i in range(classes):
        write(root / "train" / f"{i:03d}", i % 200, ["a.jpg"])
        write(root / "test" / f"{i:03d}", i % 200, ["b.jpg"])


def omnibenchmark(root: Path) -> None:
    parts_of_classes(root / "omnibenchmark", 300)


def objectnet(root: Path) -> None:
    parts_of_classes(root / "objectnet", 200)


def vtab(root: Path) -> None:
    parts_of_classes(root / "vtab", 50)


def officehome(root: Path) -> None:
    for domain in ("Art", "Clipart", "Product", "Real World"):
        for i in range(65):
            folder = root / "OfficeHomeDataset_10072016" / domain / f"Thing_{i:02d}"
            write(folder, i, ["00001.jpg", "00002.jpg"])


def pacs(root: Path) -> None:
    """Write two images for training and one for testing per class and domain."""
    for domain in ("art_painting", "cartoon", "photo", "sketch"):
        lists = {"train": "", "crossval": "", "test": ""}
        for i, name in enumerate(
            ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
        ):
            write(root / "PACS" / "kfold" / domain / name, i, ["a.jpg", "b.jpg", "c.jpg"])
            for part, files in (("train", "ab"), ("crossval", "c"), ("test", "abc")):
                lists[part] += "".join(f"{domain}/{name}/{f}.jpg {i + 1}\n" for f in files)
        for part, lines in lists.items():
            (root / "PACS" / f"{domain}_{part}_kfold.txt").write_text(lines)


def core50(root: Path) -> None:
    for session in range(1, 12):
        for i in range(50):
            folder = root / "core50" / "core50_128x128" / f"s{session}" / f"o{i + 1}"
            write(folder, i, [f"C_{session:02d}_{i + 1:02d}_000.png"])


def fed_isic2019(root: Path) -> None:
    """Write three images for training and one for testing per class, in four of the centres."""
    lines = ["image,MEL,target,center,fold,fold2"]
    for i in range(8):
        for j in range(4):
            name, fold, centre = f"ISIC_{10 * i + j:07d}", ("test" if j == 3 else "train"), j + 1
            write(root / "fed_isic2019" / "ISIC_2019_Training_Input", i, [f"{name}.jpg"])
            lines.append(f"{name},0.0,{i},{centre},{fold},{fold}_{centre}")
    (root / "fed_isic2019" / "train_test_split").write_text("\n".join(lines) + "\n")


def hub_tables(classes: Sequence[int], **columns: list[Any]) -> Any:
    """Make a table of Hugging Face's ``datasets`` with one picture per class that is given.

    Args:
        classes: Class of each row.
        columns: Further columns.

    Returns:
        The table with the columns ``image`` and ``label``, which has ten names.
    """
    hub = import_library()
    images = [{"bytes": picture(k, "PNG"), "path": None} for k in classes]
    names = hub.ClassLabel(names=[f"kind {i}" for i in range(10)])
    table = hub.Dataset.from_dict({"image": images, "label": list(classes), **columns})
    return table.cast_column("image", hub.Image()).cast_column("label", names)


def hub_folder(root: Path, **columns: Any) -> Path:
    """Save two splits of ten classes, three images of each for training and one for testing."""
    hub, folder = import_library(), root / "saved"
    train = hub_tables(list(range(10)) * 3, **{k: list(v) * 30 for k, v in columns.items()})
    test = hub_tables(range(10), **{k: list(v) * 10 for k, v in columns.items()})
    hub.DatasetDict(train=train, test=test).save_to_disk(str(folder))
    return folder


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
    "domainnet": (domainnet, 690, 690, "some thing 3"),
    "omnibenchmark": (omnibenchmark, 300, 300, "003"),
    "objectnet": (objectnet, 200, 200, "003"),
    "vtab": (vtab, 50, 50, "003"),
    "officehome": (officehome, 260, 260, "Thing 03"),
    "pacs": (pacs, 56, 28, "guitar"),
    "core50": (core50, 400, 150, "plug adapter 4"),
    "fed_isic2019": (fed_isic2019, 24, 8, "actinic keratosis"),
}
ARRAYS = {
    "cifar10": cifar10,
    "cifar100": cifar100,
    "fashionmnist": fashionmnist,
    "svhn": svhn,
    "emnist": emnist,
    "emnist:letters": emnist,
    "medmnist:organamnist": medmnist,
    "medmnist:bloodmnist": medmnist,
}
