"""Commands ``fczoo papers``, ``compare``, ``reproduce`` and ``claims``: papers against runs."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fczoo.cli.bench import bench
from fczoo.cli.options import Command, GroupedCommand, Name
from fczoo.core.errors import FczooError
from fczoo.core.options import plural

if TYPE_CHECKING:
    from fczoo.papers.paper_figures import PaperFigure
    from fczoo.papers.printed_numbers import Paper
    from fczoo.papers.reproduce import Target
    from fczoo.reports.figure_data import Figure


def _names_option(name: str, target: str, text: str) -> Callable[[Command], Command]:
    repeat = "repeat it for more.  [default: all]"
    return click.option(name, target, multiple=True, metavar="NAME", help=f"{text}; {repeat}")


TABLE = _names_option("--table", "tables", "Show only this table of the paper, such as T1")
ROW = _names_option(
    "--row", "rows", "Show only rows of the paper's tables whose name contains NAME"
)


@click.command(cls=GroupedCommand)
@click.argument("paper", required=False)
@click.argument("table", required=False)
@click.option(
    "--missing",
    is_flag=True,
    help="List methods, rows and papers that fczoo cannot reproduce, with the reason.",
)
def papers(paper: str | None, table: str | None, missing: bool) -> None:
    """Print tables of papers: a list of all, those of PAPER, or one TABLE."""
    from fczoo.papers import pages

    if missing and paper:
        raise FczooError(f"--missing covers all papers; leave {paper} out")
    if missing:
        click.echo(pages.list_missing())
    else:
        click.echo(pages.show_paper(paper, table) if paper else pages.overview())


@click.command(cls=GroupedCommand)
@click.argument("folders", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--paper", required=True, help="Paper to compare with; see `fczoo papers`.")
@TABLE
@ROW
def compare(
    folders: tuple[Path, ...], paper: str, tables: tuple[str, ...], rows: tuple[str, ...]
) -> None:
    """Print results next to a paper's numbers, with every setting and option that differs."""
    from fczoo.cli.arguments import wrap_to_terminal
    from fczoo.papers.compare import compare as beside
    from fczoo.runner.cost import client_tensors

    click.echo(wrap_to_terminal(beside(folders, paper, tables, rows, client_tensors)))


@click.command(cls=GroupedCommand, context_settings={"ignore_unknown_options": True})
@click.argument("card", required=False)
@click.argument("extra", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Print the command of CARD, or estimate the cost of a table or figure, without a run.",
)
@click.option(
    "--reading",
    type=Name(["print", "released"]),
    help="Follow the paper as printed, or its released code.  [default: print]",
)
@click.option(
    "--results",
    type=click.Path(path_type=Path, exists=True),
    help="Without CARD: folder or archive of runs; the list states which cards they reproduce.  "
    "[default: results]",
)
@click.option("--paper", help="Without CARD: list only rows of this paper; see `fczoo papers`.")
@_names_option("--table", "tables", "Without CARD: list only this table of the paper, such as T1")
@_names_option(
    "--row",
    "rows",
    "List (without CARD) or run (with PAPER/TABLE) only rows whose name contains NAME",
)
@click.option(
    "--cells",
    "patterns",
    multiple=True,
    metavar="PATTERN",
    help="With PAPER/TABLE or PAPER/FIGURE: run only cells whose name matches, such as "
    "'*dirichlet:0.05*'; repeat it for more.  [default: all]",
)
def reproduce(
    card: str | None,
    extra: tuple[str, ...],
    dry_run: bool,
    reading: str | None,
    results: Path | None,
    paper: str | None,
    tables: tuple[str, ...],
    rows: tuple[str, ...],
    patterns: tuple[str, ...],
) -> None:
    """Run a printed result of a paper, e.g. hgp/cifar100/dirichlet:0.05, and judge the outcome.

    CARD is the name of a printed result. PAPER in its place lists the paper's tables and figures,
    and PAPER/TABLE or PAPER/FIGURE runs all cells of a table or figure. Without CARD, all cards are
    listed with their status.

    EXTRA options are passed to `fczoo bench`, such as --data-root DIR, --backbone FILE or --out
    FOLDER. The cells of a table are written to a settings file first; --dry-run estimates their
    cost.
    """
    from fczoo.cli.arguments import wrap_to_terminal
    from fczoo.papers.compare import describe_deviations
    from fczoo.papers.figure_lists import list_analyses, list_figures
    from fczoo.papers.paper_figures import find_figure, limit_cells
    from fczoo.papers.printed_numbers import get_paper
    from fczoo.papers.printed_numbers import papers as all_papers
    from fczoo.papers.reproduce import get_card, listing, shell_command, verdict
    from fczoo.papers.table_reproduction import choose_cells, find_table, list_tables
    from fczoo.reports.runs import read_experiments

    if card is None:
        if dry_run or reading:
            raise FczooError("--dry-run and --reading need CARD; give it, or leave them out")
        if patterns:
            raise FczooError("--cells needs PAPER/TABLE or PAPER/FIGURE; give one, or leave it out")
        click.echo(wrap_to_terminal(listing(results or Path("results"), paper, tables, rows)))
        if not (tables or rows) and (analyses := list_analyses(paper and get_paper(paper).key)):
            click.echo(f"\n{analyses}")
        return
    if card.startswith("-"):
        raise click.NoSuchOption(card, ctx=click.get_current_context())
    if card.casefold() in all_papers() and not (extra or reading or results or rows or patterns):
        click.echo(list_tables(card.casefold()))
        if figures := list_figures(card.casefold()):
            click.echo(f"\n{figures}")
        return
    list_options = {
        "--results": results,
        "--paper": paper,
        "--table": tables,
        "--row": rows,
        "--cells": patterns,
    }
    if figure := find_figure(card):
        del list_options["--cells"]
        _refuse_options(figure.key, "a figure", {**list_options, "--reading": reading})
        _reproduce_figure(limit_cells(figure, patterns), extra, dry_run)
        return
    if (table := find_table(card)) and not (results or paper or tables):
        if chosen := choose_cells(*table, rows, patterns):
            _reproduce_table(*table, chosen, extra, dry_run, reading or "print")
        elif extra:
            raise FczooError(f"{card} needs no run, so {extra[0]} has no effect; leave it out")
        _print_costs(*table, rows)
        return
    _refuse_options(card, "one card", list_options)
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
                click.echo(describe_deviations(experiment, target.paper))
                click.echo(f"{target.name}: {verdict(target, experiment, line)}")


