"""``fczoo claims``."""

from pathlib import Path

import click

from fczoo.cli.options import GroupedCommand
from fczoo.core.errors import FczooError


@click.command(cls=GroupedCommand)
@click.argument("name", required=False)
@click.option("--paper", help="Show the claims of one paper; see `fczoo papers`.")
@click.option("--run", "running", metavar="CLAIM", help="Run both sides on digits, in minutes, and judge.")
@click.option("--seeds", show_default="0-2", metavar="NUMBERS", help="Seeds of --run.")
@click.option("--jobs", metavar="auto|NUMBER", show_default="1", help="Number of runs at a time.")
@click.option(
    "--results",
    type=click.Path(path_type=Path),
    show_default="results",
    help="Folder in which runs are searched; --run writes to claims/CLAIM in it.",
)
def claims(
    name: str | None,
    paper: str | None,
    running: str | None,
    seeds: str | None,
    jobs: str | None,
    results: Path | None,
) -> None:
    """Show what papers claim and what the runs here say: all claims, or NAME with numbers and commands.

    A claim holds or not by each pair of rows, one of either side, that stand in one table; 2x is two pairs.
    """
    from fczoo.papers.claim_pages import listing, page
    from fczoo.papers.claims import get_claim

    place = results or Path("results")
    if name and paper:
        raise FczooError(f"--paper is about the list of claims; leave it or {name} out")
    if running is None:
        if seeds or jobs:
            raise FczooError("--seeds and --jobs are about --run CLAIM; give it, too, or leave them out")
        if results and not results.exists():
            raise FczooError(f"nothing is at --results {results}; give a folder or an archive of runs")
        click.echo(page(get_claim(name), place) if name else listing(place, paper))
        return
    if name or paper:
        raise FczooError("--run takes the claim's name itself; leave the rest out")
    from fczoo.cli.arguments import parse_jobs, parse_seeds
    from fczoo.federation.settings import Settings
    from fczoo.runner.cell import Conduct
    from fczoo.runner.grid import Job, run_grid

    claim, numbers = get_claim(running), parse_seeds(seeds or "0-2")
    settings = Settings.for_dataset("digits", partition=claim.small)
    sides = {
        Path(place): Job(settings, (side.method,), tuple(numbers), {side.method: side.options})
        for place, side in zip(("better", "worse"), claim.sides, strict=True)
    }
    out = place / "claims" / claim.name
    run_grid(sides, out, Conduct(jobs=parse_jobs(jobs or 1)))
    click.echo(page(claim, out))
