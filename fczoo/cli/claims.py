"""``fczoo claims``."""

from pathlib import Path

import click

from fczoo.cli.options import GroupedCommand
from fczoo.core.errors import FczooError


@click.command(cls=GroupedCommand)
@click.argument("name", required=False)
@click.option(
    "--paper", help="Show only the claims of this paper; see `fczoo papers`.  [default: all]"
)
@click.option(
    "--run",
    "running",
    metavar="CLAIM",
    help="Run both sides of CLAIM on digits, which takes minutes, and test it.",
)
@click.option(
    "--seeds",
    metavar="NUMBERS",
    help="Seeds of --run; 0-2 means three seeds.  [default: 0-2]",
)
@click.option(
    "--jobs",
    metavar="auto|NUMBER",
    help="Number of runs of --run at the same time; auto: one per GPU, or per core without a GPU.  "
    "[default: 1]",
)
@click.option(
    "--results",
    type=click.Path(path_type=Path),
    help="Folder or archive of the runs that test claims; --run writes to claims/CLAIM in it.  "
    "[default: results]",
)
def claims(
    name: str | None,
    paper: str | None,
    running: str | None,
    seeds: str | None,
    jobs: str | None,
    results: Path | None,
) -> None:
    """Show what papers claim and whether runs support it: all claims, or NAME with its numbers.

    A claim compares two sides in pairs of rows of a table, one row per side. 2x means two such
    pairs.
    """
    from fczoo.papers.claims import get_claim, listing, page

    folder = results or Path("results")
    if name and paper:
        raise FczooError(f"--paper filters the list of claims; leave it or {name} out")
    if running is None:
        if seeds or jobs:
            raise FczooError("--seeds and --jobs are about --run CLAIM; add it, or leave them out")
        if results and not results.exists():
            raise FczooError(
                f"nothing is at --results {results}; give a folder or an archive of runs"
            )
        click.echo(page(get_claim(name), folder) if name else listing(folder, paper))
        return
    if name or paper:
        raise FczooError("--run takes the claim's name itself; leave the rest out")
    from fczoo.cli.arguments import parse_jobs, parse_seeds
    from fczoo.federation.settings import Settings
    from fczoo.runner.grid import Job, run_grid
    from fczoo.runner.run_spec import ExecutionConfig

    claim, numbers = get_claim(running), parse_seeds(seeds or "0-2")
    settings = Settings.for_dataset("digits", partition=claim.small)
    sides = {
        Path(folder): Job(settings, (side.method,), tuple(numbers), {side.method: side.options})
        for folder, side in zip(("better", "worse"), claim.sides, strict=True)
    }
    out = folder / "claims" / claim.name
    run_grid(sides, out, ExecutionConfig(jobs=parse_jobs(jobs or 1)))
    click.echo(page(claim, out))
