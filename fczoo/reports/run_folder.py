"""A run folder, as ``bench`` writes it and reports read it."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fczoo.core.errors import FczooError
from fczoo.core.files import Count, read_json, read_record, through_json, typed, write_record
from fczoo.core.options import build
from fczoo.core.registry import PARTITIONERS
from fczoo.data.partition import HASHED_AS, load_partition
from fczoo.federation.result import Result, read_result
from fczoo.federation.settings import Settings

FORMAT = "fczoo-bench-1"
ABOUT = "bench.json"
PARTITION = "partition.json"
RESULT = "result.json"
FAILURE = "failed.json"
ROUNDS = "rounds.jsonl"
LOG = "log.txt"
WARNINGS = "warnings.jsonl"  # of a folder or of a run, as they are given
FOUND = {"dataset", "methods", "trials", "tasks", "image_steps"}  # what reports say of a search


class About(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``bench.json``: what was run. An empty field is one that an older version did not write."""

    methods: dict[str, dict[str, Any]]  # with their options
    seeds: list[Count]
    settings: dict[str, Any]
    backbone: dict[str, Any]  # name, sha256 and shape
    partition: dict[str, Any]  # spec and sha256
    device: str
    split: str = ""
    data: dict[str, Any] = {}
    hardware: dict[str, Any] = {}
    versions: dict[str, Any] = {}
    tuned: dict[str, Any] = {}  # of the file given with --tuned: how its values were found
    started: str = ""
    command: list[str] = []
    earlier_commands: list[list[str]] = []
    code: dict[str, str] = {}  # SHA-256 of every module that its runs use
    changed_code: list[dict[str, Any]] = []  # when which of them had changed, and that was accepted
    warnings: list[str] = []  # of the command and its runs, equal ones merged

    def __post_init__(self) -> None:
        """Raises ValueError where how values were found is told in part."""
        if self.tuned and (missing := sorted(FOUND - self.tuned.keys())):
            raise ValueError(f"tuned has no {', '.join(missing)}")

    def plain(self) -> dict[str, Any]:
        """As JSON has it, without the fields that were not written."""
        content: dict[str, Any] = msgspec.to_builtins(self)
        return content


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """What reports show of a partition."""

    spec: str
    seed: Count
    sha256: str
    images: Count  # training images that somebody owns
    counts: list[list[Count]]  # images, [task][client]


@dataclass(frozen=True)
class Cell:
    """One method with one seed.

    ``problem`` says why it is not finished; such a cell takes part in no table.
    """

    place: str  # where it was read, for messages
    folder: Path | None  # None: it stands in an archive
    about: About
    method: str
    seed: int
    result: Result | None
    problem: str = ""

    @property
    def trials(self) -> int:
        """Of ``fczoo tune``, behind the values of the run: its effort; 0 where they were not searched."""
        tuned = self.about.tuned
        return int(tuned["trials"]) if self.method in tuned.get("methods", ()) else 0


@dataclass(frozen=True)
class Runs:
    """The runs of one run folder, read from it or from an archive."""

    name: str  # of the folder, below the place that was named
    place: str  # where they were read, for messages
    about: About
    cells: tuple[Cell, ...]
    folder: Path | None = None
    archived: Split | None = None

    @cached_property
    def split(self) -> Split:
        """The partition in short."""
        if self.archived is not None:
            return self.archived
        assert self.folder is not None
        partition = load_partition(self.folder / PARTITION)
        owned = [part for task in partition.tasks for part in task]
        return Split(
            spec=partition.spec,
            seed=partition.seed,
            sha256=partition.sha256,
            images=len(np.unique(np.concatenate(owned))),
            counts=partition.counts().tolist(),
        )


class _Named(msgspec.Struct):
    name: str
    sha256: str


class _Specified(msgspec.Struct):
    spec: str
    sha256: str


class _Failure(msgspec.Struct):
    error: str = "failed"


def write_about(folder: Path, about: Mapping[str, Any]) -> None:
    """Write ``bench.json``, with its format's version and a checksum."""
    write_record(folder / ABOUT, FORMAT, about)


def read_about(folder: Path) -> About:
    """``bench.json`` of a run folder. Raises FczooError when it is damaged or says what cannot be."""
    path, aside = folder / ABOUT, "restore it, or leave its folder out and run the command again elsewhere"
    try:
        written = read_record(path, "run description", About, FORMAT)
        return _with_canonical_spec(checked(written), folder / PARTITION)
    except FczooError as error:
        raise FczooError(f"{error}; {aside}") from error
    except ValueError as error:
        raise FczooError(f"{path} is no valid run description: {error}; {aside}") from error


