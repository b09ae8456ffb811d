"""Python interface to sweeps: ``fczoo.bench``, ``load_results`` and the ``Results`` they return."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, get_args

from tabulate import tabulate

from fczoo.core.errors import FczooError, use_python_names
from fczoo.core.method import Method
from fczoo.core.names import fold, match
from fczoo.core.options import nearest, plain, plural, quote
from fczoo.core.registry import METHODS
from fczoo.core.seeds import check_seeds
from fczoo.federation.result import Result
from fczoo.federation.settings import Settings
from fczoo.models.storage import KeepModel
from fczoo.reports.archive import write_archive
from fczoo.reports.captions import describe
from fczoo.reports.drawing import draw
from fczoo.reports.figures import accuracy_curves, colour_order
from fczoo.reports.run_folder import Runs
from fczoo.reports.runs import Experiment, experiments_of, read_runs
from fczoo.reports.table_formats import number, sections, to_csv
from fczoo.reports.tables import GROUPS, SUMMARY_COLUMNS, all_columns, make_table
from fczoo.runner.configs import ExecutionConfig, make_sweep, store_paths
from fczoo.runner.sweep import run_sweep

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame


@dataclass(frozen=True, repr=False)
class Results:
    """Finished runs, grouped into experiments whose numbers can be compared in one table.

    Iterating yields the ``Result`` of each run. ``len`` is the number of runs, ``results[METHOD]``
    returns the runs of a method, and ``str`` is the table that ``fczoo bench`` prints. A notebook
    displays the object as tables, and ``plot()`` as a figure.

    Attributes:
        runs: Runs of each folder or archive that was read, with their settings.
    """

    runs: tuple[Runs, ...]

    @cached_property
    def experiments(self) -> list[Experiment]:
        """Group the runs by data, partition, backbone and schedule.

        Raises:
            FczooError: No run is finished.
        """
        return experiments_of(self.runs, "these results")

    def __iter__(self) -> Iterator[Result]:
        return (
            r for experiment in self.experiments for line in experiment.lines for r in line.results
        )

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, method: str) -> list[Result]:
        """Return the runs of a method in the order of their seeds.

        Args:
            method: Name of the method; case does not matter.

        Raises:
            KeyError: No run has this method.
        """
        matches = [result for result in self if fold(result.method) == fold(method)]
        if not matches:
            raise KeyError(method)
        return matches

    def __repr__(self) -> str:
        methods = ", ".join(dict.fromkeys(r.method for r in self))
        datasets = ", ".join(dict.fromkeys(r.settings["dataset"] for r in self))
        return f"<Results of {plural(len(self), 'run')}: {methods} on {datasets}>"

    def __str__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        parts = []
        for experiment in self.experiments:
            table = make_table(experiment, SUMMARY_COLUMNS)
            rows = [
                [label, *map(number, row, table.columns)]
                for label, row in zip(table.labels, table.rows, strict=True)
            ]
            head = ["method", *(column.name for column in table.columns)]
            table_html = tabulate(rows, head, tablefmt="html", disable_numparse=True)
            parts.append(f"<p>{escape(describe(experiment))}</p>{table_html}")
        return "".join(parts)

    def table(self, style: str = "text", every_column: bool = False) -> str:
        """Format the tables of all experiments.

        Args:
            style: ``text``, ``markdown``, ``latex`` or ``csv``.
            every_column: Whether to show all columns, as ``fczoo report`` does; CSV always has all.

        Raises:
            FczooError: The style is unknown, or no run is finished.
        """
        style = match(style, ("text", "markdown", "latex", "csv")) or style
        if style == "csv":
            return to_csv(self.experiments)
        if style not in ("text", "markdown", "latex"):
            raise FczooError(f"style is {style!r}; it must be text, markdown, latex or csv")
        return sections(self.experiments, style, GROUPS if every_column else [SUMMARY_COLUMNS])

    def to_pandas(self) -> "DataFrame":
        """Convert to a ``pandas.DataFrame`` with one row per run.

        Returns:
            Data frame with method, seed, data set, partition and every column of the tables.

        Raises:
            FczooError: pandas is not installed, or no run is finished.
        """
        try:
            import pandas
        except ImportError as error:
            raise FczooError("to_pandas needs pandas; pip install 'fczoo[pandas]'") from error
        rows, columns = [], all_columns()
        for experiment in self.experiments:
            for line in experiment.lines:
                for result in line.results:
                    figures = {name: column.value(result) for name, column in columns.items()}
                    context = {name: experiment.settings[name] for name in ("dataset", "partition")}
                    rows.append({"method": line.label, "seed": result.seed, **context, **figures})
        return pandas.DataFrame(rows)

    def plot(self, experiment: int = 0) -> "Figure":
        """Plot each method's accuracy over all classes seen, after each task.

        Args:
            experiment: Index of the experiment in ``experiments``.

        Returns:
            A matplotlib figure: a notebook shows it, ``figure.savefig(FILE)`` writes it.

        Raises:
            FczooError: matplotlib is not installed, no run is finished, or the index is out of
                range.
        """
        try:
            chosen = self.experiments[experiment]
        except (IndexError, TypeError) as error:
            last = len(self.experiments) - 1
            raise FczooError(
                f"experiment is {quote(experiment)}; these results have experiments 0 to {last}"
            ) from error
        figure: Figure = draw(accuracy_curves(chosen), colour_order(self.experiments))
        return figure

    def save(self, path: str | Path) -> None:
        """Write a CSV file with one row per run; ``load_results`` and ``fczoo report`` read it.

        Args:
            path: File to write.

        Raises:
            FczooError: Two run folders have the same name.
        """
        write_archive(self.runs, Path(path))


def load_results(*places: str | Path) -> Results:
    """Load the finished runs of run folders, archives and saved results.

    Args:
        *places: Run folders, archives, folders that contain them, or files of ``Result.save``.

    Raises:
        FczooError: A place is not a path, no run is found, or no run is finished.
    """
    for path in places or (None,):
        if not isinstance(path, str | os.PathLike):
            raise FczooError(
                f"{quote(path)} is not a path; give a run folder, archive or saved result"
            )
    results = Results(tuple(read_runs(map(Path, places))))
    _ = results.experiments
    return results


@use_python_names
def bench(
    methods: str | type[Method] | Sequence[str | type[Method]],
    seeds: Sequence[int] = (0,),
    *,
    dataset: str | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    out: str | Path | None = None,
    jobs: int = 1,
    keep_model: KeepModel = "final",
    keep_server_state: bool = True,
    **settings: Any,
) -> Results:
    """Run each method with each seed and return the results.

    Example: ``print(fczoo.bench(["pilora", "hgp"], range(3), dataset="digits"))``.

    Args:
        methods: Names or classes of methods, one or several.
        seeds: Seeds of the runs.
        dataset: Name of the data set; None: ``digits``.
        options: Options by method, such as ``{"hgp": {"lr": 0.01}}``.
        out: Run folder, as ``fczoo bench --out`` writes it; interrupted runs in it resume. None:
            no file is kept.
        jobs: Number of parallel runs.
        keep_model: Models that each run stores in ``out``, for ``load_model``: the ``"final"``
            one, those of all ``"tasks"``, or ``"none"``.
        keep_server_state: Store the whole server state; False stores only what prediction needs.
        **settings: Fields of ``Settings``; others follow the data set's default schedule. With
            ``start_from=FOLDER`` the runs continue from stored models.

    Raises:
        FczooError: An argument is invalid, or a run fails.
    """
    if keep_model not in get_args(KeepModel):
        choices = ", ".join(map(repr, get_args(KeepModel)))
        raise FczooError(f"keep_model is {quote(keep_model)}; it must be one of {choices}")
    names, numbers = _names(methods), check_seeds(seeds)
    run_settings = Settings.for_dataset(dataset, **settings)
    if jobs != plain(jobs) or not isinstance(jobs, int) or isinstance(jobs, bool) or jobs < 1:
        raise FczooError(f"jobs is {quote(jobs)}; it must be a whole number from 1 up")
    if not isinstance(options or {}, Mapping) or not all(
        isinstance(values, Mapping) for values in (options or {}).values()
    ):
        raise FczooError(
            f"options is {quote(options)}; give a dict of dicts: {{'hgp': {{'lr': 0.01}}}}"
        )
    values = {METHODS.find(name) or name: chosen for name, chosen in (options or {}).items()}
    if stray := sorted({*values} - {*names}):
        raise FczooError(
            f"options has values for {stray[0]!r}, which is not run; {nearest(stray[0], names)}"
        )
    sweep = make_sweep(Path(), run_settings, names, numbers, values)
    if out is not None:
        execution = ExecutionConfig(
            jobs=jobs, keep_model=keep_model, keep_server_state=keep_server_state
        )
        store_paths(Path(out), sweep)
        run_sweep(sweep, Path(out), execution)
        return load_results(out)
    with TemporaryDirectory(prefix="fczoo-") as folder:
        runs_folder, archive = Path(folder) / "runs", Path(folder) / "results.csv"
        run_sweep(sweep, runs_folder, ExecutionConfig(jobs=jobs, keep_model="none"))
        write_archive(read_runs([runs_folder]), archive)
        return load_results(archive)


def _names(methods: Any) -> list[str]:
    """Return the names of one or several methods, each given by name or class.

    Raises FczooError for anything else.
    """
    entries = [methods] if isinstance(methods, str | type | Method) else methods
    if not isinstance(entries, Iterable):
        raise FczooError(
            f"methods is {quote(methods)}; give a name such as 'hgp', or a list of names"
        )
    names: list[Any] = []
    for method in entries:
        if isinstance(method, Method):
            problem = f"methods has an instance of {method.name}"
            raise FczooError(f"{problem}; give its name, and options={{{method.name!r}: ...}}")
        name: Any = (
            method.name if isinstance(method, type) and issubclass(method, Method) else method
        )
        names.append(METHODS.get(name).name)
    if not names or len(set(names)) < len(names):
        raise FczooError(f"methods is {quote(names)}; give one or more distinct names")
    return names
