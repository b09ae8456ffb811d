"""Runs from run folders and archives: which belong side by side, and under which names."""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fczoo.core.errors import FczooError
from fczoo.core.files import encode_json
from fczoo.federation.result import Result
from fczoo.federation.settings import MOVED, Settings
from fczoo.reports.archive import read_archive
from fczoo.reports.run_folder import ABOUT, About, Cell, Runs, Split, read_folder, read_saved_result
from fczoo.reports.words import option_word

ARCHIVE = "results.csv"  # an archive of this name is found in a folder
WITHOUT_EFFECT = ("data_root", "device", "together", "protocol", "as_released")
"""Settings that say where, how and after whom a run was made; they change no number."""


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

    @property
    def tuned(self) -> bool:
        """Whether ``fczoo tune`` found the values of all of its runs."""
        return all(cell.trials for cell in self.cells)


@dataclass(frozen=True)
class Experiment:
    """Runs with the same data, split, backbone and schedule: their numbers may stand in one table."""

    lines: tuple[Line, ...]
    unfinished: tuple[Cell, ...]
    runs: tuple[Runs, ...]  # the run folders that take part

    @property
    def about(self) -> About:
        """The first folder's description; of data, split, backbone and schedule all say the same."""
        return self.runs[0].about

    @property
    def settings(self) -> dict[str, Any]:
        return filled(self.about.settings)

    @property
    def task_count(self) -> int:
        tasks = self.settings["tasks"]
        if isinstance(tasks, str):
            return len(self.first.task_sizes)
        return tasks if isinstance(tasks, int) else len(tasks)

    @property
    def seeds(self) -> list[int]:
        return sorted({s for line in self.lines for s in line.seeds})

    @property
    def split(self) -> Split:
        return self.runs[0].split

    @property
    def first(self) -> Result:
        """Any finished result: tasks, test images and backbone are the same in all of them."""
        return self.lines[0].results[0]


