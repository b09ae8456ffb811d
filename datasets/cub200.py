"""CUB-200-2011 (Wah et al., 2011): 200 kinds of birds, with the official split."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from fczoo.core.errors import FczooError
from fczoo.core.registry import register_dataset
from fczoo.data.dataset import Archive, Dataset, Defaults, ImageData, Official
from fczoo.data.folder_layout import find_parts, read_folders
from fczoo.data.folder_scan import normalise_path, read_list
from fczoo.data.image_files import ImageFiles


@register_dataset("cub200")
class CUB200(Dataset):
    """5,994 training and 5,794 test images, split by ``train_test_split.txt``.

    Bounding boxes are not used.

    Without ``images.txt``, images are read from ``train/CLASS/*`` and ``test/CLASS/*``.
    """

    classes = 200
    folder = "CUB_200_2011"
    source = "CUB_200_2011.tgz (data.caltech.edu/records/65de6-vp158)"
    layout = (
        "CUB_200_2011/{images/CLASS/*.jpg,images.txt,image_class_labels.txt,"
        "train_test_split.txt,classes.txt}"
    )
    licence = "non-commercial research and education; the images belong to their makers"
    official = Official(5_994, 5_794)
    archives = (
        Archive(
            "https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz",
            "97eceeb196236b17998738112f37df78",
            1_150_585_339,
            sha256="0c685df5597a8b24909f6a7c9db6d11e008733779a671760afef78feb49bf081",
        ),
    )
    overlaps = {"imagenet1k": "some"}
    about = "CUB-200-2011, 200 birds, 5,994 training and 5,794 test images, kept at 256x256"
    defaults = Defaults(partition="dirichlet:1")

    def load(self, root: Path) -> ImageData:
        folder = self.locate(root)
        if not (folder / "images.txt").is_file() and find_parts(folder):
            data = read_folders(self.name, folder, 256)
            return data._replace(classes=_birds(data.classes))
        files, labels = _table(folder / "images.txt"), _table(folder / "image_class_labels.txt")
        train, names = _table(folder / "train_test_split.txt"), _table(folder / "classes.txt")
        try:
            parts = []
            for part_flag in ("1", "0"):
                ids = [i for i in files if train[i] == part_flag]
                paths = tuple(normalise_path(files[i], folder / "images.txt") for i in ids)
                numbers = np.array([int(labels[i]) - 1 for i in ids], np.int64)
                parts.append(ImageFiles(self.name, folder / "images", paths, numbers, 256))
            # such as 001.Black_footed_Albatross
            class_names = [names[str(i + 1)] for i in range(len(names))]
            classes = _birds(class_names)
        except (KeyError, ValueError) as error:
            problem = f"the lists in {folder} contradict each other ({error})"
            raise FczooError(f"{problem}; unpack {self.source} again") from error
        return ImageData(parts[0], parts[1], classes)


def _birds(numbered: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the birds without their numbers."""
    return tuple((name.partition(".")[2] or name).replace("_", " ") for name in numbered)


def _table(path: Path) -> dict[str, str]:
    """Read ``ID VALUE`` lines.

    Raises:
        FczooError: The file is missing or has other lines.
    """
    if not path.is_file():
        raise FczooError(f"no file {path}; unpack {CUB200.source} again")
    rows = [line.split(maxsplit=1) for line in read_list(path)]
    if wrong := [row for row in rows if len(row) != 2]:
        problem = f"{path} has the line {wrong[0][0]!r}, expected ID VALUE"
        raise FczooError(f"{problem}; unpack {CUB200.source} again")
    return {key: value.strip() for key, value in rows}
