"""Suites: one file of questions, settings and rows, and an archive of the runs that answer them.

A suite is ``results/suites/NAME.toml``; its runs are in ``results/NAME.csv``, one row per run with
all that a table needs. A run is current if settings, options, search and code are those of today.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from fczoo.core.errors import FczooError, first_line
from fczoo.core.files import Count, convert_json, through_json
from fczoo.core.options import nearest, spaces
from fczoo.core.registry import METHODS
from fczoo.federation.environment import code_of, digest
from fczoo.federation.settings import Settings
from fczoo.reports.archive import read_archive, write_archive
from fczoo.reports.run_config import RunConfig
from fczoo.reports.run_folder import RunRecord, Runs, recorded_settings
from fczoo.reports.runs import Experiment, experiments_below, experiments_of, normalize_settings

SUITES = "suites"  # folder of the files below that of the archives
RUNS = "suite-runs"  # folder of the run folders below that of the archives
REPLICATION = ".replication"  # follows the name of a suite in the archive of runs made again
State = Literal["current", "stale", "missing", "failed"]


class SuiteRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One row of a suite: a method with its variant."""

    method: str
    name: str = ""  # of the row; empty: that of the method
    role: Literal["method", "control", "ablation"] = "method"
    set: dict[str, Any] = {}  # options that are not searched
    search: bool = True  # whether the other options are searched

    @property
    def label(self) -> str:
        return self.name or self.method

    def searched(self, trials: int) -> bool:
        """Return whether values are searched for this row.

        Args:
            trials: Trials of the suite's searches.
        """
        return bool(self.search and trials and spaces(METHODS.get(self.method)).keys() - self.set)


