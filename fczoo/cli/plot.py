"""Command ``fczoo plot``: one figure of runs for a paper."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from fczoo.cli.options import GroupedCommand, Name
from fczoo.cli.values import Number
from fczoo.core.errors import FczooError

if TYPE_CHECKING:
    from fczoo.board.plots import Kind

SINGLE_METHOD_KINDS = ("heatmap", "confusion", "tsne", "sweep")
KINDS = ("curves", "rounds", "bytes", "cost", "heatmap", "confusion", "clients", "tsne", "sweep")


@click.command(cls=GroupedCommand)
@click.argument("folders", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option(
    "--kind",
    type=Name(KINDS),
    required=True,
    help=(
        "curves: accuracy after each task. rounds, bytes: accuracy over rounds, over bytes sent. "
        "cost: final accuracy against all bytes sent. heatmap: accuracy on each task after each "
        "task. confusion: share of each class's test images predicted as each class. clients: "
        "accuracy for each client. tsne: features of test images. sweep: final accuracy over "
        "the values of an option."
    ),
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    metavar="FILE",
    help="File of the figure; it ends with .pdf, .svg or .png.",
)
@click.option(
    "--method",
    metavar="NAME",
    help="For heatmap, confusion, tsne and sweep: the method, or the name of its row in tables.  "
    "[default: the only one]",
)
@click.option(
    "--width",
    type=Number(1.5, 20),
    default=3.3,
    show_default=True,
    metavar="INCHES",
    help="Width of the figure; 3.3 is one column of a two-column paper.",
)
def plot(
    folders: tuple[Path, ...],
    kind: "Kind | Literal['sweep']",
    out: Path,
    method: str | None,
    width: float,
) -> None:
    """Draw one figure of run folders or archives for a paper."""
    from fczoo.board.plots import (
        check_plot_file,
        colour_numbers,
        make_plot,
        make_sweep_plot,
        write_plot,
    )
    from fczoo.cli.models import benchmark_of_run
    from fczoo.reports.runs import read_experiments

    check_plot_file(out)
    if method is not None and kind not in SINGLE_METHOD_KINDS:
        raise FczooError(
            f"--kind {kind} shows all methods; leave out --method, which is for "
            f"{', '.join(SINGLE_METHOD_KINDS)}"
        )
    experiments = read_experiments(folders)
    if kind == "sweep":
        sweep_figure = make_sweep_plot(experiments, method)
        write_plot(sweep_figure, out, width)
        click.echo(f"Written to {out}: {sweep_figure.caption}")
        return
    if len(experiments) > 1:
        places = ", ".join(e.runs[0].place for e in experiments)
        raise FczooError(
            f"these runs belong to {len(experiments)} tables, and a figure shows one; give the "
            f"folders of one table: {places}"
        )
    (experiment,) = experiments
    figure = make_plot(experiment, kind, method, benchmark_of_run)
    write_plot(figure, out, width, colour_numbers(experiment))
    click.echo(f"Written to {out}: {figure.caption}")
