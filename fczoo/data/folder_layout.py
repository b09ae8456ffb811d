"""Layouts of image folders: class folders, or a training and a test part with class folders."""

from pathlib import Path

from fczoo.core.errors import FczooError
from fczoo.data.dataset import ImageData
from fczoo.data.division import find_lists, one_folder
from fczoo.data.folder_scan import TEST, TRAIN, find_named, has_images, normalise_name, subfolders
from fczoo.data.image_files import two_folders

LAYOUT_HINT = "expected {train,test}/CLASS/* or CLASS/*"


def read_folders(
    dataset: str,
    root: Path,
    size: int,
    classes: tuple[str, ...] | None = None,
    share: int = 5,
) -> ImageData:
    """Read ``train/CLASS/*`` and ``test/CLASS/*``, or ``CLASS/*``, which ``one_folder`` divides.

    The parts may have any of the names ``TRAIN`` and ``TEST``; the first test part with the
    training classes is used.

    Args:
        dataset: Name of the data set.
        root: Folder of the parts or of the class folders.
        size: Side in pixels at which images are stored.
        classes: Names of the classes. Default: the names of the folders.
        share: Number of images of a class per test image, without a test part.

    Raises:
        FczooError: Images are directly in a part, or one part is missing.
    """
    parts = find_parts(root)
    if parts is None:
        _refuse_inner(root)
        return one_folder(dataset, root, size, classes, share)
    train, test, remarks = parts
    if test is None:
        data = one_folder(dataset, train, size, classes, share)
    else:
        data = two_folders(dataset, train, test, size, classes)
    return data._replace(remarks=(*remarks, *data.remarks))


def find_parts(root: Path) -> tuple[Path, Path | None, tuple[str, ...]] | None:
    """Find the training and the test part.

    A part without folders of the training classes, such as an unlabelled ``test``, is skipped.

    Args:
        root: Folder that may hold the parts.

    Returns:
        The training part, the test part or None, and remarks; None without parts.

    Raises:
        FczooError: Images are directly in a part, or the training part is missing or occurs twice,
            or a list of files is next to it.
    """
    folders = subfolders(root)
    train = [root / name for name in find_named(folders, TRAIN)]
    tests = [root / name for name in find_named(folders, TEST)]
    parts = [*train, *tests]
    flat = [part for part in parts if not subfolders(part) and has_images(part)]
    holds_classes = any(subfolders(part) and not has_images(part) for part in parts)
    if not parts or not (holds_classes or len(parts) == len(folders) or (train and tests)):
        return None  # classes may be called so, too: train, car, bus
    if train and flat and (train[0] in flat or len(flat) == len(tests)):
        folder_names = " and ".join(f"{part.name}/" for part in flat)
        problem = (
            f"images are in {folder_names} {'themselves' if flat[1:] else 'itself'}, in {root}"
        )
        raise FczooError(f"{problem}; expected {flat[0].name}/CLASS/*, one folder per class")
    if len(train) > 1:
        raise FczooError(f"{train[0]} and {train[1]} are both the training part; keep one")
    if not train:
        raise FczooError(f"{root} has {tests[0].name}/ but no train/; {LAYOUT_HINT}")
    if tests:
        return _choose(train[0], tests)
    for path in find_lists(root, []).values():
        raise FczooError(f"{path} is not used there; move it to {train[0]}, with names below it")
    return (
        train[0],
        None,
        (f"no test part next to {train[0].name}/; it is drawn from {train[0].name}/",),
    )


def _choose(train: Path, tests: list[Path]) -> tuple[Path, Path, tuple[str, ...]]:
    """Return both parts, and a line on the others."""
    class_names = {normalise_name(name) for name in subfolders(train)}
    matching_parts = [
        part for part in tests if class_names & {normalise_name(name) for name in subfolders(part)}
    ]
    test = (matching_parts or tests)[0]
    remarks = []
    for part in tests:
        if part != test:
            why = "" if part in matching_parts else "has no folders of the training classes and "
            remarks.append(f"{part.name}/ {why}is not used; {test.name}/ is the test part")
    return train, test, tuple(remarks)


def _refuse_inner(root: Path) -> None:
    """Raise FczooError where the parts are one level too deep: in one folder or in each class."""
    folders = subfolders(root)
    inner = {name: subfolders(root / name) for name in folders}
    if len(folders) == 1 and inner[folders[0]] and not has_images(root / folders[0]):
        inner_folder = root / folders[0]
        problem = f"{root} holds one folder, {folders[0]}, and no class folders next to it"
        raise FczooError(f"{problem}; give --data-root {inner_folder}")
    if folders and all(
        find_named(names, TRAIN) and find_named(names, TEST) for names in inner.values()
    ):
        problem = f"the class folders in {root} hold train/ and test/ themselves"
        raise FczooError(f"{problem}; {LAYOUT_HINT}")
