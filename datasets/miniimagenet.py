"""Mini-ImageNet (Vinyals et al., 2016), split within its classes as class-incremental work does."""

import csv
import io
import itertools
from pathlib import Path

from fczoo.core.errors import FczooError
from fczoo.core.registry import register_dataset
from fczoo.data.dataset import Dataset, Defaults, ImageData, Official
from fczoo.data.folder_layout import divide, read_folders
from fczoo.data.folder_scan import TEST, TRAIN, find_named, normalise_path, read_list, subfolders
from fczoo.data.image_files import class_folders
from fczoo.data.image_files import make_part as image_part

SIZE = 84
SHARE = 6  # 100 of 600 images per class are for testing, as in FCILPT
Part = dict[str, list[str]]
"""Class -> names of its images below the data set's folder."""


@register_dataset("miniimagenet")
class MiniImageNet(Dataset):
    """100 classes of 600 images, kept at 84x84.

    As in FCILPT, 500 images of each class are for training and 100 for testing.

    A part ``val`` or ``test`` next to ``train`` is the test part if it has the same classes. The
    three parts of the few-shot split, with 64, 16 and 20 different classes, are joined. If the
    classes of a copy are not divided into training and test images, a list ``test.txt`` names the
    test images; without it the seeded rule of ``imagenet_r`` selects a sixth of each class. Parts
    may be folders of class folders, or ``train.csv``, ``val.csv`` and ``test.csv`` with columns
    ``filename,label`` next to ``images/``. For a copy at full resolution use ``--stored-size 224``.
    """

    classes = 100
    folder = "mini-imagenet"
    source = (
        "a copy made from ImageNet-1k (image-net.org; its terms forbid redistribution, "
        "so no official archive exists)"
    )
    layout = (
        "mini-imagenet/{train,val}/CLASS/*.jpg, mini-imagenet/CLASS/*.jpg, or "
        "mini-imagenet/images/*.jpg with CSVs"
    )
    licence = "ImageNet's terms: non-commercial research and education"
    official = Official(50_000, 10_000, 500, 100)
    overlaps = {"tinyimagenet": "some", "imagenet1k": "all"}  # 25 of 100 in Tiny-ImageNet
    about = "Mini-ImageNet, 100 classes, 500 training and 100 test images each, 84x84"
    defaults = Defaults()

    def load(self, root: Path) -> ImageData:
        folder = self.locate(root)
        tables = _tables(folder)
        parts = {table.name: _read_table(table, folder) for table in tables} or _part_folders(
            folder
        )
        if (tables or len(parts) > 1) and _are_disjoint(parts):
            images_by_class = dict(
                sorted(itertools.chain.from_iterable(part.items() for part in parts.values()))
            )
            remark = (
                f"{', '.join(parts)} have different classes (few-shot split): joined, then divided "
                "into training and test images"
            )
            remarks = (remark,) if len(parts) > 1 else ()
            return divide(
                self.name, folder, images_by_class, SIZE, share=SHARE, key=_key, remarks=remarks
            )
        if tables:
            return _tables_as_parts(self.name, folder, parts)
        if not subfolders(folder) and any(folder.glob("*.pkl")):
            problem = f"{folder} has pickle files, which can run code and are not read"
            raise FczooError(f"{problem}; expected: {self.layout}")
        return read_folders(self.name, folder, SIZE, share=SHARE)


def _tables(folder: Path) -> list[Path]:
    """Return the CSV files of the parts, from the folder or its ``split``; training first."""
    for candidate in (folder, folder / "split"):
        files = {path.stem: path for path in sorted(candidate.glob("*.csv"))}
        if train := find_named(files, TRAIN):
            return [files[name] for name in (train[0], *find_named(files, TEST))]
    return []


def _part_folders(folder: Path) -> dict[str, Part]:
    """Return the parts that are folders of class folders."""
    names = [name for kind in (TRAIN, TEST) for name in find_named(subfolders(folder), kind)]
    names = [name for name in names if subfolders(folder / name)]
    return {
        f"{name}/": {
            label: [f"{name}/{image}" for image in images]
            for label, images in class_folders(folder / name).items()
        }
        for name in names
    }


def _read_table(table: Path, folder: Path) -> Part:
    """Return the images of a CSV file with the columns ``filename`` and ``label``.

    Raises:
        FczooError: The file has other columns, or images are missing.
    """
    rows = csv.DictReader(io.StringIO("\n".join(read_list(table))))
    if not {"filename", "label"} <= set(rows.fieldnames or ()):
        raise FczooError(f"{table} must have the columns filename and label in its first line")
    image_folder = folder / "images" if (folder / "images").is_dir() else folder
    below = f"{image_folder.name}/" if image_folder != folder else ""
    files = {
        path.relative_to(image_folder).as_posix()
        for path in image_folder.rglob("*")
        if path.is_file()
    }
    images: Part = {}
    missing = []
    for row in rows:
        name, label = normalise_path(row["filename"] or "", table), (row["label"] or "").strip()
        if name not in files or not label:
            missing.append(name)
        images.setdefault(label, []).append(f"{below}{name}")
    if missing:
        problem = (
            f"{table} names {missing[0]}, which is not in {image_folder} or has no label "
            f"({len(missing)} such lines)"
        )
        raise FczooError(f"{problem}; the copy is incomplete, get another one")
    return {label: sorted(set(images[label])) for label in sorted(images)}


def _are_disjoint(parts: dict[str, Part]) -> bool:
    """Return whether no two parts have a class in common."""
    return all(
        not first.keys() & second.keys()
        for first, second in itertools.combinations(parts.values(), 2)
    )


def _key(label: str, name: str) -> str:
    """Return CLASS/FILE, so that all layouts are divided alike."""
    return f"{label}/{name.rpartition('/')[2]}"


def _tables_as_parts(dataset: str, folder: Path, parts: dict[str, Part]) -> ImageData:
    """Return the training part and the first other part with the same classes, both from CSV files.

    Raises:
        FczooError: No other part has the same classes.
    """
    train, *others = parts
    same = [name for name in others if parts[name].keys() == parts[train].keys()]
    if not same:
        problem = f"{train} and {others[0]} in {folder} share only some of their classes"
        raise FczooError(f"{problem}; parts must share all of their classes or none")
    test = same[0]
    remarks = tuple(
        f"{name} is not used; {test} is the test part" for name in others if name != test
    )
    train_part, test_part = (
        image_part(dataset, folder, parts[name], SIZE) for name in (train, test)
    )
    return ImageData(
        train_part, test_part, tuple(parts[train]), f"tables {train} and {test}", remarks
    )