class Suite(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of a suite's file."""

    question: str  # one sentence
    bench: dict[str, Any]  # options of fczoo bench but methods, set and tuned
    rows: list[SuiteRow]
    trials: Count = 0  # of each row's search; 0: none
    first_tasks: Count = 3  # tasks of a trial
    held_out: float = 0.2  # part of the training images on which a trial is scored
    compare: list[tuple[str, str]] = []  # labels of rows whose difference is tested
    cut: str = ""  # what was left out to fit a budget of time

    def __post_init__(self) -> None:
        """Check labels.

        Raises:
            ValueError: Two rows have one label, two rows of a method are not ablations, a label
                cannot name a folder or has a comma, or a comparison names no row.
        """
        labels = [row.label for row in self.rows]
        if twice := [label for label in dict.fromkeys(labels) if labels.count(label) > 1]:
            raise ValueError(f"two rows are called {twice[0]}; give one another name")
        declared = [row.method for row in self.rows if row.role != "ablation"]
        if twice := [name for name in dict.fromkeys(declared) if declared.count(name) > 1]:
            raise ValueError(f"{twice[0]} has two rows; all but one are of role ablation")
        if bad := [label for label in labels if Path(label).name != label or "\\" in label]:
            raise ValueError(f"{bad[0]!r} cannot name a folder; use letters and digits")
        if bad := [label for label in labels if "," in label]:  # which separates those of --rows
            raise ValueError(f"the row's name {bad[0]!r} has a comma; use letters and digits")
        for label in (label for pair in self.compare for label in pair):
            if label not in labels:
                raise ValueError(f"compare names {label!r}, no row; {nearest(label, labels)}")

    def search_share(self, cell: "SuiteCell") -> float:
        """Return the time of a cell's search in runs of it: its trials have fewer tasks and images.

        Args:
            cell: The cell.
        """
        if not cell.row.searched(self.trials):
            return 0.0
        tasks = cell.configs[0].settings.task_count
        return self.trials * (1 - self.held_out) * min(self.first_tasks, tasks) / tasks


@dataclass(frozen=True)
class SuiteCell:
    """The runs of one row in one setting, one for each seed."""

    row: SuiteRow
    setting: str  # name of the setting; empty if the suite has one
    configs: tuple[RunConfig, ...]  # one per seed, with the row's options, before any search
    pending: tuple[int, ...] = ()  # seeds that are to be run
    archived: RunRecord | None = None  # current run whose searched values the others take

    @property
    def name(self) -> str:
        """Return the name of the row with its setting."""
        return f"{self.row.label}/{self.setting}" if self.setting else self.row.label

    def archived_as(self, seed: int) -> str:
        """Return the name of a run's folder in the archive.

        Args:
            seed: Seed of the run.
        """
        return f"{self.name}/seed{seed}"


def read_suite(path: Path) -> Suite:
    """Read the file of a suite.

    Args:
        path: TOML file.

    Raises:
        FczooError: The file is missing or not one of a suite.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        suite = convert_json(content, Suite)
    except FileNotFoundError:
        names = sorted(file.stem for file in path.parent.glob("*.toml"))
        advice = nearest(path.stem, names) if names else "write one as the handbook describes"
        raise FczooError(f"no suite is at {path}; {advice}") from None
    except (ValueError, RecursionError) as error:
        raise FczooError(f"{path} is not a suite: {first_line(error)}; correct the file") from error
    for row in suite.rows:
        METHODS.get(row.method)
    return suite


def archived_runs(archive: Path) -> dict[str, RunRecord]:
    """Return the runs of a suite's archive by folder; empty without an archive.

    Args:
        archive: CSV file.
    """
    if not archive.exists():
        return {}
    return {runs.name: record for runs in read_archive(archive) for record in runs.records}


def code_digest(config: RunConfig) -> str:
    """Return the hash of the code of a run.

    Args:
        config: Configuration of the run.
    """
    return digest(code_of(config.settings, config.create_method()))


def state_of(
    config: RunConfig, row: SuiteRow, suite: Suite, record: RunRecord | None, code: str
) -> tuple[State, str]:
    """Return the state of a run, and what is stale of it: options, search, code or settings.

    Args:
        config: Configuration of the run without searched values.
        row: Its row.
        suite: The suite.
        record: Run of the archive; None: it has none.
        code: Hash of today's code of the run.
    """
    if record is None or record.result is None:
        return "missing", ""
    trials = suite.trials if row.searched(suite.trials) else 0
    searched = spaces(METHODS.get(row.method)).keys() - row.set if trials else set()
    ours, theirs = through_json(dict(config.options)), through_json(record.result.options)
    effort = {
        "trials": suite.trials,
        "tasks": min(suite.first_tasks, config.settings.task_count),
        "held_out": suite.held_out,
    }
    recorded = {name: record.search.get(name) for name in effort}
    same = {
        "options": {k: v for k, v in ours.items() if k not in searched}
        == {k: v for k, v in theirs.items() if k not in searched},
        "search": recorded == effort if trials else not record.trials,
        "code": record.result.versions.get("code") == code,
        "settings": _comparable(recorded_settings(record.about.settings))
        == _comparable(config.settings),
    }
    reasons = [name for name, is_same in same.items() if not is_same]
    return ("stale", reasons[0]) if reasons else ("current", "")


def _comparable(settings: Settings) -> dict[str, Any]:
    """Return the settings that change a number, as a run records them."""
    values: dict[str, Any] = through_json(normalize_settings(settings).portable())
    file = str(values["backbone"]).partition(":")[0]  # a file of the suite's backbone has its name
    return {**values, "backbone": file.removesuffix(".safetensors")}


def enter_runs(archive: Path, found: Mapping[str, Runs]) -> None:
    """Append runs to the archive of a suite; earlier ones of the same names are replaced.

    Args:
        archive: CSV file, which need not exist.
        found: Runs with one record each, by name in the archive.
    """
    earlier = {runs.name: runs for runs in read_archive(archive)} if archive.exists() else {}
    new = {name: replace(runs, name=name) for name, runs in found.items()}
    archive.parent.mkdir(parents=True, exist_ok=True)
    write_archive([*{**earlier, **new}.values()], archive)


def other_archives(results: Path, name: str) -> dict[str, list[Runs]]:
    """Return the runs of a folder's suites but one, by the file names of their archives.

    Args:
        results: Folder of ``suites/NAME.toml`` and ``NAME.csv``.
        name: Name of the suite that is left out.
    """
    archives = [path for path in archives_of(results).values() if path.is_file()]
    return {path.name: read_archive(path) for path in archives if path.stem != name}


def find_equal_runs(
    suite: Suite, cell: SuiteCell, others: Mapping[str, Sequence[Runs]]
) -> tuple[str, dict[str, Runs]]:
    """Find the runs of a cell that another suite has made.

    They have the cell's settings, options, search and code. A cell takes all of its runs from one
    row, whose searched values they share, or none.

    Args:
        suite: The suite of the cell.
        cell: The cell.
        others: Runs of other suites by the file names of their archives.

    Returns:
        File name of the archive, and the runs by their names in the cell's archive; empty without
        such runs.
    """
    configs = {config.seed: config for config in cell.configs}
    code = code_digest(cell.configs[0])
    for file, archive in others.items():
        rows: dict[str, dict[str, Runs]] = {}
        for runs in archive:
            (record,) = runs.records
            config = configs.get(record.seed)
            if config is None or record.method != cell.row.method:
                continue
            if state_of(config, cell.row, suite, record, code)[0] == "current":
                row = rows.setdefault(runs.name.rpartition("/")[0], {})
                row[cell.archived_as(record.seed)] = runs
        for row in rows.values():
            if len(row) == len(cell.configs):
                return file, row
    return "", {}


def split_by_seed(cell: SuiteCell, found: Sequence[Runs]) -> dict[str, Runs]:
    """Return the finished runs of a cell's run folders by their names in the archive.

    Args:
        cell: The cell.
        found: Its run folders.
    """
    return {
        cell.archived_as(record.seed): replace(runs, records=(record,))
        for runs in found
        for record in runs.records
        if record.result is not None
    }


def suite_experiments(suite: Suite, archive: Path) -> list[Experiment]:
    """Return the runs of a suite's archive, with rows labelled as in the suite.

    Runs of rows that the suite does not have are left out.

    Args:
        suite: The suite.
        archive: Its CSV file.

    Raises:
        FczooError: A row is of two versions of the code or of two searches.
    """
    labels = [row.label for row in suite.rows]
    experiments = []
    for experiment in experiments_of(read_archive(archive), str(archive)):
        lines = [
            replace(x, label=archived_as(x.records[0]).split("/")[0]) for x in experiment.lines
        ]
        lines = sorted(
            (line for line in lines if line.label in labels), key=lambda x: labels.index(x.label)
        )
        for line in lines:
            codes = {result.versions.get("code") for result in line.results}
            if len(codes) > 1 or sum(x.label == line.label for x in lines) > 1:
                raise FczooError(
                    f"runs of {line.label} in {archive} are of several versions of the code or "
                    "have several values; run the suite again"
                )
        if lines:
            experiments.append(replace(experiment, lines=tuple(lines)))
    return experiments


def archived_as(record: RunRecord) -> str:
    """Return the name of a run in its archive: row, setting and seed.

    Args:
        record: Run that was read from the archive.
    """
    return record.place.rpartition(": ")[2].removesuffix(f"/{record.method}/seed{record.seed}")


def archives_of(results: Path) -> dict[Path, Path]:
    """Return the archive of each suite of a folder, which need not exist, by file of the suite.

    Args:
        results: Folder of ``suites/NAME.toml`` and ``NAME.csv``.
    """
    files = sorted((results / SUITES).glob("*.toml"))
    return {file: results / f"{file.stem}.csv" for file in files}


def experiments_of_suites(results: Path) -> list[Experiment] | None:
    """Return the runs of all suites of a folder; None where it has no suite.

    Args:
        results: Folder of ``suites/NAME.toml`` and ``NAME.csv``.

    Raises:
        FczooError: A suite or its archive is damaged.
    """
    archives = archives_of(results)
    if not archives:
        return None
    return [
        experiment
        for file, archive in archives.items()
        if archive.is_file()
        for experiment in suite_experiments(read_suite(file), archive)
    ]


def all_experiments(results: Path) -> list[Experiment]:
    """Return the runs of a folder: those of its suites, its run folders and its archives.

    Args:
        results: Folder of runs, which may not exist.

    Raises:
        FczooError: A suite, an archive or a run is damaged.
    """
    others = experiments_below(results, excluded=results / RUNS)  # which suites have entered
    return [*(experiments_of_suites(results) or []), *others]
