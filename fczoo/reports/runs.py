"""Runs from run folders and archives, grouped into experiments and labelled."""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fczoo.core.errors import FczooError
from fczoo.core.files import encode_json
from fczoo.federation.result import Result
from fczoo.federation.settings import SEEDED_SETTINGS, Settings
from fczoo.federation.settings_checks import MEASUREMENTS
from fczoo.reports.archive import read_archive
from fczoo.reports.run_folder import (
    BENCH,
    BenchFile,
    PartitionSummary,
    RunRecord,
    Runs,
    read_folder,
    read_saved_result,
)
from fczoo.reports.text_format import option_word

ARCHIVE = "results.csv"  # name under which archives in folders are found
WITHOUT_EFFECT = (*("data_root", "device", "together", "protocol", "as_released"), *MEASUREMENTS)
"""Settings that do not affect results: execution, measurements, and the source of a schedule."""


def normalize_settings(settings: Settings) -> Settings:
    """Reset the settings that do not affect results to their defaults.

    Args:
        settings: Settings of a run.
    """
    defaults: dict[str, Any] = {
        f.name: f.default for f in dataclasses.fields(Settings) if f.name in WITHOUT_EFFECT
    }
    return dataclasses.replace(settings, **defaults)


@dataclass(frozen=True)
class Line:
    """Row of a table: a method with its options, and its finished runs by seed."""

    label: str
    records: tuple[RunRecord, ...]

    @property
    def seeds(self) -> list[int]:
        return [c.seed for c in self.records]

    @property
    def results(self) -> list[Result]:
        return [c.result for c in self.records if c.result is not None]

    @property
    def remark(self) -> str:
        """Return the note on the method; usually empty."""
        return self.results[0].remark

    @property
    def is_ranked(self) -> bool:
        """Return whether the line is ranked; upper bounds are not, since they pool images."""
        return not self.remark.startswith("upper bound")

    @property
    def is_tuned(self) -> bool:
        """Return whether ``fczoo tune`` found the values of all its runs."""
        return all(record.trials for record in self.records)


@dataclass(frozen=True)
class Experiment:
    """Runs with the same data, partition, backbone and schedule, which one table can compare."""

    lines: tuple[Line, ...]
    unfinished_runs: tuple[RunRecord, ...]
    runs: tuple[Runs, ...]  # run folders of the experiment
    # rows that differ only in the compression of uploads, for figures over bytes
    other_compression_lines: tuple[Line, ...] = ()

    @property
    def bench_file(self) -> BenchFile:
        """Return the first folder's description; data, partition and schedule are equal in all."""
        return self.runs[0].bench_file

    @cached_property
    def settings(self) -> dict[str, Any]:
        return with_defaults(self.bench_file.settings)

    @cached_property
    def task_count(self) -> int:
        tasks = self.settings["tasks"]
        if isinstance(tasks, str) or self.settings["start_from"]:
            return len(self.first_result.task_sizes)
        return tasks if isinstance(tasks, int) else len(tasks)

    @property
    def seeds(self) -> list[int]:
        return sorted({s for line in self.lines for s in line.seeds})

    @property
    def split(self) -> PartitionSummary:
        return self.runs[0].split

    @property
    def first_result(self) -> Result:
        """Return the first finished result; tasks, test images and backbone are equal in all."""
        return self.lines[0].results[0]


def with_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Add the defaults of settings that an older version did not have.

    Args:
        settings: Settings as a run recorded them.
    """
    return {**{f.name: f.default for f in dataclasses.fields(Settings)}, **settings}


def effective_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that affect results, without those that the seed determines.

    Args:
        settings: Settings of a run by name.
    """
    by_seed = {SEEDED_SETTINGS[source] for source in settings.get("vary", ())}
    excluded = {*WITHOUT_EFFECT, *by_seed}
    return {name: value for name, value in settings.items() if name not in excluded}


