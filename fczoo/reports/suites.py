"""Suites: a file with question, settings and rows, and an archive of the runs.

The file of a suite is ``results/suites/NAME.toml``; its archive is ``results/NAME.csv``. A run in
the archive is current if settings, options, search and code have not changed since.
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

SUITES = "suites"  # folder of the suites' files, in the folder of the archives
RUNS = "suite-runs"  # folder of the run folders, in the folder of the archives
REPLICATION = ".replication"  # suffix of a suite's name in the archive of its replication
State = Literal["current", "outdated", "missing", "failed"]


class SuiteRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Row of a suite: a method, or a variant of it."""

    method: str
    name: str = ""  # name of the row; empty: the method's name
    role: Literal["method", "control", "ablation"] = "method"
    set: dict[str, Any] = {}  # fixed options
    search: bool = True  # whether other options are searched
    seeds: str = ""  # seeds of the row; empty: those of the suite

    @property
    def label(self) -> str:
        return self.name or self.method

    def has_search(self, trials: int) -> bool:
        """Return whether options are searched for this row.

        Args:
            trials: Number of trials of the suite's searches.
        """
        return bool(self.search and trials and spaces(METHODS.get(self.method)).keys() - self.set)


class Suite(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of a suite's file."""

    question: str  # one sentence
    bench: dict[str, Any]  # options of fczoo bench except methods, set and tuned
    rows: list[SuiteRow]
    trials: Count = 0  # number of trials of each row's search; 0: no search
    first_tasks: Count = 3  # number of tasks of a trial
    held_out: float = 0.2  # fraction of the training images on which a trial is scored
    compare: list[tuple[str, str]] = []  # pairs of rows whose difference is tested
    cut: str = ""  # description of what was left out to save time

    def __post_init__(self) -> None:
        """Check the labels of rows.

        Raises:
            ValueError: Two rows have the same label, two rows of a method are not ablations, a
                label is not a valid folder name or has a comma, or a compared row is unknown.
        """
        labels = [row.label for row in self.rows]
        if duplicates := [label for label in dict.fromkeys(labels) if labels.count(label) > 1]:
            raise ValueError(f"two rows are called {duplicates[0]}; rename one of them")
        main_methods = [row.method for row in self.rows if row.role != "ablation"]
        if duplicates := [
            name for name in dict.fromkeys(main_methods) if main_methods.count(name) > 1
        ]:
            raise ValueError(
                f"several rows have method {duplicates[0]}; set role = 'ablation' on all but one"
            )
        if invalid_labels := [
            label for label in labels if Path(label).name != label or "\\" in label
        ]:
            raise ValueError(
                f"row name {invalid_labels[0]!r} cannot name a folder; use letters and digits"
            )
        # --rows is separated by commas
        if invalid_labels := [label for label in labels if "," in label]:
            raise ValueError(f"row name {invalid_labels[0]!r} has a comma; use letters and digits")
        for label in (label for pair in self.compare for label in pair):
            if label not in labels:
                raise ValueError(f"compare has unknown row {label!r}; {nearest(label, labels)}")

    def search_share(self, cell: "SuiteCell") -> float:
        """Estimate the time of a cell's search in units of one run's time.

        Trials have fewer tasks and images than a run.

        Args:
            cell: The cell.
        """
        if not cell.row.has_search(self.trials):
            return 0.0
        tasks = cell.configs[0].settings.task_count
        return self.trials * (1 - self.held_out) * min(self.first_tasks, tasks) / tasks


@dataclass(frozen=True)
class SuiteCell:
    """Cell of a suite: the runs of one row in one setting, one per seed."""

    row: SuiteRow
    setting: str  # name of the setting; empty if the suite has a single one
    configs: tuple[RunConfig, ...]  # one per seed, with the row's options, before any search
    pending_seeds: tuple[int, ...] = ()  # seeds to run
    archived_run: RunRecord | None = None  # current run whose searched values pending runs reuse

    @property
    def name(self) -> str:
        """Return the name of the row and the setting."""
        return f"{self.row.label}/{self.setting}" if self.setting else self.row.label

    def archive_name(self, seed: int) -> str:
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
        FczooError: The file is missing or invalid.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        suite = convert_json(content, Suite)
    except FileNotFoundError:
        names = sorted(file.stem for file in path.parent.glob("*.toml"))
        advice = nearest(path.stem, names) if names else "write one (see docs/tables.md)"
        raise FczooError(f"no suite at {path}; {advice}") from None
    except (ValueError, RecursionError) as error:
        raise FczooError(
            f"{path} is not a valid suite: {first_line(error)}; correct the file"
        ) from error
    for row in suite.rows:
        METHODS.get(row.method)
    return suite


def archived_runs(archive: Path) -> dict[str, RunRecord]:
    """Read the runs of a suite's archive, by folder; empty without an archive.

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
    """Return the state of a run and, if it is outdated, what has changed.

    A change is one of options, search, code or settings.

    Args:
        config: Configuration of the run without searched values.
        row: Row of the run.
        suite: The suite.
        record: Run in the archive; None: there is none.
        code: Hash of the run's current code.
    """
    if record is None or record.result is None:
        return "missing", ""
    trials = suite.trials if row.has_search(suite.trials) else 0
    searched_options = spaces(METHODS.get(row.method)).keys() - row.set if trials else set()
    ours, theirs = through_json(dict(config.options)), through_json(record.result.options)
    effort = {
        "trials": suite.trials,
        "tasks": min(suite.first_tasks, config.settings.task_count),
        "held_out": suite.held_out,
    }
    recorded_effort = {name: record.search.get(name) for name in effort}
    unchanged = {
        "options": {k: v for k, v in ours.items() if k not in searched_options}
        == {k: v for k, v in theirs.items() if k not in searched_options},
        "search": recorded_effort == effort if trials else not record.trials,
        "code": record.result.versions.get("code") == code,
        "settings": _comparable(recorded_settings(record.bench_file.settings))
        == _comparable(config.settings),
    }
    reasons = [name for name, is_unchanged in unchanged.items() if not is_unchanged]
    return ("outdated", reasons[0]) if reasons else ("current", "")


def _comparable(settings: Settings) -> dict[str, Any]:
    """Return the settings that affect results, as a run records them."""
    values: dict[str, Any] = through_json(normalize_settings(settings).portable())
    file = str(values["backbone"]).partition(":")[0]  # a weight file is named after its backbone
    return {**values, "backbone": file.removesuffix(".safetensors")}


def enter_runs(archive: Path, runs_by_name: Mapping[str, Runs]) -> None:
    """Add runs to the archive of a suite; replace runs of the same names.

    Args:
        archive: CSV file; it is created if needed.
        runs_by_name: Runs with one record each, by name in the archive.
    """
    earlier_runs = {runs.name: runs for runs in read_archive(archive)} if archive.exists() else {}
    new_runs = {name: replace(runs, name=name) for name, runs in runs_by_name.items()}
    archive.parent.mkdir(parents=True, exist_ok=True)
    write_archive([*{**earlier_runs, **new_runs}.values()], archive)


def other_archives(results: Path, name: str) -> dict[str, list[Runs]]:
    """Read the archives of all suites of a folder except one, by file name.

    Args:
        results: Folder of ``suites/NAME.toml`` and ``NAME.csv``.
        name: Name of the excluded suite.
    """
    archives = [path for path in archives_of(results).values() if path.is_file()]
    return {path.name: read_archive(path) for path in archives if path.stem != name}


def find_equal_runs(
    suite: Suite, cell: SuiteCell, others: Mapping[str, Sequence[Runs]]
) -> tuple[str, dict[str, Runs]]:
    """Find runs of another suite that have the cell's settings, options, search and code.

    Either all runs of a cell come from one row, which shares its searched values, or none.

    Args:
        suite: The suite of the cell.
        cell: The cell.
        others: Runs of other suites by file name of the archive.

    Returns:
        File name of the archive, and the runs by name in the cell's archive; both empty if no row
        has all runs.
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
                row[cell.archive_name(record.seed)] = runs
        for row in rows.values():
            if len(row) == len(cell.configs):
                return file, row
    return "", {}


def split_by_seed(cell: SuiteCell, cell_runs: Sequence[Runs]) -> dict[str, Runs]:
    """Return the finished runs of a cell's run folders by name in the archive.

    Args:
        cell: The cell.
        cell_runs: Runs of its run folders.
    """
    return {
        cell.archive_name(record.seed): replace(runs, records=(record,))
        for runs in cell_runs
        for record in runs.records
        if record.result is not None
    }


def suite_experiments(suite: Suite, archive: Path) -> list[Experiment]:
    """Read the experiments of a suite's archive, with rows labelled as in the suite.

    Runs of rows that are not in the suite are left out.

    Args:
        suite: The suite.
        archive: Its CSV file.

    Raises:
        FczooError: The runs of a row have different code or different options.
    """
    labels = [row.label for row in suite.rows]
    experiments = []
    for experiment in experiments_of(read_archive(archive), str(archive)):
        lines = [
            replace(x, label=archive_name(x.records[0]).split("/")[0]) for x in experiment.lines
        ]
        lines = sorted(
            (line for line in lines if line.label in labels), key=lambda x: labels.index(x.label)
        )
        for line in lines:
            codes = {result.versions.get("code") for result in line.results}
            if len(codes) > 1 or sum(x.label == line.label for x in lines) > 1:
                raise FczooError(
                    f"runs of {line.label} in {archive} have different code or different options; "
                    "run the suite again"
                )
        if lines:
            experiments.append(replace(experiment, lines=tuple(lines)))
    return experiments


def archive_name(record: RunRecord) -> str:
    """Return the name of a run in its archive: row, setting and seed.

    Args:
        record: Run from the archive.
    """
    return record.place.rpartition(": ")[2].removesuffix(f"/{record.method}/seed{record.seed}")


def archives_of(results: Path) -> dict[Path, Path]:
    """Return the paths of the suites' archives, which need not exist, by suite file.

    Args:
        results: Folder of ``suites/NAME.toml`` and ``NAME.csv``.
    """
    files = sorted((results / SUITES).glob("*.toml"))
    return {file: results / f"{file.stem}.csv" for file in files}


def experiments_of_suites(results: Path) -> list[Experiment] | None:
    """Read the experiments of all suites of a folder; None without a suite.

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
    """Read the experiments of a folder's suites, run folders and archives.

    Args:
        results: Folder of runs, which may not exist.

    Raises:
        FczooError: A suite, an archive or a run is damaged.
    """
    others = experiments_below(results, excluded_folder=results / RUNS)  # archives have these runs
    return [*(experiments_of_suites(results) or []), *others]
