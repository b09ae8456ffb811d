"""Run folders, which ``fczoo bench`` writes and reports read."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fczoo.backbones.pretraining_overlap import contamination, identify_weights
from fczoo.core.errors import FczooError, printable
from fczoo.core.files import (
    Count,
    convert_json,
    encode_json,
    read_json,
    read_record,
    through_json,
    write_record,
)
from fczoo.core.options import build
from fczoo.core.registry import PARTITIONERS
from fczoo.data.partition import HASHED_AS, load_partition
from fczoo.data.partition_file import PARTITION
from fczoo.federation.result import Result, read_result
from fczoo.federation.settings import Settings

FORMAT = "fczoo-bench-1"
BENCH = "bench.json"
RESULT = "result.json"
FAILURE = "failed.json"
ROUNDS = "rounds.jsonl"
LOG = "log.txt"
WARNINGS = "warnings.jsonl"  # of a folder or a run, one line per warning
# fields of a search that reports require
SEARCH_FIELDS = {
    "dataset",
    "methods",
    "trials",
    "tasks",
    "image_steps",
}


class BenchFile(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Content of ``bench.json``, the description of a folder's runs.

    Fields that an older version did not write are empty.
    """

    methods: dict[str, dict[str, Any]]  # options by method
    seeds: list[Count]
    settings: dict[str, Any]
    backbone: dict[str, Any]  # name, sha256 and shape
    partition: dict[str, Any]  # spec and sha256
    device: str
    split: str = ""
    data: dict[str, Any] = {}
    hardware: dict[str, Any] = {}
    versions: dict[str, Any] = {}
    tuned: dict[str, Any] = {}  # search that found the values of --tuned
    started: str = ""
    command: list[str] = []
    earlier_commands: list[list[str]] = []
    code: dict[str, str] = {}  # SHA-256 of every module that the runs use
    keep: dict[str, Any] = {}  # which models the runs store, and whether with the server's state
    changed_code: list[dict[str, Any]] = []  # accepted changes of modules, with times
    warnings: list[str] = []  # of the command and its runs, without duplicates

    def __post_init__(self) -> None:
        """Check the description of a search.

        Raises:
            ValueError: ``tuned`` lacks a field that reports require.
        """
        if self.tuned and (missing := sorted(SEARCH_FIELDS - self.tuned.keys())):
            raise ValueError(f"tuned lacks {', '.join(missing)}")

    @property
    def contamination(self) -> str:
        """Describe the overlap of pre-training data and classes; empty if it is unknown."""
        weights = identify_weights(str(self.settings.get("backbone", "")), self.backbone["sha256"])
        return contamination(self.settings["dataset"], weights)

    def plain(self) -> dict[str, Any]:
        """Return values for JSON, without fields that were not written."""
        content: dict[str, Any] = msgspec.to_builtins(self)
        return content


class PartitionSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of a partition for reports."""

    spec: str
    seed: Count
    sha256: str
    images: Count  # distinct training images of all clients
    counts: list[list[Count]]  # images, [task][client]


@dataclass(frozen=True)
class RunRecord:
    """Run of one method with one seed.

    An unfinished run has no result but a ``problem``, the reason; tables leave it out.
    """

    place: str  # source, for messages
    folder: Path | None  # None: read from an archive or a saved result
    bench_file: BenchFile
    method: str
    seed: int
    result: Result | None
    problem: str = ""

    @property
    def search(self) -> dict[str, Any]:
        """Return the search of ``fczoo tune`` that found the run's options; empty without one."""
        search = self.bench_file.tuned
        return search if self.method in search.get("methods", ()) else {}

    @property
    def trials(self) -> int:
        """Return the number of trials that found the run's values; 0 without a search."""
        return int(self.search["trials"]) if self.search else 0


@dataclass(frozen=True)
class Runs:
    """Runs of one run folder, read from the folder or from an archive."""

    name: str  # of the folder, relative to the given path
    place: str  # source, for messages
    bench_file: BenchFile
    records: tuple[RunRecord, ...]
    folder: Path | None = None
    archived_split: PartitionSummary | None = None

    @cached_property
    def split(self) -> PartitionSummary:
        """Return a summary of the partition."""
        if self.archived_split is not None:
            return self.archived_split
        assert self.folder is not None
        partition = load_partition(self.folder / PARTITION)
        stop = self.bench_file.settings.get("stop_after_tasks")  # later images are not used
        client_parts = [part for task in partition.tasks[:stop] for part in task]
        return PartitionSummary(
            spec=partition.spec,
            seed=partition.seed,
            sha256=partition.sha256,
            images=len(np.unique(np.concatenate(client_parts))),
            counts=partition.counts()[:stop].tolist(),
        )


def write_bench_file(folder: Path, bench_file: Mapping[str, Any]) -> None:
    """Write ``bench.json`` with format version and checksum.

    Args:
        folder: Run folder.
        bench_file: Fields of ``BenchFile``.
    """
    write_record(folder / BENCH, FORMAT, bench_file)


def read_bench_file(folder: Path) -> BenchFile:
    """Read ``bench.json`` of a run folder.

    Args:
        folder: Run folder.

    Raises:
        FczooError: The file is damaged or invalid.
    """
    path = folder / BENCH
    advice = "restore it, or leave out its folder and repeat its fczoo bench with another --out"
    try:
        bench_file = read_record(path, "run description", BenchFile, FORMAT)
        return _with_canonical_spec(check_bench_file(bench_file), folder / PARTITION)
    except FczooError as error:
        raise FczooError(f"{error}; {advice}") from error
    except ValueError as error:
        raise FczooError(f"{path} is not a valid run description: {error}; {advice}") from error


