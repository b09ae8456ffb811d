"""``fczoo claims``."""

from pathlib import Path
from typing import Any

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
    help="Run both sides of CLAIM on digits, in minutes, and judge it.",
)
@click.option(
    "--seeds", show_default="0-2", metavar="NUMBERS", help="Seeds of --run; 0-2 are three."
)
@click.option(
    "--jobs",
    metavar="auto|NUMBER",
    show_default="1",
    help="Number of runs of --run side by side; auto: one per core or GPU.",
)
@click.option(
    "--results",
    type=click.Path(path_type=Path),
    show_default="results",
    help="Folder or archive of runs to judge by; --run writes to claims/CLAIM in the folder.",
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

    A claim compares two sides in every pair of result rows, one row per side, of one table; 2x
    means two such pairs.
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
    from fczoo.runner.configs import ExecutionConfig, make_sweep
    from fczoo.runner.sweep import run_sweep

    claim, numbers = get_claim(running), parse_seeds(seeds or "0-2")
    settings = Settings.for_dataset("digits", partition=claim.small)
    sides: dict[Path, Any] = {}
    for name, side in zip(("better", "worse"), claim.sides, strict=True):
        options = {side.method: side.options}
        sides |= make_sweep(Path(name), settings, [side.method], numbers, options)
    out = folder / "claims" / claim.name
    run_sweep(sides, out, ExecutionConfig(jobs=parse_jobs(jobs or 1)))
    click.echo(page(claim, out))
