"""Layouts of image folders: class folders, or a training and a test part with class folders."""

from pathlib import Path

from fczoo.core.errors import FczooError
from fczoo.data.dataset import ImageData
from fczoo.data.folder_scan import comparable, has_images, subfolders
from fczoo.data.image_files import one_folder, two_folders

TRAIN = ("train", "training")
TEST = ("test", "testing", "val", "valid", "validation", "dev")
"""Names of the parts, in any capitals. The first test part with the training classes is used."""
EXPECTED = "expected {train,test}/CLASS/* or CLASS/*"


def read_folders(dataset: str, root: Path, size: int, classes: tuple[str, ...] | None = None) -> ImageData:
    """Read ``train/CLASS/*`` and ``test/CLASS/*``, or ``CLASS/*``, which is divided here.

    The parts may have any of the names ``TRAIN`` and ``TEST``. Raises FczooError where images are
    directly in a part, or one part is missing.
    """
    found = find_parts(root)
    if found is None:
        _refuse_inner(root)
        return one_folder(dataset, root, size, classes)
    train, test, remarks = found
    if test is None:
        data = one_folder(dataset, train, size, classes)
    else:
        data = two_folders(dataset, train, test, size, classes)
    return data._replace(remarks=(*remarks, *data.remarks))


def find_parts(root: Path) -> tuple[Path, Path | None, tuple[str, ...]] | None:
    """Return the training part, the test part if any, and remarks; None where there are no parts.

    A part without folders of the training classes, such as an unlabelled ``test``, is skipped.
    """
    folders = subfolders(root)
    train = [root / name for name in _named(folders, TRAIN)]
    tests = [root / name for name in _named(folders, TEST)]
    parts = [*train, *tests]
    flat = [part for part in parts if not subfolders(part) and has_images(part)]
    holds_classes = any(subfolders(part) and not has_images(part) for part in parts)
    if not parts or not (holds_classes or len(parts) == len(folders) or (train and tests)):
        return None  # classes may be called so, too: train, car, bus
    if train and flat and (train[0] in flat or len(flat) == len(tests)):
        named = " and ".join(f"{part.name}/" for part in flat)
        problem = f"images lie in {named} {'themselves' if flat[1:] else 'itself'}, in {root}"
        raise FczooError(f"{problem}; expected {flat[0].name}/CLASS/*, one folder per class")
    if len(train) > 1:
        raise FczooError(f"{train[0]} and {train[1]} are both the training part; keep one")
    if not train:
        raise FczooError(f"{root} has {tests[0].name}/ but no train/; {EXPECTED}")
    if tests:
        return _choose(train[0], tests)
    if (root / "test.txt").is_file():
        raise FczooError(f"{root / 'test.txt'} is not used there; move it to {train[0]}, with names below it")
    return train[0], None, (f"no test part beside {train[0].name}/; it is drawn from {train[0].name}/",)


def _choose(train: Path, tests: list[Path]) -> tuple[Path, Path, tuple[str, ...]]:
    """Return both parts, and a line on the others."""
    known = {comparable(name) for name in subfolders(train)}
    labelled = [part for part in tests if known & {comparable(name) for name in subfolders(part)}]
    test = (labelled or tests)[0]
    remarks = []
    for part in tests:
        if part != test:
            why = "" if part in labelled else "has no folders of the training classes and "
            remarks.append(f"{part.name}/ {why}is not used; {test.name}/ is the test part")
    return train, test, tuple(remarks)


def _refuse_inner(root: Path) -> None:
    """Raise FczooError where the parts are one level too deep: in one folder or in each class."""
    folders = subfolders(root)
    inner = {name: subfolders(root / name) for name in folders}
    if len(folders) == 1 and inner[folders[0]] and not has_images(root / folders[0]):
        place = root / folders[0]
        problem = f"{root} holds one folder, {folders[0]}, and no class folders beside it"
        raise FczooError(f"{problem}; give --data-root {place}")
    if folders and all(_named(names, TRAIN) and _named(names, TEST) for names in inner.values()):
        problem = f"the class folders in {root} hold train/ and test/ themselves"
        raise FczooError(f"{problem}; {EXPECTED}")


def _named(folders: list[str], names: tuple[str, ...]) -> list[str]:
    """Return the folders with one of the names in any capitals, in the order of the names."""
    found = [name for name in folders if name.lower() in names]
    return sorted(found, key=lambda name: names.index(name.lower()))
