"""``fczoo report``, ``papers``, ``compare`` and ``reproduce``: tables of runs and of papers."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fczoo.cli.bench import bench
from fczoo.cli.options import GroupedCommand, Name
from fczoo.core.errors import FczooError
from fczoo.core.options import plural

if TYPE_CHECKING:
    from fczoo.papers.reproduce import Target

TABLE = click.option(
    "--table",
    "tables",
    multiple=True,
    metavar="NAME",
    help="Only this printed table, such as T1; may be given several times.  [default: all]",
)
ROW = click.option(
    "--row",
    "rows",
    multiple=True,
    metavar="NAME",
    help="Only this printed row, or rows with NAME in theirs; may be given several times.  "
    "[default: all]",
)
FOLDERS = click.argument(
    "folders", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True)
)


@click.command(cls=GroupedCommand)
@FOLDERS
@click.option(
    "--format",
    "style",
    type=Name(["text", "markdown", "latex", "csv", "json"]),
    default="text",
    show_default=True,
    help="Format of the printed tables.",
)
@click.option(
    "--metrics",
    metavar="NAME,...",
    help=(
        "Print one table with these columns, such as A_N,task_aware,top5,ECE.  "
        "[default: the usual tables]"
    ),
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
    help="Write the figures of --html as PNG and PDF as well.",
)
@click.option(
    "--archive",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help=(
        "Write all finished runs to one CSV file instead of printing tables; `report`, `compare` "
        "and `reproduce` read it like a folder."
    ),
)
def report(
    folders: tuple[Path, ...],
    style: str,
    metrics: str | None,
    html: Path | None,
    figures: Path | None,
    archive: Path | None,
) -> None:
    """Print tables of run folders and archives, or of all runs below a folder."""
    if figures and not html:
        raise FczooError("--figures needs --html FILE; add it")
    if archive and html:
        raise FczooError("--archive and --html each write their own file; give one of them")
    if metrics and (html or archive):
        raise FczooError("--metrics is about printed tables; leave it or the other file out")
    if archive:
        from fczoo.reports.archive import write_archive
        from fczoo.reports.runs import read_runs

        written_count, unfinished_count = write_archive(read_runs(folders), archive)
        left_out = f", {unfinished_count} unfinished left out" if unfinished_count else ""
        click.echo(f"{plural(written_count, 'run')} written to {archive}{left_out}")
    elif html:
        from fczoo.board.pages import write_page

        write_page(folders, html)
        if figures:
            from fczoo.reports.drawing import write_all_figures

            write_all_figures(folders, figures)
        click.echo(f"Written to {html}{f' and {figures}' if figures else ''}")
    else:
        from fczoo.cli.arguments import wrap_to_terminal
        from fczoo.reports.formats import report as tables

        names = [name.strip() for name in (metrics or "").split(",") if name.strip()]
        text = tables(folders, style, names)
        click.echo(wrap_to_terminal(text) if style == "text" else text)


@click.command(cls=GroupedCommand)
@click.argument("paper", required=False)
@click.argument("table", required=False)
@click.option(
    "--missing", is_flag=True, help="List printed systems that are not implemented here, and why."
)
def papers(paper: str | None, table: str | None, missing: bool) -> None:
    """Print the papers' own tables: all of them, those of PAPER, or one TABLE."""
    from fczoo.papers import pages

    if missing and paper:
        raise FczooError(f"--missing covers all papers; leave {paper} out")
    if missing:
        click.echo(pages.missing())
    else:
        click.echo(pages.show_paper(paper, table) if paper else pages.overview())


@click.command(cls=GroupedCommand)
@FOLDERS
@click.option("--paper", required=True, help="Paper to compare with; see `fczoo papers`.")
@TABLE
@ROW
def compare(
    folders: tuple[Path, ...], paper: str, tables: tuple[str, ...], rows: tuple[str, ...]
) -> None:
    """Print our numbers next to a paper's, with every setting and option that differs from the
    paper.
    """
    from fczoo.cli.arguments import wrap_to_terminal
    from fczoo.papers.compare import compare as beside

    click.echo(wrap_to_terminal(beside(folders, paper, tables, rows)))


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
    help="Without CARD: folder or archive of runs.",
)
@click.option("--paper", help="Without CARD: list only rows of this paper; see `fczoo papers`.")
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

    EXTRA options are passed to `fczoo bench`, such as --data-root DIR, --backbone FILE or --out
    FOLDER.
    """
    from fczoo.cli.arguments import wrap_to_terminal
    from fczoo.papers.compare import spread
    from fczoo.papers.reproduce import get_card, listing, shell_command, verdict
    from fczoo.reports.runs import read_experiments

    if card is None:
        if dry_run or reading:
            raise FczooError(
                "--dry-run and --reading are about one card; name it, or leave them out"
            )
        click.echo(wrap_to_terminal(listing(results or Path("results"), paper, tables, rows)))
        return
    if card.startswith("-"):
        raise click.NoSuchOption(card, ctx=click.get_current_context())
    list_options = {"--results": results, "--paper": paper, "--table": tables, "--row": rows}
    if given_options := [name for name, value in list_options.items() if value]:
        raise FczooError(
            f"{given_options[0]} filters the list of all cards; leave it or {card} out"
        )
    target = get_card(card)
    command = target.command(extra, reading or "print")
    bench_context = bench.make_context("fczoo reproduce", command[1:])
    _check_one_row(target, bench_context.params)
    click.echo(shell_command(command))
    if dry_run:
        return
    with bench_context:
        bench.invoke(bench_context)
    for experiment in read_experiments([Path(bench_context.params["out"])]):
        for line in experiment.lines:
            if line.results[0].method == target.row.method:
                click.echo(spread(experiment, target.paper))
                click.echo(f"{target.name}: {verdict(target, experiment, line)}")


def _check_one_row(card: "Target", given: Mapping[str, Any]) -> None:
    """Raise FczooError unless options of ``fczoo bench`` are one setting with a card's method."""
    from fczoo.cli.arguments import parse_methods, parse_specs
    from fczoo.cli.config import read_config
    from fczoo.cli.jobs import SETTINGS

    cells = read_config(given["config"], SETTINGS, given)[1] if given["config"] else []
    grid = [name for name in ("dataset", "partition") if len(parse_specs(given[name])) > 1]
    if cells or grid:
        reason = f"--{grid[0]} names several" if grid else f"{given['config']} has cells"
        raise FczooError(
            f"{card.name} is one setting, and {reason}; leave it out, or use fczoo bench"
        )
    if card.row.method not in parse_methods(given["methods"]):
        raise FczooError(f"--methods lacks {card.row.method}, the method of {card.name}; add it")