def filled(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Recorded settings with the defaults of those that an older version did not have."""
    return {**{f.name: f.default for f in dataclasses.fields(Settings)}, **settings}


def identity(about: About) -> tuple[str, ...]:
    """Equal for runs whose numbers may stand in one table."""
    settings = filled(about.settings)
    by_seed = {MOVED[word] for word in settings["vary"]} - {None}
    split = settings["partition"] if by_seed else about.partition["sha256"]
    by_split = () if by_seed else ("partition_seed",)  # the same split may have come of another one
    apart = (*WITHOUT_EFFECT, "backbone", "partition", *by_split, *by_seed)
    same = [encode_json(value) for name, value in settings.items() if name not in apart]
    return (*same, about.backbone["sha256"], split)


def places_below(place: Path) -> list[Path]:
    """The run folders and archives that a path names, or that lie below it."""
    if place.is_file() or (place / ABOUT).is_file():
        return [place]
    return sorted([*(p.parent for p in place.rglob(ABOUT)), *place.rglob(ARCHIVE)])


def read_runs(places: Iterable[Path]) -> list[Runs]:
    """What run folders and archives at or below some places hold.

    Raises FczooError for a place without any.
    """
    found: dict[Path, Runs | list[Runs]] = {}
    for place in places:
        here = places_below(place)
        if not here:
            raise FczooError(
                f"no run folder at or below {place}; give a folder that fczoo bench wrote, or an "
                f"archive of runs"
            )
        for path in here:
            name = path.resolve().name if path == place else path.relative_to(place).as_posix()
            if path not in found:
                found[path] = _read(path, name)
    return [runs for some in found.values() for runs in (some if isinstance(some, list) else [some])]


def _read(path: Path, name: str) -> Runs | list[Runs]:
    if not path.is_file():
        return read_folder(path, name)
    return read_saved_result(path, name) if path.suffix == ".json" else read_archive(path)


def read_experiments(places: Sequence[Path]) -> list[Experiment]:
    """What some places hold, one experiment for each data set, split, backbone and schedule.

    Raises FczooError where nothing is finished, or where two folders hold the same run with other numbers.
    """
    return experiments_of(read_runs(places), ", ".join(map(str, places)))


def experiments_below(place: Path) -> list[Experiment]:
    """What a folder holds, as ``read_experiments`` says; nothing where there is no finished run in it."""
    return _grouped(read_runs([place])) if place.exists() and places_below(place) else []


def experiments_of(found: Iterable[Runs], place: str) -> list[Experiment]:
    """Runs grouped as ``read_experiments`` does; ``place`` is where they are, for messages."""
    experiments = _grouped(found)
    if not experiments:
        raise FczooError(f"no run is finished in {place}; the same bench command carries on")
    return experiments


def _grouped(found: Iterable[Runs]) -> list[Experiment]:
    groups: dict[tuple[str, ...], list[tuple[dict[int, str], list[Runs]]]] = {}
    for runs in found:
        images, alike = _images(runs.about), groups.setdefault(identity(runs.about), [])
        fitting = (g for g in alike if all(g[0].get(s, sha256) == sha256 for s, sha256 in images.items()))
        group = next(fitting, None)
        if group is None:
            alike.append(group := ({}, []))
        group[0].update(images)
        group[1].append(runs)
    grouped = [_experiment(runs) for alike in groups.values() for _, runs in alike]
    return [experiment for experiment in grouped if experiment.lines]


def _images(about: About) -> dict[int, str]:
    """SHA-256 of the images in order of the classes, by the seed that moves this order, 0 where none does.

    Empty where an older version did not write it.
    """
    seeds = about.seeds if "class-order" in filled(about.settings)["vary"] else [0]
    return dict.fromkeys(seeds, about.data["sha256"]) if about.data else {}


def _experiment(runs: Sequence[Runs]) -> Experiment:
    cells = [cell for folder in runs for cell in folder.cells]
    groups: dict[tuple[str, str], dict[int, Cell]] = {}
    for cell in cells:
        if cell.result is None:
            continue
        options = encode_json(cell.result.options)
        by_seed = groups.setdefault((cell.method, options), {})
        before = by_seed.setdefault(cell.seed, cell)
        if before.result is not None and not _same_numbers(before.result, cell.result):
            raise FczooError(
                f"{cell.method} with seed {cell.seed} is in {before.place} and, with other numbers, "
                f"in {cell.place}; give one of the two"
            )
        if cell.trials > before.trials:  # a search that found what was run by hand as well
            by_seed[cell.seed] = cell
    lines = [
        Line(_label(key, groups), tuple(by_seed[s] for s in sorted(by_seed)))
        for key, by_seed in groups.items()
    ]
    return Experiment(tuple(lines), tuple(c for c in cells if c.result is None), tuple(runs))


def _same_numbers(a: Result, b: Result) -> bool:
    """Whether two runs of the same settings came to the same, times aside."""
    return repr(a.accuracy) == repr(b.accuracy) and (a.bytes_up, a.bytes_down) == (b.bytes_up, b.bytes_down)


def _label(key: tuple[str, str], groups: Mapping[tuple[str, str], Mapping[int, Cell]]) -> str:
    """The method's name, with those options in which it differs from its namesakes.

    Rates, which a search finds for each of them, are left out where other options tell all of them apart.
    """
    method = key[0]
    own = json.loads(key[1])
    namesakes = [json.loads(options) for name, options in groups if name == method]
    differing = [n for n in own if any(other.get(n) != own[n] for other in namesakes)]
    without = [{n: v for n, v in other.items() if not is_rate(n)} for other in namesakes]
    if all(without.count(other) == 1 for other in without):
        differing = [n for n in differing if not is_rate(n)]
    if not differing:
        return method
    return f"{method} ({', '.join(f'{n}={_short(n, own, namesakes)}' for n in differing)})"


def is_rate(option: str) -> bool:
    """Whether an option is a learning rate, by its name: ``lr``, ``lr_lora``, ``server_lr``."""
    return "lr" in option.split("_")


def _short(name: str, own: Mapping[str, Any], namesakes: Sequence[Mapping[str, Any]]) -> str:
    """An option's value in words: three digits of a number, where those tell it from others."""
    digits = [float(f"{v:.3g}") if isinstance(v := other.get(name), float) else v for other in namesakes]
    values = [other.get(name) for other in namesakes]
    if len({*map(repr, digits)}) == len({*map(repr, values)}):
        return option_word(digits[values.index(own[name])])
    return option_word(own[name])
