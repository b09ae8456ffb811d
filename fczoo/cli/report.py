"""Commands ``fczoo report``, ``leaderboard`` and ``submit``: tables, pages and archives of runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fczoo.cli.options import GroupedCommand, Name
from fczoo.cli.values import check_suffix
from fczoo.core.errors import FczooError
from fczoo.core.options import plural

if TYPE_CHECKING:
    from fczoo.board.tsne import ColourBy
    from fczoo.reports.figure_data import Points

ARCHIVE = Path("results") / "results.csv"


@click.command(cls=GroupedCommand)
@click.argument("folders", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option(
    "--format",
    "style",
    type=Name(["text", "markdown", "latex", "csv", "json"]),
    help="Format of the printed tables.  [default: text]",
)
@click.option(
    "--metrics",
    metavar="NAME,...",
    help=(
        "Print one table with these columns, such as A_N,task_aware,top5,ECE; see "
        "`fczoo list metrics`.  [default: the usual tables]"
    ),
)
@click.option(
    "--columns",
    metavar="SETTING,...",
    help=(
        "Print one table in the style of papers, with a column for each value of these settings, "
        "such as data,partition.  [default metrics: A_N,Avg]"
    ),
)
@click.option(
    "--rows",
    metavar="METHOD,...",
    help="Methods in the table of --columns, in this order.  [default: all]",
)
@click.option(
    "--group",
    is_flag=True,
    help="Draw a line between groups of methods in the table of --columns; see `fczoo list "
    "methods`.",
)
@click.option(
    "--sweep",
    is_flag=True,
    help=(
        "Print a table of accuracy over the options or settings in which runs of one method "
        "differ, and the options of the best row; --figures plots the accuracy.  [default metrics: "
        "A_N,Avg,FAA,forgetting]"
    ),
)
@click.option(
    "--html",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write one self-contained HTML page instead of printing tables.",
)
@click.option(
    "--figures",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Write the figures of --html or --sweep as PNG and PDF files to this folder.",
)
@click.option(
    "--tsne",
    type=Name(["class", "task"]),
    metavar="class|task",
    help=(
        "Add a t-SNE plot per method to the page of --html: features of up to 500 test images, "
        "computed with the kept model, coloured by class or task; needs the data set."
    ),
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
    style: str | None,
    metrics: str | None,
    columns: str | None,
    rows: str | None,
    group: bool,
    sweep: bool,
    html: Path | None,
    figures: Path | None,
    tsne: "ColourBy | None",
    archive: Path | None,
) -> None:
    """Print tables of run folders and archives, or of all runs below a folder."""
    if figures and not (html or sweep):
        raise FczooError("--figures needs --html FILE or --sweep; add one")
    if sweep and (columns is not None or html or archive):
        raise FczooError(
            "--sweep cannot be combined with --columns, --html or --archive; leave them out"
        )
    if tsne and not html:
        raise FczooError("--tsne needs --html FILE; add it")
    if archive and html:
        raise FczooError("--archive and --html are both given; leave one out")
    for option, value in (("--metrics", metrics), ("--format", style)):
        if value is not None and (html or archive):
            raise FczooError(
                f"{option} is for printed tables only; leave out {option}, or --html and --archive"
            )
    if columns is None and (rows is not None or group):
        raise FczooError("--rows and --group need --columns, such as --columns data,partition")
    if columns is not None and (html or archive or style in ("csv", "json")):
        raise FczooError(
            "--columns prints text, markdown or latex; leave out --html, --archive, and "
            "--format csv or json"
        )
    if html:
        check_suffix("--html", html, (".html", ".htm"))
    if archive:
        check_suffix("--archive", archive, (".csv",))
    style = style or "text"
    if sweep:
        _report_sweep(folders, style, metrics, figures)
    elif columns is not None:
        click.echo(_paper_table(folders, style, columns, metrics or "A_N,Avg", rows, group))
    elif archive:
        from fczoo.reports.archive import write_archive
        from fczoo.reports.runs import read_runs

        written_count, unfinished_count = write_archive(read_runs(folders), archive)
        left_out = f", {unfinished_count} unfinished left out" if unfinished_count else ""
        click.echo(f"{plural(written_count, 'run')} written to {archive}{left_out}")
    elif html:
        from fczoo.board.pages import write_page

        feature_figures = _feature_figures(folders, tsne) if tsne else ()
        write_page(folders, html, feature_figures)
        if figures:
            from fczoo.reports.drawing import write_all_figures

            write_all_figures(folders, figures, feature_figures)
        click.echo(f"Written to {html}{f' and {figures}' if figures else ''}")
    else:
        from fczoo.cli.arguments import wrap_to_terminal
        from fczoo.reports.table_formats import report as tables

        text = tables(folders, style, _metric_names(metrics))
        click.echo(wrap_to_terminal(text) if style == "text" else text)


def _names(text: str | None) -> list[str]:
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def _metric_names(metrics: str | None) -> list[str]:
    names = _names(metrics)
    if metrics is not None and not names:
        raise FczooError("--metrics names no metric; give one or more, such as A_N,ECE")
    return names


def _report_sweep(
    folders: Sequence[Path], style: str, metrics: str | None, figures: Path | None
) -> None:
    """Print the tables of sweeps and write their figures."""
    from fczoo.cli.arguments import wrap_to_terminal
    from fczoo.reports.drawing import import_matplotlib, save_figures
    from fczoo.reports.runs import read_experiments
    from fczoo.reports.sweeps import METRICS, find_sweeps, sweep_figures, sweep_report

    names = _metric_names(metrics)
    sweeps = find_sweeps(read_experiments(folders))
    text = sweep_report(sweeps, style, names)
    drawn = sweep_figures(sweeps, (names or METRICS)[0])
    if figures:
        import_matplotlib()
        figures.mkdir(parents=True, exist_ok=True)
        written = save_figures(drawn, figures)
    click.echo(wrap_to_terminal(text) if style == "text" else text)
    if figures:
        click.echo("\n".join(map(str, written)), err=style in ("csv", "json"))


def _paper_table(
    folders: Sequence[Path], style: str, columns: str, metrics: str, rows: str | None, group: bool
) -> str:
    """Format one table over all experiments in the style of papers."""
    from fczoo.cli.listing import group_of
    from fczoo.reports.paper_style_tables import make_paper_table, to_paper
    from fczoo.reports.runs import read_experiments

    for option, text in (("--columns", columns), ("--metrics", metrics), ("--rows", rows)):
        if text is not None and not _names(text):
            raise FczooError(f"{option} is empty; give one or more entries, separated by commas")
    table = make_paper_table(
        read_experiments(folders),
        _names(columns),
        _names(metrics),
        _names(rows),
        group_of if group else None,
    )
    return to_paper(table, style)


def _feature_figures(folders: Sequence[Path], tsne: "ColourBy") -> list[list["Points"]]:
    """Return the t-SNE figures of each experiment."""
    from fczoo.board.tsne import tsne_figures
    from fczoo.cli.models import benchmark_of_run
    from fczoo.reports.runs import read_experiments

    return [tsne_figures(e, tsne, benchmark_of_run) for e in read_experiments(folders)]


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
    """Build static web pages: a ranking of methods over all suites, and a page per suite.

    PLACES are archives, run folders, or folders that contain them. If they are given, runs are
    grouped by benchmark (data set, protocol, backbone, rounds, epochs, number of images) instead of
    by suite. [default: the suites of results/; if there are none, results/results.csv]
    """
    from fczoo.board.pages import INDEX, write_site
    from fczoo.board.suite_leaderboard import has_suites, write_suite_site

    if not places and has_suites(ARCHIVE.parent):
        count = write_suite_site(ARCHIVE.parent, out)
        click.echo(f"{plural(count, 'suite')} written to {out / INDEX}")
        return
    if not places and not ARCHIVE.is_file():
        raise FczooError(
            f"no suite and no file {ARCHIVE} here; run a suite, or name archives or run folders"
        )
    count = write_site(places or (ARCHIVE,), out)
    click.echo(f"{plural(count, 'benchmark')} written to {out / INDEX}")


@click.command(cls=GroupedCommand)
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option(
    "--into",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help=f"Archive to which the runs are appended.  [default: {ARCHIVE.as_posix()}]",
)
@click.option(
    "--suite",
    metavar="NAME",
    help="Enter the runs as rows of the suite NAME in results/. The leaderboard reads suites.",
)
@click.option("--dry-run", is_flag=True, help="Check the folder without entering its runs.")
def submit(folder: Path, into: Path | None, suite: str | None, dry_run: bool) -> None:
    """Check a run folder and append its runs to an archive or a suite.

    The folder must be complete and unchanged, and record its versions, code and test set. With
    --suite, its runs must have the suite's settings, seeds and hyper-parameter search.
    """
    if suite is not None and into is not None:
        raise FczooError("--suite and --into each name an archive; give one of them")
    if suite is not None:
        from fczoo.cli.suite_submit import submit_to_suite

        count, faults = submit_to_suite(folder, suite, ARCHIVE.parent, not dry_run)
        into = ARCHIVE.with_name(f"{suite}.csv")
    else:
        from fczoo.reports.submission import submit as enter

        into = into or ARCHIVE
        check_suffix("--into", into, (".csv",))
        count, faults = enter(folder, into, not dry_run)
    for fault in faults:
        click.echo(f"refused: {fault}", err=True)
    if faults:
        raise FczooError(f"no run of {folder} was entered into {into}; fix the faults above")
    runs = plural(count, "run")
    click.echo(f"{runs} can be entered into {into}" if dry_run else f"{runs} entered into {into}")
