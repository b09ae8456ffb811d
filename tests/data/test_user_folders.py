"""Test image folders of users: parts, subfolders, links, names and lists."""

import os
import shutil
import unicodedata
from pathlib import Path

import numpy as np
import pytest

from fczoo import FczooError
from fczoo.core.registry import DATASETS
from fczoo.data.dataset import ImageData
from fczoo.data.image_files import display_names
from fczoo.data.verify import verify
from helpers_images import noise, parts


@pytest.fixture(autouse=True)
def fczoo_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FCZOO_HOME", str(tmp_path / "home"))


def load(root: Path, name: str = "imagefolder") -> ImageData:
    return DATASETS.get(name)().load(root)


def counts(root: Path, name: str = "imagefolder") -> tuple[int, int]:
    data = load(root, name)
    return len(data.train.labels), len(data.test.labels)


# ---------------------------------------------------------------- parts


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("train", "valid"),
        ("Train", "VALIDATION"),
        ("TRAINING", "Testing"),
        ("train", "dev"),
        ("train", "val"),
    ],
)
def test_common_part_names_are_recognised(train: str, test: str, tmp_path: Path) -> None:
    assert counts(parts(tmp_path, train, test)) == (6, 2)


def test_unlabelled_test_part_is_ignored(tmp_path: Path) -> None:
    noise(parts(tmp_path, test="val") / "test" / "0.png")
    assert counts(tmp_path) == (6, 2)
    assert load(tmp_path).remarks == (
        "test/ has no folders of the training classes and is not used; val/ is the test part",
    )


def test_images_outside_class_folders_are_rejected(tmp_path: Path) -> None:
    for part in ("train", "valid"):
        noise(tmp_path / part / "0.png")
    with pytest.raises(
        FczooError, match=r"images are directly in train/ and valid/.*expected train/CLASS"
    ):
        load(tmp_path)


def test_class_may_be_called_train(tmp_path: Path) -> None:
    for name in ("bus", "car", "train"):
        for i in range(5):
            noise(tmp_path / name / f"{i}.png")
    assert load(tmp_path).classes == ("bus", "car", "train")
    assert counts(tmp_path) == (12, 3)


def test_training_part_without_test_part_is_split(tmp_path: Path) -> None:
    shutil.rmtree(parts(tmp_path) / "test")
    assert counts(tmp_path) == (4, 2)
    assert "no test part next to train/" in load(tmp_path).remarks[0]


def test_parts_one_level_too_deep_are_rejected(tmp_path: Path) -> None:
    parts(tmp_path / "outer" / "inner")
    with pytest.raises(
        FczooError, match=r"has only the folder inner, .*; give --data-root .*inner"
    ):
        load(tmp_path / "outer")


# ---------------------------------------------------------------- files


def test_subfolders_and_image_suffixes_are_read(tmp_path: Path) -> None:
    parts(tmp_path)
    noise(tmp_path / "train" / "a" / "more" / "UPPER.PNG")
    for suffix, kind in (
        ("pgm", "L"),
        ("pbm", "1"),
        ("pnm", "RGB"),
        ("jfif", "RGB"),
        ("tif", "RGB"),
    ):
        noise(tmp_path / "train" / "b" / f"x.{suffix}", kind)
    assert counts(tmp_path) == (12, 2) and load(tmp_path).remarks == ()
    assert verify("imagefolder", tmp_path)[1] == []


def test_skipped_files_are_counted(tmp_path: Path) -> None:
    parts(tmp_path)
    noise(tmp_path / "train" / "a" / "q.tga")
    shutil.copy(tmp_path / "train" / "a" / "0.png", tmp_path / "train" / "b" / "plain")
    noise(tmp_path / "train" / "loose.png")
    (tmp_path / "train" / "a" / "notes").write_text("no image")
    assert counts(tmp_path) == (6, 2)
    assert load(tmp_path).remarks == (
        "train/: 2 image files are not read (1 .tga, 1 without suffix); convert to PNG or JPEG",
        f"train/: 1 image is in {tmp_path / 'train'} itself, outside of class folders: not read",
    )


def test_system_files_are_ignored(tmp_path: Path) -> None:
    parts(tmp_path)
    for path in (
        "__MACOSX/a/1.png",
        "train/__MACOSX/1.png",
        "train/.cache/1.png",
        "train/a/@eaDir/1.png",
    ):
        noise(tmp_path / path)
    (tmp_path / "train" / "a" / "Thumbs.db").write_bytes(b"x")
    assert load(tmp_path).classes == ("a", "b") and counts(tmp_path) == (6, 2)


def test_folder_links_are_followed_without_loops(tmp_path: Path) -> None:
    parts(tmp_path)
    for part in ("train", "test"):
        (tmp_path / part / "c").symlink_to(tmp_path / part / "b")
    (tmp_path / "train" / "a" / "self").symlink_to(tmp_path / "train" / "a")
    assert counts(tmp_path) == (9, 3)
    assert "1 link is not followed" in load(tmp_path).remarks[0]


