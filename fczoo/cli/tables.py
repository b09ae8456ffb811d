"""``fczoo report``, ``papers``, ``compare`` and ``reproduce``: our tables, theirs, and both."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fczoo.cli.bench import bench
from fczoo.cli.options import GroupedCommand, Name
from fczoo.core.errors import FczooError
from fczoo.core.options import plural

if TYPE_CHECKING:
    from fczoo.papers.cards import Card

TABLE = click.option(
    "--table",
    "tables",
    multiple=True,
    metavar="NAME",
    help="Only this printed table, such as T1; may be given several times.",
)
ROW = click.option(
    "--row",
    "rows",
    multiple=True,
    metavar="NAME",
    help="Only this printed row, or those with NAME in theirs; may be given several times.",
)
FOLDERS = click.argument("folders", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))


@click.command(cls=GroupedCommand)
@FOLDERS
@click.option(
    "--format",
    "style",
    type=Name(["text", "markdown", "latex", "csv", "json"]),
    default="text",
    show_default=True,
)
@click.option(
    "--html",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write one self-contained page instead of printing tables.",
)
@click.option(
    "--figures",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="With --html: the page's figures as PNG and PDF, too.",
)
@click.option(
    "--archive",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help=(
        "Write all finished runs to one CSV file, which `report`, `compare` and `reproduce` read as they "
        "read folders."
    ),
)
def report(
    folders: tuple[Path, ...], style: str, html: Path | None, figures: Path | None, archive: Path | None
) -> None:
    """Print tables of run folders and archives, or of all runs below a folder."""
    if figures and not html:
        raise FczooError("--figures are those of a page; give --html FILE, too")
    if archive and html:
        raise FczooError("--archive and --html each write a file of their own; give one of them")
    if archive:
        from fczoo.reports.archive import write_archive
        from fczoo.reports.runs import read_runs

        written, unfinished = write_archive(read_runs(folders), archive)
        left_out = f", {unfinished} unfinished left out" if unfinished else ""
        click.echo(f"{plural(written, 'run')} written to {archive}{left_out}")
    elif html:
        from fczoo.board.pages import write_page

        write_page(folders, html)
        if figures:
            from fczoo.reports.drawing import write_all_figures

            write_all_figures(folders, figures)
        click.echo(f"Written to {html}{f' and {figures}' if figures else ''}")
    else:
        from fczoo.cli.terminal import fitted
        from fczoo.reports.text import report as tables

        text = tables(folders, style)
        click.echo(fitted(text) if style == "text" else text)


@click.command(cls=GroupedCommand)
@click.argument("paper", required=False)
@click.argument("table", required=False)
@click.option("--missing", is_flag=True, help="List printed systems that are not implemented here, and why.")
def papers(paper: str | None, table: str | None, missing: bool) -> None:
    """Print the papers' own tables: all of them, those of PAPER, or one TABLE."""
    from fczoo.papers import pages

    if missing and paper:
        raise FczooError(f"--missing is about all papers; leave {paper} out")
    if missing:
        click.echo(pages.missing())
    else:
        click.echo(pages.show_paper(paper, table) if paper else pages.overview())


@click.command(cls=GroupedCommand)
@FOLDERS
@click.option("--paper", required=True, help="See `fczoo papers`.")
@TABLE
@ROW
def compare(folders: tuple[Path, ...], paper: str, tables: tuple[str, ...], rows: tuple[str, ...]) -> None:
    """Print our numbers beside a paper's, with every setting and option that differs from the print."""
    from fczoo.cli.terminal import fitted
    from fczoo.papers.compare import compare as beside

    click.echo(fitted(beside(folders, paper, tables, rows)))


@click.command(cls=GroupedCommand, context_settings={"ignore_unknown_options": True})
@click.argument("card", required=False)
@click.argument("extra", nargs=-1, type=click.UNPROCESSED)
@click.option("--dry-run", is_flag=True, help="Print the command and do not run it.")
@click.option(
    "--reading",
    type=Name(["print", "released"]),
    show_default="print",
    help="Follow the paper as printed, or its released code.",
)
@click.option(
    "--results",
    type=click.Path(path_type=Path, exists=True),
    show_default="results",
    help="Without CARD: the folder in which runs are searched.",
)
@click.option("--paper", help="Without CARD: list the rows of this paper only; see `fczoo papers`.")
@TABLE
@ROW
def reproduce(
    card: str | None,
    extra: tuple[str, ...],
    dry_run: bool,
    reading: str | None,
    results: Path | None,
    paper: str | None,
    tables: tuple[str, ...],
    rows: tuple[str, ...],
) -> None:
    """Run the command behind a paper's row, e.g. hgp/cifar100/dirichlet:0.05, and judge it.
    Without CARD: all cards, with status.

    EXTRA words go to `fczoo bench`, such as --data-root DIR, --backbone FILE or --out FOLDER.
    """
    from fczoo.cli.terminal import fitted
    from fczoo.papers.cards import get_card
    from fczoo.papers.compare import spread
    from fczoo.papers.reproduce import listing, spelled, verdict
    from fczoo.reports.runs import read_experiments

    if card is None:
        if dry_run or reading:
            raise FczooError("--dry-run and --reading are about one card; name it, or leave them out")
        click.echo(fitted(listing(results or Path("results"), paper, tables, rows)))
        return
    if card.startswith("-"):
        raise click.NoSuchOption(card, ctx=click.get_current_context())
    listed = {"--results": results, "--paper": paper, "--table": tables, "--row": rows}
    if given := [name for name, value in listed.items() if value]:
        raise FczooError(f"{given[0]} is about the list of all cards; leave it or {card} out")
    chosen = get_card(card)
    command = chosen.command(extra, reading or "print")
    ran = bench.make_context("fczoo reproduce", command[1:])
    _check_one_row(chosen, ran.params)
    click.echo(spelled(command))
    if dry_run:
        return
    with ran:
        bench.invoke(ran)
    for experiment in read_experiments([Path(ran.params["out"])]):
        for line in experiment.lines:
            if line.results[0].method == chosen.row.method:
                click.echo(spread(experiment, chosen.paper))
                click.echo(f"{chosen.name}: {verdict(chosen, experiment, line)}")


def _check_one_row(card: "Card", given: Mapping[str, Any]) -> None:
    """Raise FczooError where the options of ``fczoo bench`` mean more than the one setting of a card, or
    leave its method out.
    """
    from fczoo.cli.arguments import methods_named, specs
    from fczoo.cli.config import read_config
    from fczoo.cli.plan import SETTINGS

    cells = read_config(given["config"], SETTINGS, given)[1] if given["config"] else []
    grid = [name for name in ("dataset", "partition") if len(specs(given[name])) > 1]
    if cells or grid:
        several = f"--{grid[0]} names several" if grid else f"{given['config']} has cells"
        raise FczooError(f"{card.name} is one setting, and {several}; leave it out, or use fczoo bench")
    if card.row.method not in methods_named(given["methods"]):
        raise FczooError(f"--methods leaves out {card.row.method}, of which {card.name} is; add it")
