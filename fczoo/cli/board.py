"""``fczoo leaderboard`` and ``fczoo submit``: a site of results, and how results enter it."""

from pathlib import Path

import click

from fczoo.cli.options import GroupedCommand
from fczoo.core.errors import FczooError
from fczoo.core.options import plural

ARCHIVE = Path("results") / "results.csv"


@click.command(cls=GroupedCommand)
@click.argument("places", nargs=-1, type=click.Path(path_type=Path, exists=True))
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    required=True,
    metavar="FOLDER",
    help="Folder of the pages: a new one, or an earlier site, which is updated.",
)
def leaderboard(places: tuple[Path, ...], out: Path) -> None:
    """Build static web pages: methods ranked over all benchmarks, and a page per benchmark.

    PLACES are archives and run folders, or folders that hold them.  [default: results/results.csv]
    """
    if not places and not ARCHIVE.is_file():
        raise FczooError(f"no file {ARCHIVE} here; name archives or run folders")
    from fczoo.board.pages import INDEX, write_site

    count = write_site(places or (ARCHIVE,), out)
    click.echo(f"{plural(count, 'benchmark')} written to {out / INDEX}")


@click.command(cls=GroupedCommand)
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option(
    "--into",
    type=click.Path(path_type=Path, dir_okay=False),
    default=ARCHIVE,
    show_default=True,
    metavar="FILE",
    help="Archive to which the runs are appended.",
)
@click.option("--dry-run", is_flag=True, help="Check the folder without entering its runs.")
def submit(folder: Path, into: Path, dry_run: bool) -> None:
    """Check a run folder and append its runs to an archive.

    It must be complete and unchanged, and record its versions, code and test set.
    """
    from fczoo.reports.submission import submit as enter

    count, faults = enter(folder, into, not dry_run)
    for fault in faults:
        click.echo(f"refused: {fault}", err=True)
    if faults:
        raise FczooError(f"nothing of {folder} was entered into {into}; fix what was refused")
    runs = plural(count, "run")
    click.echo(f"{runs} may enter {into}" if dry_run else f"{runs} entered into {into}")
