"""Folders of images as users have them: parts, subfolders, links, names and lists of every kind."""

import logging
import os
import shutil
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fczoo import FczooError
from fczoo.core.registry import DATASETS
from fczoo.data.dataset import ImageData
from fczoo.data.image_files import display_names
from fczoo.data.stream import make_stream
from fczoo.data.verify import verify


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FCZOO_HOME", str(tmp_path / "home"))


def noise(path: Path, mode: str = "RGB") -> None:
    """Write an image whose pixels follow from its path."""
    seed = list(os.fsencode(path))
    pixels = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).convert(mode).save(path)


def parts(root: Path, train: str = "train", test: str = "test") -> Path:
    """Write classes a and b with three training images and one test image each."""
    for name in "ab":
        for i in range(3):
            noise(root / train / name / f"{i}.png")
        noise(root / test / name / "9.png")
    return root


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
def test_parts_under_their_usual_names(train: str, test: str, tmp_path: Path) -> None:
    assert counts(parts(tmp_path, train, test)) == (6, 2)


def test_an_unlabelled_test_part_is_passed_over(tmp_path: Path) -> None:
    noise(parts(tmp_path, test="val") / "test" / "0.png")
    assert counts(tmp_path) == (6, 2)
    assert load(tmp_path).remarks == (
        "test/ has no folders of the training classes and is not used; val/ is the test part",
    )


def test_images_in_the_parts_themselves_are_refused(tmp_path: Path) -> None:
    for part in ("train", "valid"):
        noise(tmp_path / part / "0.png")
    with pytest.raises(FczooError, match=r"images lie in train/ and valid/ themselves.*expected train/CLASS"):
        load(tmp_path)


def test_classes_may_be_called_as_a_part(tmp_path: Path) -> None:
    for name in ("bus", "car", "train"):
        for i in range(5):
            noise(tmp_path / name / f"{i}.png")
    assert load(tmp_path).classes == ("bus", "car", "train") and counts(tmp_path) == (12, 3)


def test_a_training_part_alone_is_divided(tmp_path: Path) -> None:
    shutil.rmtree(parts(tmp_path) / "test")
    assert counts(tmp_path) == (4, 2) and "no test part beside train/" in load(tmp_path).remarks[0]


def test_parts_one_level_too_deep_are_refused(tmp_path: Path) -> None:
    parts(tmp_path / "outer" / "inner")
    with pytest.raises(FczooError, match=r"holds one folder, inner, .*; give --data-root .*inner"):
        load(tmp_path / "outer")


# ---------------------------------------------------------------- files


def test_subfolders_and_every_suffix_are_read(tmp_path: Path) -> None:
    parts(tmp_path)
    noise(tmp_path / "train" / "a" / "more" / "UPPER.PNG")
    for suffix, kind in (("pgm", "L"), ("pbm", "1"), ("pnm", "RGB"), ("jfif", "RGB"), ("tif", "RGB")):
        noise(tmp_path / "train" / "b" / f"x.{suffix}", kind)
    assert counts(tmp_path) == (12, 2) and load(tmp_path).remarks == ()
    assert verify("imagefolder", tmp_path)[1] == []


def test_what_is_not_read_is_counted(tmp_path: Path) -> None:
    parts(tmp_path)
    noise(tmp_path / "train" / "a" / "q.tga")
    shutil.copy(tmp_path / "train" / "a" / "0.png", tmp_path / "train" / "b" / "plain")
    noise(tmp_path / "train" / "loose.png")
    (tmp_path / "train" / "a" / "notes").write_text("no image")
    assert counts(tmp_path) == (6, 2)
    assert load(tmp_path).remarks == (
        "train/: 2 image files are not read (1 .tga, 1 without suffix); convert to PNG or JPEG",
        f"train/: 1 image lies in {tmp_path / 'train'} itself, outside of class folders: not read",
    )


def test_what_systems_leave_behind_is_left_out(tmp_path: Path) -> None:
    parts(tmp_path)
    for place in ("__MACOSX/a/1.png", "train/__MACOSX/1.png", "train/.cache/1.png", "train/a/@eaDir/1.png"):
        noise(tmp_path / place)
    (tmp_path / "train" / "a" / "Thumbs.db").write_bytes(b"x")
    assert load(tmp_path).classes == ("a", "b") and counts(tmp_path) == (6, 2)


def test_links_to_folders_are_followed_but_no_loops(tmp_path: Path) -> None:
    parts(tmp_path)
    for part in ("train", "test"):
        (tmp_path / part / "c").symlink_to(tmp_path / part / "b")
    (tmp_path / "train" / "a" / "self").symlink_to(tmp_path / "train" / "a")
    assert counts(tmp_path) == (9, 3) and "1 link is not followed" in load(tmp_path).remarks[0]