def identity(bench_file: BenchFile, *ignored: str) -> tuple[str, ...]:
    """Return a key of a run folder; folders with equal keys may share a table.

    Args:
        bench_file: Description of a run folder.
        *ignored: Settings that may differ; ``partition`` also covers the images of each client.
    """
    settings = with_defaults(bench_file.settings)
    by_seed = {SEEDED_SETTINGS[source] for source in settings["vary"]} - {None}
    split = settings["partition"] if by_seed else bench_file.partition["sha256"]
    split = "" if "partition" in ignored else split
    by_split = () if by_seed else ("partition_seed",)  # other seeds may draw the same split
    excluded_names = (
        *WITHOUT_EFFECT,
        "backbone",
        "partition",
        *by_split,
        *by_seed,
        *ignored,
    )
    values = [encode_json(value) for name, value in settings.items() if name not in excluded_names]
    return (
        *values,
        bench_file.backbone["sha256"],
        split,
        str((bench_file.data or {}).get("devices")),
    )


def places_below(place: Path) -> list[Path]:
    """Return the run folders and archives at or below a path.

    Args:
        place: File, run folder or any other folder.
    """
    if place.is_file() or (place / BENCH).is_file():
        return [place]
    return sorted([*(p.parent for p in place.rglob(BENCH)), *place.rglob(ARCHIVE)])


def _run_folder_above(place: Path) -> Path | None:
    """Return the run folder that contains a path; None if there is none."""
    return next((p for p in place.absolute().parents if (p / BENCH).is_file()), None)


def read_runs(places: Iterable[Path]) -> list[Runs]:
    """Read the runs at or below some paths.

    Args:
        places: Run folders, archives, saved results, or folders that contain them.

    Returns:
        One ``Runs`` per run folder or saved result; a file below two of the paths is read once.

    Raises:
        FczooError: A path contains no runs, or a file is damaged.
    """
    runs_by_path: dict[Path, Runs | list[Runs]] = {}
    for root in places:
        paths = places_below(root)
        if not paths:
            if run_folder := _run_folder_above(root):
                raise FczooError(
                    f"{root} is inside the run folder {run_folder}; give the run folder"
                )
            raise FczooError(
                f"no run folder at or below {root}; give a folder that fczoo bench wrote, or an "
                f"archive of runs"
            )
        for path in paths:
            name = path.resolve().name if path == root else path.relative_to(root).as_posix()
            if path not in runs_by_path:
                runs_by_path[path] = _read(path, name)
    return [
        runs
        for entry in runs_by_path.values()
        for runs in (entry if isinstance(entry, list) else [entry])
    ]


def _read(path: Path, name: str) -> Runs | list[Runs]:
    if not path.is_file():
        return read_folder(path, name)
    return read_saved_result(path, name) if path.suffix == ".json" else read_archive(path)


def read_experiments(places: Sequence[Path]) -> list[Experiment]:
    """Read runs and group them by data set, partition, backbone and schedule.

    Args:
        places: Run folders, archives, or folders that contain them.

    Raises:
        FczooError: No run is finished, or two folders have the same run with different results.
    """
    return experiments_of(read_runs(places), ", ".join(map(str, places)))


def experiments_below(place: Path, excluded_folder: Path | None = None) -> list[Experiment]:
    """Read a folder as ``read_experiments`` does; return no experiment without a finished run.

    Args:
        place: Folder, which may not exist.
        excluded_folder: Folder below it that is not read.
    """
    places = places_below(place) if place.exists() else []
    return _group_runs(read_runs(p for p in places if excluded_folder not in p.parents))


def experiments_of(all_runs: Iterable[Runs], place: str) -> list[Experiment]:
    """Group runs as ``read_experiments`` does.

    Args:
        all_runs: Runs of any folders.
        place: Source of the runs, for messages.

    Raises:
        FczooError: No run is finished, or two folders have the same run with different results.
    """
    experiments = _group_runs(all_runs)
    if not experiments:
        raise FczooError(f"no run is finished in {place}; resume with the same fczoo bench command")
    return experiments


def _group_runs(all_runs: Iterable[Runs]) -> list[Experiment]:
    groups_by_identity: dict[tuple[str, ...], list[tuple[dict[int, str], list[Runs]]]] = {}
    for runs in all_runs:
        images = _image_hashes(runs.bench_file)
        candidate_groups = groups_by_identity.setdefault(identity(runs.bench_file), [])
        matching_groups = (
            g
            for g in candidate_groups
            if all(g[0].get(s, sha256) == sha256 for s, sha256 in images.items())
        )
        group = next(matching_groups, None)
        if group is None:
            candidate_groups.append(group := ({}, []))
        group[0].update(images)
        group[1].append(runs)
    experiments = [
        _experiment(runs) for groups in groups_by_identity.values() for _, runs in groups
    ]
    return _add_other_compressions([experiment for experiment in experiments if experiment.lines])


