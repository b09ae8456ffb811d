"""``fczoo leaderboard``: a site made of results."""

from pathlib import Path

import click

from fczoo.core.errors import FczooError

ARCHIVE = Path("results") / "results.csv"


@click.command()
@click.argument("places", nargs=-1, type=click.Path(path_type=Path, exists=True))
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, metavar="FOLDER", help="Folder of its own."
)
def leaderboard(places: tuple[Path, ...], out: Path) -> None:
    """Build a site that fetches nothing: methods ranked over benchmarks, and a page a benchmark.

    PLACES are archives and run folders, or folders that hold them.  [results/results.csv]
    """
    if not places and not ARCHIVE.is_file():
        raise FczooError(f"there is no {ARCHIVE} here; name archives or run folders")
    from fczoo.board.pages import INDEX, write_site

    count = write_site(places or (ARCHIVE,), out)
    click.echo(f"{count} benchmarks written to {out / INDEX}")