@pytest.mark.parametrize("place", ["train/a/x.png", "train/c"])
def test_broken_link_is_rejected(place: str, tmp_path: Path) -> None:
    (parts(tmp_path) / place).symlink_to("/nowhere")
    with pytest.raises(
        FczooError,
        match=rf"broken symbolic link {tmp_path / place} -> /nowhere; restore its target",
    ):
        load(tmp_path)


# ---------------------------------------------------------------- names and lists


def test_class_names_are_unicode_normalised(tmp_path: Path) -> None:
    parts(tmp_path)
    noise(tmp_path / "train" / unicodedata.normalize("NFC", "café") / "0.png")
    noise(tmp_path / "test" / unicodedata.normalize("NFD", "café") / "0.png")
    assert counts(tmp_path) == (7, 3)


def test_class_names_are_case_sensitive(tmp_path: Path) -> None:
    parts(tmp_path)
    noise(tmp_path / "train" / "Cat" / "0.png")
    noise(tmp_path / "test" / "cat" / "0.png")
    with pytest.raises(
        FczooError, match=r"Cat is only in train/; use the same upper and lower case"
    ):
        load(tmp_path)


def test_non_utf8_names_are_displayed_with_replacement_characters() -> None:
    assert display_names([os.fsdecode(b"\xe9t\xe9"), "a"]) == ("\ufffdt\ufffd", "a")
    assert display_names([os.fsdecode(b"\xff"), os.fsdecode(b"\xfe")]) == (
        "\ufffd (ff)",
        "\ufffd (fe)",
    )


LIST_TEXT = "猫/0.png\nb/0.png\n"


@pytest.mark.parametrize(
    "content",
    [
        LIST_TEXT.encode("utf-8-sig"),
        LIST_TEXT.replace("/", "\\").encode(),
        b"./b/0.png\r\n\r\n" + "./猫/0.png\r\n\r\n".encode(),
        (LIST_TEXT + LIST_TEXT).encode(),
    ],
)
def test_common_list_formats_are_read(content: bytes, tmp_path: Path) -> None:
    for name in ("猫", "b"):
        for i in range(3):
            noise(tmp_path / name / f"{i}.png")
    (tmp_path / "test.txt").write_bytes(content)
    assert counts(tmp_path) == (4, 2)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (LIST_TEXT.encode("utf-16"), "is not UTF-8 text but UTF-16"),
        ("café/0.png".encode("latin-1"), "is not UTF-8 text but another encoding"),
        ("猫/0.png".encode("gbk"), "is the list in another encoding"),
        (b"../b/0.png", "may be outside of"),
        (b"/b/0.png", "may be outside of"),
        (b"C:\\b\\0.png", "may be outside of"),
        (b"B/0.PNG", "did you mean b/0.png\\? \\(upper"),
    ],
)
def test_invalid_list_is_rejected(content: bytes, says: str, tmp_path: Path) -> None:
    for i in range(3):
        noise(tmp_path / "b" / f"{i}.png")
    (tmp_path / "test.txt").write_bytes(content)
    with pytest.raises(FczooError, match=says) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


def test_train_and_test_lists_are_read(tmp_path: Path) -> None:
    for name in "ab":
        for i in range(4):
            noise(tmp_path / name / f"{i}.png")
    (tmp_path / "train.txt").write_text("a/0.png\na/1.png\nb/0.png\nb/0.png\n")
    assert counts(tmp_path) == (3, 5)
    assert load(tmp_path).remarks == (
        "train.txt names 1 image more than once",
        "test part: the 5 images that train.txt does not list",
    )
    (tmp_path / "val.txt").write_text(
        "a/2.png 0\nb/2.png,1\n"
    )  # with labels, as other tools write them
    data = load(tmp_path)
    assert data.train.names == ("a/0.png", "a/1.png", "b/0.png")
    assert data.test.names == ("a/2.png", "b/2.png")
    assert data.remarks[1:] == ("3 images are not in train.txt and val.txt: not used",)
    (tmp_path / "test.txt").write_text("a/3.png\n")
    assert load(tmp_path).test.names == ("a/3.png",)
    assert "val.txt is not used; test.txt lists the test part" in load(tmp_path).remarks
    (tmp_path / "test.txt").write_text("a/3.png\na/1.png\n")
    with pytest.raises(
        FczooError, match=r"train.txt and .*test.txt both name a/1.png \(1 such images\)"
    ):
        load(tmp_path)


# ---------------------------------------------------------------- copies that users have sorted


@pytest.mark.parametrize("place", ["val/{}", "val/{}/images", "val/images/{}", "test/{}"])
def test_tinyimagenet_in_class_folders_is_read(place: str, tmp_path: Path) -> None:
    folder = tmp_path / "tiny-imagenet-200"
    for name in ("n01", "n02"):
        for i in range(3):
            noise(folder / "train" / name / "images" / f"{i}.JPEG")
        noise(folder / place.format(name) / "9.JPEG")
    assert counts(tmp_path, "tinyimagenet") == (6, 2)


