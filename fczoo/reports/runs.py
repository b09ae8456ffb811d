"""Run folders, read back: which runs belong side by side, and under which names."""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fczoo.core.errors import FczooError
from fczoo.core.files import read_json, through_json
from fczoo.core.options import build
from fczoo.data.partition import Partition, load_partition
from fczoo.federation.result import Result, fits, read_result
from fczoo.federation.settings import Settings
from fczoo.reports.words import word

ABOUT, PARTITION, RESULT, FAILURE, ROUNDS = (
    "bench.json",
    "partition.json",
    "result.json",
    "failed.json",
    "rounds.jsonl",
)
WHERE = (
    "data_root",
    "device",
    "together",
    "protocol",
)  # settings that say where, how and after whom a run was made, not what it is


SHAPE: dict[str, Any] = {  # of bench.json
    "methods": dict[str, dict[str, Any]],
    "seeds": list[int],
    "settings": dict[str, Any],
    "backbone": dict[str, Any],
    "partition": dict[str, Any],
    "device": str,
    "versions": dict[str, Any],
    "hardware": dict[str, Any],
    "started": str,
    "command": list[str],
    "earlier_commands": list[list[str]],
}
NEEDED = {"methods", "seeds", "settings", "backbone", "partition", "device"}
NAMES = {"backbone": ("name", "sha256"), "partition": ("spec", "sha256")}


@dataclass(frozen=True)
class Cell:
    """One method with one seed. ``problem`` says why it is not finished; such a cell takes part in no table."""

    folder: Path
    about: dict[str, Any]  # bench.json of the run folder
    method: str
    seed: int
    result: Result | None
    problem: str = ""


@dataclass(frozen=True)
class Line:
    """One row of a table: a method with its options, and its finished runs by seed."""

    label: str
    cells: tuple[Cell, ...]

    @property
    def seeds(self) -> list[int]:
        return [c.seed for c in self.cells]

    @property
    def results(self) -> list[Result]:
        return [c.result for c in self.cells if c.result is not None]

    @property
    def remark(self) -> str:
        """What a reader must know of the method as it ran; mostly nothing."""
        return self.results[0].remark

    @property
    def competes(self) -> bool:
        """Upper bounds see images that no client has; they are shown, but not ranked."""
        return not self.remark.startswith("upper bound")


@dataclass(frozen=True)
class Experiment:
    """Runs with the same data, split, backbone and schedule: their numbers may stand in one table."""

    lines: tuple[Line, ...]
    unfinished: tuple[Cell, ...]
    abouts: tuple[dict[str, Any], ...]  # bench.json of each run folder that takes part
    folders: tuple[Path, ...]

    @property
    def settings(self) -> dict[str, Any]:
        return filled(self.abouts[0]["settings"])

    @property
    def task_count(self) -> int:
        tasks = self.settings["tasks"]
        return tasks if isinstance(tasks, int) else len(tasks)

    @property
    def seeds(self) -> list[int]:
        return sorted({s for line in self.lines for s in line.seeds})

    @cached_property
    def partition(self) -> Partition:
        return load_partition(self.folders[0] / PARTITION)

    @property
    def first(self) -> Result:
        """Any finished result: tasks, test images and backbone are the same in all of them."""
        return self.lines[0].results[0]

    def describe(self) -> str:
        """What was run, in two lines."""
        s, about, result = self.settings, self.abouts[0], self.first
        sizes, backbone = sorted(set(result.task_sizes)), about["backbone"]
        classes = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
        order = (
            "natural class order"
            if s["class_order_seed"] is None
            else f"class order seed {s['class_order_seed']}"
        )
        order = order if s["class_order"] == "natural" else "given class order"
        joining = f" and {s['joining']} more a task" if s["joining"] else ""
        images = f"{len(np.unique(np.concatenate([part for task in self.partition.tasks for part in task])))} training and {sum(result.test_counts)} test"
        split = (
            f"{about['partition']['spec']} (seed {self.partition.seed}, {about['partition']['sha256'][:8]})"
        )
        devices = ", ".join(dict.fromkeys(a["device"] for a in self.abouts))
        return (
            f"{s['dataset']}: {len(result.task_sizes)} tasks of {classes} classes, {images} images, {order}; "
            f"{s['clients']} clients{joining}, {split}, participation {s['participation']:g}\n"
            f"{backbone['name']} ({backbone['sha256'][:8]}, {s['precision']}, {devices}); {s['rounds']} rounds x {s['epochs']} epochs, "
            f"batch {s['batch_size']}, augmentation {s['augment']}; seeds {', '.join(map(str, self.seeds))}"
        )


def filled(settings: dict[str, Any]) -> dict[str, Any]:
    """Recorded settings with the defaults of those that an older version did not have."""
    return {**{f.name: f.default for f in dataclasses.fields(Settings)}, **settings}


def identity(about: dict[str, Any]) -> tuple[Any, ...]:
    """Equal for runs whose numbers may stand in one table."""
    same = {
        k: v
        for k, v in filled(about["settings"]).items()
        if k not in (*WHERE, "backbone", "partition", "partition_seed")
    }
    return (*(str(v) for v in same.values()), about["backbone"]["sha256"], about["partition"]["sha256"])


