"""``fczoo.bench``: a sweep from Python."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

from fczoo.core.errors import FczooError, use_python_names
from fczoo.core.method import Method
from fczoo.core.options import nearest, plain, quote
from fczoo.core.registry import METHODS
from fczoo.core.seeds import check_seeds
from fczoo.federation.settings import Settings
from fczoo.models.keep import KeepModel
from fczoo.reports.archive import write_archive
from fczoo.reports.results import Results, load_results
from fczoo.reports.runs import read_runs
from fczoo.runner.configs import ExecutionConfig, make_sweep, store_paths
from fczoo.runner.sweep import run_sweep


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
    """Run methods with seeds.

    Example: ``print(fczoo.bench(["pilora", "hgp"], range(3), dataset="digits"))``.

    ``options`` are those of methods: ``{"hgp": {"lr": 0.01}}``; ``settings`` are the fields of
    ``Settings``, those not given follow the schedule of the data set, by default ``digits``. With
    ``start_from=FOLDER`` the runs continue from kept models. ``out`` is a run folder as ``fczoo
    bench --out`` writes it, in which an interrupted run resumes; without it nothing is kept but
    what is returned. ``jobs`` runs go side by side. In ``out`` each run keeps its final model,
    which ``load_model`` reads; ``keep_model="tasks"`` keeps one per task, ``"none"`` none, and
    ``keep_server_state=False`` only what prediction needs. Raises FczooError for whatever does not
    fit.
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
            f"options names {stray[0]!r}, which is not run; {nearest(stray[0], names)}"
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
    """Return the names of methods given by name or class, one or several.

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