def _add_other_compressions(experiments: Sequence[Experiment]) -> list[Experiment]:
    """Add to each experiment the rows of others that differ only in the compression of uploads."""
    keys = [(identity(e.bench_file, "compress"), _image_hashes(e.bench_file)) for e in experiments]
    other_lines = [
        tuple(
            Line(f"{line.label}, {other.settings['compress'] or 'exact'}", line.records)
            for other, other_key in zip(experiments, keys, strict=True)
            if other_key == key and other is not experiment
            for line in other.lines
        )
        for experiment, key in zip(experiments, keys, strict=True)
    ]
    return [
        dataclasses.replace(e, other_compression_lines=lines)
        for e, lines in zip(experiments, other_lines, strict=True)
    ]


def _image_hashes(bench_file: BenchFile) -> dict[int, str]:
    """Return the SHA-256 of the images in class order by seed.

    The seed is 0 if seeds do not change the order. Empty if an older version did not record it.
    """
    seeds = bench_file.seeds if "class-order" in with_defaults(bench_file.settings)["vary"] else [0]
    return dict.fromkeys(seeds, bench_file.data["sha256"]) if bench_file.data else {}


def _experiment(runs: Sequence[Runs]) -> Experiment:
    records = [record for folder in runs for record in folder.records]
    groups: dict[tuple[str, str], dict[int, RunRecord]] = {}
    for record in records:
        if record.result is None:
            continue
        options = encode_json(record.result.options)
        by_seed = groups.setdefault((record.method, options), {})
        earlier_record = by_seed.setdefault(record.seed, record)
        if earlier_record.result is not None and not _same_numbers(
            earlier_record.result, record.result
        ):
            raise FczooError(
                f"{record.method} with seed {record.seed} has different results in "
                f"{earlier_record.place} and {record.place}; give one of the two"
            )
        # prefer the run with searched values to an equal run with values set by the user
        if record.trials > earlier_record.trials:
            by_seed[record.seed] = record
    lines = [
        Line(_label(key, groups), tuple(by_seed[s] for s in sorted(by_seed)))
        for key, by_seed in groups.items()
    ]
    return Experiment(tuple(lines), tuple(c for c in records if c.result is None), tuple(runs))


def _same_numbers(a: Result, b: Result) -> bool:
    """Return whether two runs with the same settings have the same accuracies and bytes."""
    return repr(a.accuracy) == repr(b.accuracy) and (a.bytes_up, a.bytes_down) == (
        b.bytes_up,
        b.bytes_down,
    )


def _label(key: tuple[str, str], groups: Mapping[tuple[str, str], Mapping[int, RunRecord]]) -> str:
    """Return the method's name with the options that distinguish it from its other rows.

    Learning rates, which may be searched per row, are left out if other options distinguish all
    rows.
    """
    method = key[0]
    own_options = json.loads(key[1])
    options_of_rows = [json.loads(options) for name, options in groups if name == method]
    differing_names = [
        n
        for n in own_options
        if any(row_options.get(n) != own_options[n] for row_options in options_of_rows)
    ]
    options_without_rates = [
        {n: v for n, v in row_options.items() if not is_rate(n)} for row_options in options_of_rows
    ]
    if all(options_without_rates.count(row_options) == 1 for row_options in options_without_rates):
        differing_names = [n for n in differing_names if not is_rate(n)]
    if not differing_names:
        return method
    texts = [f"{n}={_short_value(n, own_options, options_of_rows)}" for n in differing_names]
    return f"{method} ({', '.join(texts)})"


def is_rate(option: str) -> bool:
    """Return whether an option is a learning rate by name: ``lr``, ``lr_lora``, ``server_lr``.

    Args:
        option: Name of the option.
    """
    return "lr" in option.split("_")


def _short_value(
    name: str, own_options: Mapping[str, Any], options_of_rows: Sequence[Mapping[str, Any]]
) -> str:
    """Format an option's value with three digits, or with all if three do not distinguish it."""
    digits = [
        float(f"{v:.3g}") if isinstance(v := row_options.get(name), float) else v
        for row_options in options_of_rows
    ]
    values = [row_options.get(name) for row_options in options_of_rows]
    if len({*map(repr, digits)}) == len({*map(repr, values)}):
        return option_word(digits[values.index(own_options[name])])
    return option_word(own_options[name])