def _with_canonical_spec(bench_file: BenchFile, path: Path) -> BenchFile:
    """Replace the partition's spec and hash by those of the canonical spelling.

    Earlier versions recorded the spec as the user typed it, with a different hash per spelling.
    """
    spec, sha256 = bench_file.partition["spec"], bench_file.partition["sha256"]
    canonical = PARTITIONERS.canonical(spec)
    if (canonical == spec and spec not in HASHED_AS) or not path.is_file():
        return bench_file
    partition = load_partition(path)
    if not partition.has_hash(sha256, spec):
        return bench_file
    canonical_partition = {**bench_file.partition, "spec": canonical, "sha256": partition.sha256}
    return msgspec.structs.replace(bench_file, partition=canonical_partition)


def check_bench_file(bench_file: BenchFile) -> BenchFile:
    """Check a description and convert its settings to their types.

    Args:
        bench_file: Description with the settings as read from a file.

    Returns:
        The description with converted settings.

    Raises:
        ValueError: The description is invalid.
    """
    for field, name in (("backbone", "name"), ("partition", "spec")):
        for key in (name, "sha256"):
            if not isinstance(getattr(bench_file, field).get(key), str):
                raise ValueError(f"{field}: {key} is missing or not a string")
    for method in bench_file.methods:
        if Path(method).name != method or "\\" in method:  # it names a folder
            raise ValueError(f"methods: {method!r} is not the name of a method")
    try:
        settings = current_settings(bench_file.settings)
    except FczooError as error:
        raise ValueError(str(error)) from error
    if "dataset" not in settings:
        raise ValueError("settings: the dataset is missing")
    return msgspec.structs.replace(bench_file, settings=settings)


def current_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Convert recorded settings to plain values with the types and spelling of this version.

    Args:
        settings: Settings as a run recorded them; unknown ones are kept.

    Raises:
        FczooError: A value is invalid.
    """
    known_settings = through_json(dataclasses.asdict(recorded_settings(settings)))
    return {name: known_settings.get(name, value) for name, value in settings.items()}


def recorded_settings(settings: Mapping[str, Any]) -> Settings:
    """Return the settings of a run, without settings that this version does not have.

    Args:
        settings: Settings as the run recorded them.

    Raises:
        FczooError: A value is invalid.
    """
    names = {f.name for f in dataclasses.fields(Settings)} & settings.keys()
    return _build_settings(encode_json({name: settings[name] for name in sorted(names)}))


@lru_cache(1024)  # the runs of an archive have few distinct settings
def _build_settings(text: str) -> Settings:
    """Create settings from JSON."""
    return build(Settings, "settings", json.loads(text))


def read_folder(folder: Path, name: str) -> Runs:
    """Read a run folder with all its runs.

    Args:
        folder: Run folder.
        name: Name of the folder in messages and archives.

    Raises:
        FczooError: A file is damaged.
    """
    bench_file = read_bench_file(folder)
    return Runs(name, str(folder), bench_file, tuple(read_run_records(folder, bench_file)), folder)


def read_saved_result(path: Path, name: str) -> Runs:
    """Read one run from a file that ``Result.save`` wrote, which has no image counts per client.

    Args:
        path: JSON file.
        name: Name of the runs in messages and archives.

    Raises:
        FczooError: The file is damaged.
    """
    result = read_result(path)
    try:
        bench_file = check_bench_file(
            BenchFile(
                methods={result.method: result.options},
                seeds=[result.seed],
                settings=result.settings,
                backbone=result.backbone,
                partition=result.partition,
                device=str(result.settings.get("device", "")),
                versions=result.versions,
            )
        )
        split = convert_json({**result.partition, "images": 0, "counts": []}, PartitionSummary)
    except ValueError as error:
        raise FczooError(f"{path} is not a valid result file: {error}; save it again") from error
    problem = "" if result.is_finished else _stop_message(result)
    record = RunRecord(
        str(path),
        None,
        bench_file,
        result.method,
        result.seed,
        None if problem else result,
        problem,
    )
    return Runs(name, str(path), bench_file, (record,), archived_split=split)


def read_run_records(folder: Path, bench_file: BenchFile) -> list[RunRecord]:
    """Read every method and seed of a run folder, finished or not.

    Args:
        folder: Run folder.
        bench_file: Its description, with methods and seeds.

    Returns:
        One record per method and seed that has a folder.
    """
    records = []
    for method in bench_file.methods:
        for seed in bench_file.seeds:
            run_folder = folder / method / f"seed{seed}"
            if run_folder.is_dir():
                result = (
                    read_result(run_folder / RESULT) if (run_folder / RESULT).is_file() else None
                )
                problem = _problem(run_folder, result)
                records.append(
                    RunRecord(
                        str(run_folder),
                        run_folder,
                        bench_file,
                        method,
                        seed,
                        None if problem else result,
                        problem,
                    )
                )
    return records


def _problem(place: Path, result: Result | None) -> str:
    """Return the reason why a run is not finished; empty if it is."""
    failure = place / FAILURE
    if failure.is_file():
        error = printable(str(read_json(failure, "failure record").get("error", "failed")), 2000)
        if not isinstance(error, str):
            raise FczooError(f"{failure} is not a valid failure record: its error is not a text")
        return error
    if result is None:
        return "not started"
    return "" if result.is_finished else _stop_message(result)


def _stop_message(result: Result) -> str:
    return f"stopped after task {len(result.accuracy)} of {len(result.task_sizes)}"
