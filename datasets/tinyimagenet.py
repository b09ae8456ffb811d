"""Tiny-ImageNet-200 (Stanford CS231N): 200 classes of ImageNet at 64x64."""

from pathlib import Path

import numpy as np

from fczoo.core.errors import FczooError
from fczoo.core.registry import register_dataset
from fczoo.data.dataset import Archive, Dataset, Defaults, ImageData, Official
from fczoo.data.folder_scan import class_names, has_images, normalise_path, read_list, subfolders
from fczoo.data.image_files import (
    ImageFiles,
    describe_unread_files,
    list_images,
    make_part,
    read_train_test_folders,
    scan_classes,
)


@register_dataset("tinyimagenet")
class TinyImageNet(Dataset):
    """Classes in the order of their WordNet ids. The labelled part ``val`` is the test set.

    The part ``test`` has no labels and is not used. Test images that were sorted into class folders
    (``val/CLASS/*``, also ``val/images/CLASS/*`` or ``test/CLASS/*``) are read from there.

    Stanford publishes no checksum of the archive; fczoo checks the MD5 that many independent
    loaders check.
    """

    classes = 200
    folder = "tiny-imagenet-200"
    source = "tiny-imagenet-200.zip (cs231n.stanford.edu/tiny-imagenet-200.zip)"
    layout = (
        "tiny-imagenet-200/{train/CLASS/images/*.JPEG,val/images/*.JPEG,"
        "val/val_annotations.txt,words.txt}"
    )
    licence = "ImageNet's terms: non-commercial research and education"
    official = Official(100_000, 10_000, 500, 50)
    archives = (
        Archive(
            "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
            "90528d7ca1a48142e341f4ef8d21d0de",
            248_100_043,
            sha256="6198c8ae015e2b3e007c7841da39ec069199b9aa3bfa943a462022fe5e43c821",
        ),
    )
    overlaps = {"tinyimagenet": "all", "imagenet1k": "all"}
    about = "Tiny-ImageNet, 200 classes, 500 training and 50 test images each, 64x64"
    defaults = Defaults()

    def load(self, root: Path) -> ImageData:
        folder = self.locate(root)
        train, images = folder / "train", folder / "val" / "images"
        ids = subfolders(train)
        names = class_names(ids, folder / "words.txt")
        notes = folder / "val" / "val_annotations.txt"
        test = (
            None
            if notes.is_file() and images.is_dir() and has_images(images)
            else _find_test_folders(folder, ids)
        )
        if test is not None:
            return read_train_test_folders(self.name, train, test, 64, names)
        if not notes.is_file():
            problem = f"no file {notes}; without it the test images have no labels"
            raise FczooError(f"{problem}, so unpack {self.source} again")
        scans = scan_classes(train)
        files, labels = _read_annotations(notes, train, ids)
        return ImageData(
            make_part(self.name, train, list_images(train, scans), 64),
            ImageFiles(self.name, images, files, labels, 64),
            names,
            remarks=tuple(describe_unread_files(train, scans)),
        )


def _find_test_folders(folder: Path, ids: list[str]) -> Path | None:
    """Return the folder in which users have sorted the test images into class folders, if any."""
    for candidate in (folder / "val", folder / "val" / "images", folder / "test"):
        if candidate.is_dir() and set(ids) & set(subfolders(candidate)):
            return candidate
    return None


def _read_annotations(
    notes: Path, train: Path, ids: list[str]
) -> tuple[tuple[str, ...], np.ndarray]:
    """Return file names and labels of the test images.

    Raises:
        FczooError: A line does not fit.
    """
    number, label_by_file = {name: i for i, name in enumerate(ids)}, dict[str, int]()
    for line in read_list(notes):
        file, label = (*line.split(), "", "")[:2]
        if label not in number:
            problem = (
                f"{notes} has the line {f'{file} {label}'.strip()!r}, which names no class of "
                f"{train}"
            )
            raise FczooError(f"{problem}; the copy is incomplete, get it again")
        if label_by_file.setdefault(normalise_path(file, notes), number[label]) != number[label]:
            raise FczooError(f"{notes} gives {file} two classes; the copy is damaged, get it again")
    return tuple(label_by_file), np.array(list(label_by_file.values()), np.int64)