def _refuse_options(name: str, kind: str, options: Mapping[str, object]) -> None:
    """Raise FczooError if an option is given that does not apply to ``kind``."""
    for option, value in options.items():
        if value:
            raise FczooError(f"{option} does not apply to {kind}; leave out {option} or {name}")


def _reproduce_table(
    paper: "Paper",
    table: str,
    chosen: "list[Target]",
    extra: tuple[str, ...],
    dry_run: bool,
    reading: str,
) -> None:
    """Write the settings file of a table's cells, run it, and judge the cells."""
    from fczoo.papers.table_reproduction import judge_cells, settings_file

    suffix = "" if reading == "print" else "-released"
    folder = Path("results") / f"{paper.key}-{table}{suffix}"
    text = settings_file(f"{paper.key}/{table}", chosen, reading)
    out = _run_file(folder, text, len(chosen), extra, dry_run)
    if not dry_run:
        click.echo(judge_cells(chosen, out))


def _run_file(folder: Path, text: str, count: int, extra: tuple[str, ...], dry_run: bool) -> Path:
    """Write a settings file with some cells and run it; return the folder of the runs."""
    from fczoo.core.files import write_safely

    file = folder.parent / f"{folder.name}.toml"
    command = ["--config", str(file), "--out", str(folder), *extra]
    folder.parent.mkdir(exist_ok=True)
    write_safely(file, text.encode())
    click.echo(f"{plural(count, 'cell')} {'is' if count == 1 else 'are'} in {file}.")
    if dry_run:
        command.append("--dry-run")
    with bench.make_context("fczoo reproduce", command) as bench_context:
        if bench_context.params["sweep"]:
            raise FczooError(
                f"--sweep does not apply to several cells; copy {file}, add sweep to the copy, and "
                "run it with fczoo bench --config"
            )
        bench.invoke(bench_context)
        return Path(bench_context.params["out"])


def _reproduce_figure(figure: "PaperFigure", extra: tuple[str, ...], dry_run: bool) -> None:
    """Run the cells of a figure and draw them; a figure from shapes needs no run."""
    from fczoo.papers.paper_figures import grid, grid_file, inference_costs, pictures
    from fczoo.reports.drawing import save_figures
    from fczoo.runner.timing import inference_operations

    out = Path("results") / figure.folder
    if figure.draw == "inference":
        if extra:
            raise FczooError(
                f"{figure.key} needs no run, so {extra[0]} has no effect; leave it out"
            )
        bars = inference_costs(figure, inference_operations)
        for label, flops in zip(bars.labels, bars.parts["forward"], strict=True):
            click.echo(f"{label}: {flops:.2f} {bars.x}")
        figures: Sequence[Figure] = [bars]
    else:
        out = _run_file(out, grid_file(figure), len(grid(figure)), extra, dry_run)
        draw = _invert_uploads if figure.draw == "inversion" else pictures
        figures = [] if dry_run else draw(figure, out)
    if not dry_run:
        out.mkdir(parents=True, exist_ok=True)
        click.echo("\n".join(str(path) for path in save_figures(figures, out)))