def test_blank_lines_of_annotations_are_skipped(tmp_path: Path) -> None:
    folder = tmp_path / "tiny-imagenet-200"
    noise(folder / "train" / "n01" / "images" / "0.JPEG")
    noise(folder / "val" / "images" / "v.JPEG")
    (folder / "val" / "val_annotations.txt").write_text("v.JPEG\tn01\t0\t0\t1\t1\n\n")
    assert counts(tmp_path, "tinyimagenet") == (1, 1)


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("imagenet_r", "imagenet-r"),
        ("imagenet_a", "imagenet-a"),
        ("miniimagenet", "mini-imagenet"),
        ("cub200", "CUB_200_2011"),
        ("cifar100", "cifar-100-python"),
        ("cars196", "stanford_cars"),
    ],
)
def test_dataset_in_part_folders_is_read(name: str, folder: str, tmp_path: Path) -> None:
    parts(tmp_path / folder)
    assert counts(tmp_path, name) == (6, 2)


def few_shot(root: Path) -> Path:
    """Write a few-shot split with 12 images per class.

    Classes a and b are for training, c for validation, d for test.
    """
    for part, names in (("train", "ab"), ("val", "c"), ("test", "d")):
        for name in names:
            for i in range(12):
                noise(root / "mini-imagenet" / part / name / f"{name}{i}.jpg")
    return root


def tables(root: Path, place: str, parts: dict[str, list[str]]) -> Path:
    """Write the images of a few-shot split into one folder, with CSV files of the parts.

    Args:
        root: The folder to write to.
        place: Folder of the CSV files below the data set's folder.
        parts: Names of images by part.
    """
    source = few_shot(root / "source") / "mini-imagenet"
    folder = root / "mini-imagenet"
    (folder / "images").mkdir(parents=True)
    (folder / place).mkdir(exist_ok=True)
    for image in source.rglob("*.jpg"):
        image.rename(folder / "images" / image.name)
    for part, images in parts.items():
        rows = "".join(f"{image},{image[0]}\n" for image in images)
        (folder / place / f"{part}.csv").write_text(f"filename,label\n{rows}\n")
    return root


JOINED = (
    "have different classes (few-shot split): joined, then divided into training and test images"
)
FEW_SHOT = {
    part: [f"{name}{i}.jpg" for name in names for i in range(12)]
    for part, names in (("train", "ab"), ("val", "c"), ("test", "d"))
}


def test_few_shot_miniimagenet_is_joined_and_split(tmp_path: Path) -> None:
    folders = load(few_shot(tmp_path / "folders"), "miniimagenet")
    assert folders.classes == ("a", "b", "c", "d")
    assert np.bincount(folders.train.labels).tolist() == [10] * 4  # five sixths of 12
    assert folders.remarks == (f"train/, test/, val/ {JOINED}",)
    table_data = load(tables(tmp_path / "tables", "", FEW_SHOT), "miniimagenet")
    assert table_data.remarks == (f"train.csv, test.csv, val.csv {JOINED}",)
    plain = tmp_path / "plain" / "mini-imagenet"
    for part in (few_shot(tmp_path / "other") / "mini-imagenet").iterdir():
        for name in part.iterdir():
            plain.mkdir(parents=True, exist_ok=True)
            name.rename(plain / name.name)
    for data in (
        table_data,
        load(tmp_path / "plain", "miniimagenet"),
    ):  # the same images in any layout
        assert [Path(name).name for name in data.test.names] == [
            Path(name).name for name in folders.test.names
        ]
        assert (data.test.labels == folders.test.labels).all()
        assert data.split == folders.split
    assert folders.split == "a sixth of every class by sha256, seed 0"


def test_miniimagenet_tables_define_parts(tmp_path: Path) -> None:
    parts = {
        "train": [f"{name}{i}.jpg" for name in "abcd" for i in range(9)],
        "test": [f"{name}{i}.jpg" for name in "abcd" for i in range(9, 12)],
    }
    data = load(tables(tmp_path, "split", parts), "miniimagenet")
    assert data.split == "tables train.csv and test.csv"
    assert data.classes == ("a", "b", "c", "d")
    assert np.bincount(data.train.labels).tolist() == [9] * 4
    assert data.test.names[:3] == ("images/a10.jpg", "images/a11.jpg", "images/a9.jpg")


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        (
            {"train": ["a0.jpg", "x9.jpg"]},
            r"train.csv names x9.jpg, which is not in .*images or has no label \(1 such",
        ),
        ({"train": ["a0.jpg", "../b0.jpg"]}, r"which may be outside of"),
        (
            {"train": ["a0.jpg", "b0.jpg"], "test": ["b1.jpg"]},
            r"train.csv and test.csv in .* share only some of their classes",
        ),
    ],
)
def test_invalid_miniimagenet_tables_are_rejected(
    parts: dict[str, list[str]], says: str, tmp_path: Path
) -> None:
    with pytest.raises(FczooError, match=says):
        load(tables(tmp_path, "", parts), "miniimagenet")


def test_pickled_miniimagenet_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "mini-imagenet").mkdir()
    (tmp_path / "mini-imagenet" / "mini-imagenet-cache-train.pkl").write_bytes(b"")
    with pytest.raises(
        FczooError, match="pickle files, which can run code and are not read; expected"
    ):
        load(tmp_path, "miniimagenet")
