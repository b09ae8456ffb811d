"""Tiny-ImageNet-200 (Stanford CS231N): 200 classes of ImageNet at 64x64."""

from pathlib import Path

import numpy as np

from fczoo.core.errors import FczooError
from fczoo.core.registry import register_dataset
from fczoo.data.dataset import Archive, Dataset, Defaults, ImageData, Official
from fczoo.data.image_files import ImageFiles, class_folders, class_names, part


@register_dataset("tinyimagenet")
class TinyImageNet(Dataset):
    """Classes in the order of their WordNet ids. The labelled part ``val`` is the test set.

    The part ``test`` has no labels and is not used.

    Stanford publishes no checksum of the archive; the MD5 here is the one that many independent loaders
    check.
    """

    classes = 200
    folder = "tiny-imagenet-200"
    source = "tiny-imagenet-200.zip (cs231n.stanford.edu/tiny-imagenet-200.zip)"
    layout = (
        "tiny-imagenet-200/{train/CLASS/images/*.JPEG,val/images/*.JPEG,val/val_annotations.txt,words.txt}"
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
        folders = class_folders(folder / "train", "images")
        ids = list(folders)
        notes = folder / "val" / "val_annotations.txt"
        if not notes.is_file():
            problem = f"no file {notes}; without it the test images have no labels"
            raise FczooError(f"{problem}, so unpack {self.source} again")
        pairs = [line.split("\t")[:2] for line in notes.read_text(encoding="utf-8").splitlines()]
        number = {name: i for i, name in enumerate(ids)}
        if wrong := [pair for pair in pairs if len(pair) < 2 or pair[1] not in number]:
            line = f"the line {' '.join(wrong[0])!r}, which names no class of {folder / 'train'}"
            raise FczooError(f"{notes} has {line}; the copy is incomplete")
        labels = np.array([number[name] for _, name in pairs], np.int64)
        test = ImageFiles(self.name, folder / "val" / "images", tuple(file for file, _ in pairs), labels, 64)
        return ImageData(
            part(self.name, folder / "train", folders, 64), test, class_names(ids, folder / "words.txt")
        )