def _invert_uploads(figure: "PaperFigure", out: Path) -> "list[Figure]":
    """Invert an upload of each method, print the errors, and return the pictures."""
    from tabulate import tabulate

    from fczoo.cli.models import benchmark_of_run
    from fczoo.models.storage import load_model
    from fczoo.papers.paper_figures import lines_by_label
    from fczoo.runner.inversion_attack import (
        HEADERS,
        inversion_grid,
        inversion_rows,
        invert_uploads,
    )

    by_method = {}
    for label, line in lines_by_label(figure, out).items():
        folder = line.records[0].folder
        if folder is None:
            raise FczooError(f"{out} has no run folder of {label}; give the folder of the runs")
        model = load_model(folder)
        by_method[label] = invert_uploads(benchmark_of_run(folder, model), model.method)
    click.echo(tabulate(inversion_rows(by_method), HEADERS, disable_numparse=True))
    return [inversion_grid(figure.folder, *of_method) for of_method in by_method.items()]


def _print_costs(paper: "Paper", table: str, rows: tuple[str, ...]) -> None:
    """Print the costs of a table, which need no run."""
    from fczoo.papers.costs import cost_table, count_costs
    from fczoo.papers.printed_numbers import choose_numbers
    from fczoo.runner.cost import client_tensors

    numbers = choose_numbers(paper.numbers, [table], rows)
    if counts := count_costs(paper, numbers, client_tensors):
        click.echo(cost_table(counts))


def _check_one_row(card: "Target", options: Mapping[str, Any]) -> None:
    """Check that options of ``fczoo bench`` give one setting with the card's method."""
    from fczoo.cli.arguments import parse_methods, parse_specs
    from fczoo.cli.config import read_config
    from fczoo.cli.sweep import SETTINGS

    cells = read_config(options["config"], SETTINGS, options)[1] if options["config"] else []
    grid = [
        name
        for name in ("dataset", "partition")
        if len(parse_specs(options[name], f"--{name}")) > 1
    ]
    if cells or grid or options["sweep"]:
        reason = f"--{grid[0]} names several" if grid else f"{options['config']} has cells"
        reason = f"--sweep {options['sweep'][0]} gives several" if options["sweep"] else reason
        raise FczooError(
            f"{card.name} is one setting, but {reason}; leave it out, or use fczoo bench"
        )
    if card.row.method not in parse_methods(options["methods"]):
        raise FczooError(f"--methods lacks {card.row.method}, the method of {card.name}; add it")


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
    help="Runs on which claims are tested: a folder with suites, or a folder or archive of other "
    "runs; --run writes to claims/CLAIM in it.  [default: results]",
)
def claims(
    name: str | None,
    paper: str | None,
    running: str | None,
    seeds: str | None,
    jobs: str | None,
    results: Path | None,
) -> None:
    """Show claims of papers and whether runs support them: all claims, or NAME with its numbers.

    A claim compares two sides, such as two methods. In each table of your runs, a row for one side
    is tested against a row for the other. "holds 2x" means that two such pairs have the verdict
    "holds".
    """
    from fczoo.papers.claims import get_claim, listing, page

    folder = results or Path("results")
    if name and paper:
        raise FczooError(f"--paper filters the list of claims; leave out --paper or {name}")
    if running is None:
        if seeds or jobs:
            raise FczooError("--seeds and --jobs need --run CLAIM; add it, or leave them out")
        if results and not results.exists():
            raise FczooError(
                f"--results {results} does not exist; give a folder or an archive of runs"
            )
        click.echo(page(get_claim(name), folder) if name else listing(folder, paper))
        return
    if name or paper:
        raise FczooError("--run CLAIM cannot be combined with NAME or --paper; leave them out")
    from fczoo.cli.arguments import parse_jobs, parse_seeds
    from fczoo.federation.settings import Settings
    from fczoo.runner.configs import ExecutionConfig, make_sweep
    from fczoo.runner.sweep import run_sweep

    claim, numbers = get_claim(running), parse_seeds(seeds or "0-2")
    sides: dict[Path, Any] = {}
    for name, (side, changes) in claim.digits_runs.items():
        settings = Settings.for_dataset("digits", **changes)
        options = {side.method: side.options}
        sides |= make_sweep(Path(name), settings, [side.method], numbers, options)
    out = folder / "claims" / claim.name
    run_sweep(sides, out, ExecutionConfig(jobs=parse_jobs(jobs or 1)))
    click.echo(page(claim, out))
