"""``fczoo report``, ``papers``, ``compare`` and ``reproduce``: our tables, theirs, and both."""

from pathlib import Path

import click

from fczoo.cli.bench import bench
from fczoo.core.errors import FczooError

FOLDERS = click.argument("folders", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))


@click.command()
@FOLDERS
@click.option(
    "--format",
    "style",
    type=click.Choice(["text", "markdown", "latex", "csv", "json"]),
    default="text",
    show_default=True,
)
@click.option(
    "--html",
    type=click.Path(path_type=Path),
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
    """Tables of any run folders and archives, or of all below a folder."""
    if figures and not html:
        raise FczooError("--figures are those of a page; give --html FILE, too")
    if archive and html:
        raise FczooError("--archive and --html each write a file of their own; give one of them")
    if archive:
        from fczoo.reports.archive import write_archive
        from fczoo.reports.runs import read_runs

        written, unfinished = write_archive(read_runs(folders), archive)
        left_out = f", {unfinished} unfinished left out" if unfinished else ""
        click.echo(f"{written} runs written to {archive}{left_out}")
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


@click.command()
@click.argument("paper", required=False)
@click.argument("table", required=False)
@click.option("--missing", is_flag=True, help="Printed systems that are not implemented here, and why.")
def papers(paper: str | None, table: str | None, missing: bool) -> None:
    """The papers' own tables: all of them, those of PAPER, or one TABLE."""
    from fczoo.papers import pages

    if missing and paper:
        raise FczooError(f"--missing is about all papers; leave {paper} out")
    if missing:
        click.echo(pages.missing())
    else:
        click.echo(pages.show_paper(paper, table) if paper else pages.overview())


@click.command()
@FOLDERS
@click.option("--paper", required=True, help="See `fczoo papers`.")
def compare(folders: tuple[Path, ...], paper: str) -> None:
    """Our numbers beside a paper's, with every setting and option that differs from the print."""
    from fczoo.papers.compare import compare as beside

    click.echo(beside(folders, paper))


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("card", required=False)
@click.argument("extra", nargs=-1, type=click.UNPROCESSED)
@click.option("--dry-run", is_flag=True, help="Print the command, do not run it.")
@click.option(
    "--reading",
    type=click.Choice(["print", "released"]),
    default="print",
    show_default=True,
    help="As the paper prints it, or as its released code does.",
)
@click.option(
    "--results",
    type=click.Path(path_type=Path),
    default="results",
    show_default=True,
    help="Where cards without CARD look for runs.",
)
def reproduce(card: str | None, extra: tuple[str, ...], dry_run: bool, reading: str, results: Path) -> None:
    """Run the command behind a paper's row, e.g. hgp/cifar100/dirichlet:0.05, and judge it.
    Without CARD: all cards, with status.

    EXTRA words go to `fczoo bench`, such as --data-root DIR, --backbone FILE or --out FOLDER.
    """
    from fczoo.papers.cards import get_card
    from fczoo.papers.compare import spread
    from fczoo.papers.reproduce import listing, spelled, verdict
    from fczoo.reports.runs import read_experiments

    if card is None:
        click.echo(listing(results))
        return
    chosen = get_card(card)
    command = chosen.command(extra, reading)
    click.echo(spelled(command))
    if not dry_run:
        ran = bench.make_context("bench", command[1:])
        with ran:
            bench.invoke(ran)
        (experiment,) = read_experiments([Path(ran.params["out"])])
        click.echo(spread(experiment, chosen.paper))
        click.echo(f"{chosen.name}: {verdict(chosen, experiment, experiment.lines[0])}")
