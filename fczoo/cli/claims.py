"""``fczoo claims``."""

from pathlib import Path

import click

from fczoo.core.errors import FczooError


@click.command()
@click.argument("name", required=False)
@click.option("--paper", help="Claims of one paper alone; see `fczoo papers`.")
@click.option("--run", "running", metavar="CLAIM", help="Run both sides on digits, in minutes, and judge.")
@click.option("--seeds", default="0-2", show_default=True, help="Of --run.")
@click.option(
    "--jobs", metavar="auto|int", default="1", show_default=True, help="Of --run: runs side by side."
)
@click.option(
    "--results",
    type=click.Path(path_type=Path),
    default="results",
    show_default=True,
    help="Where runs are looked for; --run writes to claims/CLAIM in it.",
)
def claims(
    name: str | None, paper: str | None, running: str | None, seeds: str, jobs: str, results: Path
) -> None:
    """What the papers claim, and what runs here say of it: all claims, or NAME with numbers and commands."""
    from fczoo.papers.claim_pages import listing, page
    from fczoo.papers.claims import get_claim

    if running is None:
        click.echo(page(get_claim(name), results) if name else listing(results, paper))
        return
    if name or paper:
        raise FczooError("--run takes the claim's name itself; leave the rest out")
    from fczoo.cli.arguments import parse_jobs, parse_seeds
    from fczoo.federation.settings import Settings
    from fczoo.runner.cell import Conduct
    from fczoo.runner.grid import Job, run_grid

    claim, numbers = get_claim(running), parse_seeds(seeds)
    settings = Settings.for_dataset("digits", partition=claim.small)
    sides = {
        Path(place): Job(settings, (side.method,), tuple(numbers), {side.method: side.options})
        for place, side in zip(("better", "worse"), claim.sides, strict=True)
    }
    out = results / "claims" / claim.name
    run_grid(sides, out, Conduct(jobs=parse_jobs(jobs)))
    click.echo(page(claim, out))