def _with_canonical_spec(about: About, path: Path) -> About:
    """Return the description with the canonical spec of the partition and the hash of that spec.

    Earlier versions recorded the spec as the user typed it, with a different hash per spelling.
    """
    spec, sha256 = about.partition["spec"], about.partition["sha256"]
    canonical = PARTITIONERS.canonical(spec)
    if (canonical == spec and spec not in HASHED_AS) or not path.is_file():
        return about
    partition = load_partition(path)
    if not partition.has_hash(sha256, spec):
        return about
    known = {**about.partition, "spec": canonical, "sha256": partition.sha256}
    return msgspec.structs.replace(about, partition=known)


def checked(about: About) -> About:
    """The description read from a file, its settings as their types have them.

    Raises ValueError for an impossible one.
    """
    for field, kind in (("backbone", _Named), ("partition", _Specified)):
        try:
            typed(getattr(about, field), kind)
        except ValueError as error:
            raise ValueError(f"{field}: {error}") from error
    for method in about.methods:
        if Path(method).name != method or "\\" in method:  # it names a folder
            raise ValueError(f"methods: {method!r} is no name of a method")
    try:
        settings = as_read(about.settings)
    except FczooError as error:
        raise ValueError(str(error)) from error
    if "dataset" not in settings:
        raise ValueError("settings: the dataset is missing")
    return msgspec.structs.replace(about, settings=settings)


def as_read(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings that a run wrote as plain values of today's types and spelling.

    Raises FczooError for a value that does not fit.
    """
    read = through_json(dataclasses.asdict(recorded_settings(settings)))
    return {name: read.get(name, value) for name, value in settings.items()}


def recorded_settings(settings: Mapping[str, Any]) -> Settings:
    """Settings that a run wrote, without those that this version does not have.

    Raises FczooError for a value that does not fit.
    """
    names = {f.name for f in dataclasses.fields(Settings)} & settings.keys()
    return build(Settings, "settings", {name: settings[name] for name in names})


def read_folder(folder: Path, name: str) -> Runs:
    """A run folder with all its runs. Raises FczooError for a damaged file."""
    about = read_about(folder)
    return Runs(name, str(folder), about, tuple(read_cells(folder, about)), folder)


def read_saved_result(path: Path, name: str) -> Runs:
    """Read one finished run from the file that ``Result.save`` wrote.

    Such a file has no counts of images per client. Raises FczooError for a damaged file.
    """
    result = read_result(path)
    try:
        about = checked(
            About(
                methods={result.method: result.options},
                seeds=[result.seed],
                settings=result.settings,
                backbone=result.backbone,
                partition=result.partition,
                device=str(result.settings.get("device", "")),
                versions=result.versions,
            )
        )
        split = typed({**result.partition, "images": 0, "counts": []}, Split)
    except ValueError as error:
        raise FczooError(f"{path} is not a valid result file: {error}; save it again") from error
    problem = "" if result.finished else _unfinished(result)
    cell = Cell(str(path), None, about, result.method, result.seed, None if problem else result, problem)
    return Runs(name, str(path), about, (cell,), archived=split)


def read_cells(folder: Path, about: About) -> list[Cell]:
    """Every method and seed for which a run folder has a place, finished or not."""
    cells = []
    for method in about.methods:
        for seed in about.seeds:
            place = folder / method / f"seed{seed}"
            if place.is_dir():
                result = read_result(place / RESULT) if (place / RESULT).is_file() else None
                problem = _problem(place, result)
                cells.append(
                    Cell(str(place), place, about, method, seed, None if problem else result, problem)
                )
    return cells


def _problem(place: Path, result: Result | None) -> str:
    """Why a run is not finished; empty for one that is."""
    failure = place / FAILURE
    if failure.is_file():
        try:
            return typed(read_json(failure, "failure record"), _Failure).error
        except ValueError as error:
            raise FczooError(f"{failure} is no valid failure record: {error}") from error
    if result is None:
        return "not begun"
    return "" if result.finished else _unfinished(result)


def _unfinished(result: Result) -> str:
    return f"stopped after task {len(result.accuracy)} of {len(result.task_sizes)}"
