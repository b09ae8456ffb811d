"""What institutions agree on before a run between them: three short files that all of them have alike."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from fczoo.core.errors import FczooError, first_line
from fczoo.core.files import Count, encode_json, read_json, typed, write_json
from fczoo.core.method import Method
from fczoo.core.options import nearest
from fczoo.core.registry import create_method
from fczoo.federation.settings import Settings
from fczoo.sites.terms import check_sites

CLASSES, SCHEDULE, RUN = "classes.txt", "schedule.json", "run.toml"
DATASET = "imagefolder"
FIXED = {
    "dataset": "images are in a folder of each site's own",
    "data_root": "images are in a folder of each site's own",
    "clients": "they are the sites",
    "partition": "each site has its own images",
    "tasks": f"they are in {SCHEDULE}",
    "class_order": f"it is that of {SCHEDULE}",
    "class_order_seed": f"the order is that of {SCHEDULE}",
}
"""Settings that no agreement can name, and why."""


class _Run(msgspec.Struct, forbid_unknown_fields=True):
    """Content of ``run.toml``."""

    method: str
    sites: list[str]
    seed: Count = 0
    options: dict[str, Any] = {}
    settings: dict[str, Any] = {}


class _Schedule(msgspec.Struct, forbid_unknown_fields=True):
    """Content of ``schedule.json``."""

    tasks: list[list[str]]


@dataclass(frozen=True)
class Agreement:
    """What all have alike; weights may lie elsewhere for each, and images do."""

    sites: tuple[str, ...]
    classes: tuple[str, ...]  # names of folders; their places are the labels
    tasks: tuple[tuple[str, ...], ...]  # the classes of each
    method: Method
    seed: int
    settings: Settings

    @property
    def order(self) -> tuple[int, ...]:
        """Label of each class, in order of arrival."""
        return tuple(self.classes.index(name) for task in self.tasks for name in task)

    def number(self, site: str) -> int:
        """Which of the sites has a name. Raises FczooError where none has."""
        if site not in self.sites:
            raise FczooError(f"no site is called {site!r}; {nearest(site, list(self.sites))}")
        return self.sites.index(site)


def write_agreement(
    folder: Path, method: str, sites: Sequence[str], tasks: Sequence[Sequence[str]], settings: dict[str, Any]
) -> None:
    """Write the files of an agreement into a folder, to be handed to all sites.

    Raises FczooError where one is there already, and where they would not be read again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in (CLASSES, SCHEDULE, RUN):
        if (folder / name).exists():
            raise FczooError(f"{folder / name} exists already; choose another folder")
    classes = sorted(name for task in tasks for name in task)
    (folder / CLASSES).write_text("".join(f"{name}\n" for name in classes), encoding="utf-8")
    write_json(folder / SCHEDULE, {"tasks": [list(task) for task in tasks]})
    named = "".join(f"{name} = {encode_json(value)}\n" for name, value in settings.items())
    head = f"method = {encode_json(method)}\nsites = {encode_json(list(sites))}\nseed = 0\n"
    (folder / RUN).write_text(f"{head}\n[options]\n\n[settings]\n{named}", encoding="utf-8")
    read_agreement(folder)


def read_agreement(folder: Path) -> Agreement:
    """The agreement in a folder. Raises FczooError, naming the file, for whatever is wrong with it."""
    classes = _classes(folder / CLASSES)
    tasks = _tasks(folder / SCHEDULE, classes)
    run = _run(folder / RUN)
    for name in run.settings:
        if reason := FIXED.get(name):
            raise FczooError(f"{folder / RUN}: {name} is no setting here, {reason}; leave it out")
    method = create_method(run.method, **run.options)
    settings = Settings.for_dataset(
        DATASET,
        **run.settings,
        clients=len(run.sites),
        tasks=tuple(len(task) for task in tasks),
        class_order=tuple(classes.index(name) for task in tasks for name in task),
    )
    settings.check()
    check_sites(settings, method)
    return Agreement(tuple(run.sites), classes, tasks, method, run.seed, settings)


def _classes(path: Path) -> tuple[str, ...]:
    """The class list: one name a line, each once."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise FczooError(f"cannot read the class list {path}: {first_line(error)}") from error
    names = tuple(line.strip() for line in lines if line.strip())
    if twice := sorted(name for name in set(names) if names.count(name) > 1):
        raise FczooError(f"{path} names class {twice[0]} twice; name each once")
    if bad := [name for name in names if Path(name).name != name or name.startswith(".")]:
        raise FczooError(f"{path}: {bad[0]!r} cannot name a folder; each line names the folder of a class")
    if not names:
        raise FczooError(f"{path} is empty; write the name of one class a line")
    return names


def _tasks(path: Path, classes: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """The schedule: each class of the list in one task."""
    try:
        schedule = typed(read_json(path, "schedule"), _Schedule)
    except ValueError as error:
        raise FczooError(f"{path} is no valid schedule: {error}") from error
    named = [name for task in schedule.tasks for name in task]
    if unknown := sorted(set(named) - set(classes)):
        raise FczooError(f"{path} names class {unknown[0]}, which {CLASSES} lacks; give both the same")
    if missing := sorted(set(classes) - set(named)):
        raise FczooError(f"{path} has no task for class {missing[0]}; name each class of {CLASSES} once")
    if len(named) > len(classes):
        twice = next(name for name in named if named.count(name) > 1)
        raise FczooError(f"{path} names class {twice} twice; each class is of one task")
    if not all(schedule.tasks):
        raise FczooError(f"{path} has a task without classes; leave it out")
    return tuple(map(tuple, schedule.tasks))


def _run(path: Path) -> _Run:
    try:
        run = typed(tomllib.loads(path.read_text(encoding="utf-8")), _Run)
    except FileNotFoundError:
        raise FczooError(f"no {RUN} at {path}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise FczooError(f"{path} is no valid {RUN}: {first_line(error)}") from error
    if not run.sites or len(set(run.sites)) < len(run.sites):
        raise FczooError(f"{path}: sites must be a list of different names")
    return run