def run_folders(places: Iterable[Path]) -> list[Path]:
    """The run folders at or below some places. Raises FczooError for a place without any."""
    found: list[Path] = []
    for place in places:
        here = [place] if (place / ABOUT).is_file() else sorted(p.parent for p in place.rglob(ABOUT))
        if not here:
            raise FczooError(f"no run folder at or below {place}; give a folder that fczoo bench wrote")
        found += [p for p in here if p not in found]
    return found


def read_about(folder: Path) -> dict[str, Any]:
    """``bench.json`` of a run folder. Raises FczooError when it lacks what names an experiment, or says what cannot be."""
    path = folder / ABOUT
    about = read_json(path, "run description")
    if missing := NEEDED - about.keys():
        raise FczooError(f"{path} is no valid run description: it lacks {', '.join(sorted(missing))}")
    wrong = [k for k, hint in SHAPE.items() if k in about and not fits(about[k], hint)]
    wrong += [
        f"{k}.{name}"
        for k in ("backbone", "partition")
        for name in NAMES[k]
        if k not in wrong and not isinstance(about[k].get(name), str)
    ]
    wrong += (
        [f"methods.{m!r}" for m in about["methods"] if Path(m).name != m or "\\" in m]
        if "methods" not in wrong
        else []
    )  # they name folders
    if wrong:
        raise FczooError(
            f"{path} is no valid run description: {wrong[0]} has another form than fczoo writes; leave the folder out"
        )
    known = {f.name for f in dataclasses.fields(Settings)} & about["settings"].keys()
    try:
        read = dataclasses.asdict(build(Settings, "settings", {k: about["settings"][k] for k in known}))
    except FczooError as error:
        raise FczooError(f"{path} is no valid run description: {error}") from error
    return {**about, "settings": {**about["settings"], **through_json({k: read[k] for k in known})}}


def read_cells(folder: Path, about: dict[str, Any]) -> list[Cell]:
    """Every method and seed for which a run folder has a place, finished or not."""
    cells = []
    for method in about["methods"]:
        for seed in about["seeds"]:
            place = folder / method / f"seed{seed}"
            if not place.is_dir():
                continue
            result = read_result(place / RESULT) if (place / RESULT).is_file() else None
            done = 0 if result is None else len(result.accuracy)
            problem = ""
            if (place / FAILURE).is_file():
                problem = read_json(place / FAILURE, "failure record").get("error", "failed")
            elif result is None or done < len(result.task_sizes):
                problem = (
                    "not begun"
                    if result is None
                    else f"stopped after task {done} of {len(result.task_sizes)}"
                )
            cells.append(Cell(place, about, method, seed, None if problem else result, problem))
    return cells


def read_experiments(places: Iterable[Path]) -> list[Experiment]:
    """What the run folders hold, one experiment for each data set, split, backbone and schedule.

    Raises FczooError where nothing is finished, or where two folders hold the same run.
    """
    groups: dict[tuple, list[Path]] = {}
    abouts = {}
    for folder in run_folders(places):
        abouts[folder] = read_about(folder)
        groups.setdefault(identity(abouts[folder]), []).append(folder)
    experiments = [_experiment(folders, [abouts[f] for f in folders]) for folders in groups.values()]
    if not any(e.lines for e in experiments):
        raise FczooError(
            f"no run is finished in {', '.join(map(str, places))}; the same bench command carries on"
        )
    return [e for e in experiments if e.lines]


def _experiment(folders: Sequence[Path], abouts: Sequence[dict[str, Any]]) -> Experiment:
    cells = [
        cell for folder, about in zip(folders, abouts, strict=True) for cell in read_cells(folder, about)
    ]
    groups: dict[tuple[str, str], dict[int, Cell]] = {}
    for cell in cells:
        if cell.result is None:
            continue
        runs = groups.setdefault((cell.method, str(sorted(cell.result.options.items()))), {})
        if cell.seed in runs:
            raise FczooError(
                f"{cell.method} with seed {cell.seed} is in {runs[cell.seed].folder} and in {cell.folder}; give one of the two"
            )
        runs[cell.seed] = cell
    lines = [Line(_label(key, groups), tuple(runs[s] for s in sorted(runs))) for key, runs in groups.items()]
    return Experiment(
        tuple(lines), tuple(c for c in cells if c.result is None), tuple(abouts), tuple(folders)
    )


def _label(key: tuple[str, str], groups: dict[tuple[str, str], dict[int, Cell]]) -> str:
    """The method's name, with those options in which it differs from its namesakes."""
    options = {
        k: next(r.result.options for r in runs.values() if r.result)
        for k, runs in groups.items()
        if k[0] == key[0]
    }
    own = options[key]
    names = [n for n in own if any(other.get(n) != own[n] for other in options.values())]
    return f"{key[0]} ({', '.join(f'{n}={word(own[n])}' for n in names)})" if names else key[0]