@pytest.mark.parametrize("place", ["train/a/x.png", "train/c"])
def test_a_broken_link_is_named(place: str, tmp_path: Path) -> None:
    (parts(tmp_path) / place).symlink_to("/nowhere")
    with pytest.raises(FczooError, match=rf"broken symbolic link {tmp_path / place} -> /nowhere; bring back"):
        load(tmp_path)


# ---------------------------------------------------------------- names and lists


def test_accents_are_compared_in_one_form(tmp_path: Path) -> None:
    parts(tmp_path)
    noise(tmp_path / "train" / unicodedata.normalize("NFC", "café") / "0.png")
    noise(tmp_path / "test" / unicodedata.normalize("NFD", "café") / "0.png")
    assert counts(tmp_path) == (7, 3)


def test_capitals_are_told_apart(tmp_path: Path) -> None:
    parts(tmp_path)
    noise(tmp_path / "train" / "Cat" / "0.png")
    noise(tmp_path / "test" / "cat" / "0.png")
    with pytest.raises(FczooError, match=r"Cat is in one of them only \(train/\), in these capitals"):
        load(tmp_path)


def test_names_that_are_not_utf8_are_shown_with_replacement_characters() -> None:
    assert display_names([os.fsdecode(b"\xe9t\xe9"), "a"]) == ("\ufffdt\ufffd", "a")
    assert display_names([os.fsdecode(b"\xff"), os.fsdecode(b"\xfe")]) == ("\ufffd (ff)", "\ufffd (fe)")


LISTED = "猫/0.png\nb/0.png\n"


@pytest.mark.parametrize(
    "content",
    [
        LISTED.encode("utf-8-sig"),
        LISTED.replace("/", "\\").encode(),
        b"./b/0.png\r\n\r\n" + "./猫/0.png\r\n\r\n".encode(),
        (LISTED + LISTED).encode(),
    ],
)
def test_a_list_in_any_usual_form(content: bytes, tmp_path: Path) -> None:
    for name in ("猫", "b"):
        for i in range(3):
            noise(tmp_path / name / f"{i}.png")
    (tmp_path / "test.txt").write_bytes(content)
    assert counts(tmp_path) == (4, 2)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (LISTED.encode("utf-16"), "is not UTF-8 text but UTF-16"),
        ("café/0.png".encode("latin-1"), "is not UTF-8 text but another encoding"),
        ("猫/0.png".encode("gbk"), "is the list in another encoding"),
        (b"../b/0.png", "may lie outside of"),
        (b"/b/0.png", "may lie outside of"),
        (b"C:\\b\\0.png", "may lie outside of"),
        (b"B/0.PNG", "b/0.png is there, mind the capitals"),
    ],
)
def test_a_list_that_does_not_fit(content: bytes, says: str, tmp_path: Path) -> None:
    for i in range(3):
        noise(tmp_path / "b" / f"{i}.png")
    (tmp_path / "test.txt").write_bytes(content)
    with pytest.raises(FczooError, match=says) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------- copies that users have sorted


@pytest.mark.parametrize("place", ["val/{}", "val/{}/images", "val/images/{}", "test/{}"])
def test_tinyimagenet_sorted_into_class_folders(place: str, tmp_path: Path) -> None:
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
    ],
)
def test_copies_sorted_into_parts(name: str, folder: str, tmp_path: Path) -> None:
    parts(tmp_path / folder)
    assert counts(tmp_path, name) == (6, 2)


# ---------------------------------------------------------------- test images that are training images


def test_shared_images_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    parts(tmp_path)
    for i in range(2):
        shutil.copy(tmp_path / "train" / "a" / f"{i}.png", tmp_path / "test" / "a" / f"{i}.png")
    table, wrong = verify("imagefolder", tmp_path)
    assert table.splitlines()[-1] == "2 test images are also training images" and wrong == []
    with caplog.at_level(logging.WARNING):
        stream = make_stream("imagefolder", tmp_path, tasks=1)
    said = "imagefolder: 2 test images are also training images"
    assert stream.remarks == (said,) and said in caplog.messages
    assert make_stream("digits").remarks == ()


def test_an_image_in_two_classes_is_said(tmp_path: Path) -> None:
    parts(tmp_path)
    shutil.copy(tmp_path / "train" / "a" / "0.png", tmp_path / "train" / "b" / "8.png")
    assert "1 image is in more than one class, such as a and b" in verify("imagefolder", tmp_path)[0]
