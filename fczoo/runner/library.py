"""``fczoo.bench``: a grid of runs from Python."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fczoo.core.registry import METHODS
from fczoo.federation.settings import Settings
from fczoo.reports.archive import write_archive
from fczoo.reports.results import Results, load_results
from fczoo.reports.runs import read_runs
from fczoo.runner.cell import Conduct
from fczoo.runner.grid import Job, by_seed, run_grid


def bench(
    methods: str | Sequence[str],
    seeds: Sequence[int] = (0,),
    *,
    dataset: str = "digits",
    options: Mapping[str, Mapping[str, Any]] | None = None,
    out: str | Path | None = None,
    jobs: int = 1,
    **settings: Any,
) -> Results:
    """Run methods with seeds: ``print(fczoo.bench(["pilora", "hgp"], range(3), dataset="digits"))``.

    ``options`` are those of methods: ``{"hgp": {"lr": 0.01}}``; ``settings`` are the fields of ``Settings``,
    those not given follow the data set's schedule. ``out`` is a run folder as ``fczoo bench --out`` writes
    it, in which a broken run goes on; without it nothing is kept but what is returned. ``jobs`` runs go side
    by side. Raises FczooError for whatever does not fit.
    """
    named = [methods] if isinstance(methods, str) else list(methods)
    own = Settings.for_dataset(dataset, **settings)
    values = {METHODS.find(name) or name: chosen for name, chosen in (options or {}).items()}
    methods = tuple(map(METHODS.canonical_name, named))
    grid = by_seed(Path(), Job(own, methods, tuple(seeds), values))
    if out is not None:
        run_grid(grid, Path(out), Conduct(jobs=jobs))
        return load_results(out)
    with TemporaryDirectory(prefix="fczoo-") as folder:
        place, archive = Path(folder) / "runs", Path(folder) / "results.csv"
        run_grid(grid, place, Conduct(jobs=jobs))
        write_archive(read_runs([place]), archive)
        return load_results(archive)
