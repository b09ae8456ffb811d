"""The ``fczoo`` command."""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from fczoo import __version__
from fczoo.cli.arguments import parse_changes, parse_seeds, specs, words
from fczoo.core.errors import FczooError


class Commands(click.Group):
    """Turns whatever a user can put right into one line and a non-zero exit."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except FczooError as error:
            click.ClickException(str(error)).show()
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:
            click.ClickException("interrupted; no run was under way").show()
            ctx.exit(130)
        except OSError as error:
            raise click.ClickException(
                f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"
            ) from error
        except (RuntimeError, MemoryError) as error:
            if isinstance(error, MemoryError) or any(
                sign in str(error).lower() for sign in ("out of memory", "can't allocate memory")
            ):
                raise click.ClickException(
                    "out of memory; lower --together, --batch-size or --precision"
                ) from error
            raise


STREAM = (
    click.option("--dataset", default="digits", show_default=True),
    click.option("--data-root", help="Folder that holds the data set.  [FCZOO_HOME/data]"),
    click.option(
        "--protocol",
        help="A paper's own settings, each of which another option replaces; see `fczoo list protocols`.",
    ),
    click.option(
        "--partition",
        help="iid, dirichlet:BETA, quantity:ALPHA, overlap:PART, shards:ALPHA, or file:PATH.  [by data set]",
    ),
    click.option(
        "--tasks", help="Number of tasks, or the classes of each: 50,10,10,10,10,10.  [by data set]"
    ),
    click.option("--clients", type=int, help="Clients at the start.  [by data set]"),
    click.option("--joining", type=int, help="New clients at each later task.  [0]"),
    click.option(
        "--transition", type=float, help="Part of the earlier clients that get data of a new task.  [1]"
    ),
    click.option("--train-per-class", type=int, help="Use the first N training images of each class.  [all]"),
    click.option("--test-per-class", type=int, help="Use the first N test images of each class.  [all]"),
    click.option(
        "--class-order", help="Original labels in order of arrival, separated by commas.  [natural order]"
    ),
    click.option("--class-order-seed", type=int, help="Shuffle the classes.  [natural order]"),
    click.option("--partition-seed", type=int, help="[0]"),
)


def stream_options(command: Callable) -> Callable:
    """The options that say which images arrive when and at whom."""
    for add in reversed(STREAM):
        command = add(command)
    return command


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="fczoo")
def main() -> None:
    """Benchmark zoo for Federated Class-Incremental Learning on pre-trained vision transformers."""
    logging.basicConfig(format="%(levelname)s: %(message)s")


@main.command()
@click.option(
    "--methods",
    callback=words,
    help="Names, separated by commas; see `fczoo list methods`.  [the protocol's]",
)
@stream_options
@click.option("--backbone", help="Name, weight file, or NAME:FILE.  [by data set]")
@click.option(
    "--participation",
    type=float,
    help="Part of the clients that train in a round or, above 1, their number.  [1]",
)
@click.option("--draw-among", help="data (clients with data of the task) or joined (all).  [data]")
@click.option("--client-draw", help="Draw participants for each round or once a task.  [round]")
@click.option("--rounds", type=int, help="Rounds a task.  [by data set]")
@click.option("--epochs", type=int, help="Local epochs a round.  [by data set]")
@click.option("--batch-size", type=int, help="[by data set]")
@click.option("--augment", help="none, flip, crop, pilora, fppl or hgp.  [by data set]")
@click.option(
    "--test-crop", type=float, help="Middle part of each side that the test view keeps, e.g. 0.875.  [1]"
)
@click.option("--stored-size", type=int, help="Side in pixels at which image files are kept.  [by data set]")
@click.option("--seeds", callback=words, help="Training seeds, separated by commas.  [the protocol's, or 0]")
@click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda", "mps"]), default="auto", show_default=True
)
@click.option("--precision", type=click.Choice(["fp32", "bf16", "fp64"]), default="fp32", show_default=True)
@click.option(
    "--deterministic",
    is_flag=True,
    default=None,
    help="Only operations that give the same bits each time; slower on CUDA.",
)
@click.option(
    "--together", default="auto", show_default=True, help="Clients in one batched forward, or auto."
)
@click.option(
    "--norm-by-dataset",
    is_flag=True,
    default=None,
    help="Normalise as fed-mammoth does, by data set; see `fczoo list quirks`.",
)
@click.option(
    "--cache-queries",
    is_flag=True,
    default=None,
    help="Keep query features of the test view in training, too.",
)
@click.option("--aggregator", help="Replace the method's own averaging; see `fczoo list aggregators`.")
@click.option(
    "--outliers",
    type=float,
    help="Leave out class statistics further from their clients' median than this many median distances.  [none]",
)
@click.option(
    "--drop-rate", type=float, help="Probability that a client of a round is not heard of again in it.  [0]"
)
@click.option("--min-clients", type=int, help="Stop when fewer sound uploads are left in a round.  [1]")
@click.option(
    "--attack",
    help="What hostile clients do, such as sign-flip or scale:10; see `fczoo list attacks`.  [none]",
)
@click.option("--attackers", type=float, help="Part of the clients that are hostile, with --attack.  [0.2]")
@click.option("--min-class-count", type=int, help="Withhold statistics of classes with fewer images.  [1]")
@click.option("--dp-clip", type=float, help="Clip every client's change to this norm C.  [none]")
@click.option(
    "--dp-noise",
    type=float,
    help="Add Gaussian noise of this standard deviation, in C; epsilon is stated.  [0]",
)
@click.option("--dp-delta", type=float, help="[1e-5]")
@click.option(
    "--set",
    "changes",
    multiple=True,
    metavar="METHOD.FIELD=VALUE",
    help="Hyper-parameter; also backbone.mean, .std, .image_size.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Run folder; one that holds part of the same runs is carried on.  [results/run-DATE-TIME]",
)
@click.option(
    "--resume", is_flag=True, help="Carry on in --out, or in the newest results/run-*, and begin nothing new."
)
@click.option(
    "--log",
    "loggers",
    callback=words,
    help="tensorboard, wandb, mlflow: send the numbers there, too.  [none]",
)
@click.option(
    "--diagnostics",
    is_flag=True,
    help="Also record what clients predict, confusion between tasks, drift; takes longer.",
)
@click.option(
    "--dry-run", is_flag=True, help="Print the whole configuration, its work, traffic and memory, and stop."
)
@click.option("--skip-failed", is_flag=True, help="Carry on after a run that fails; the exit code tells.")
def bench(
    methods: list[str],
    seeds: list[str],
    changes: tuple[str, ...],
    out: Path | None,
    resume: bool,
    dataset: str,
    partition: str | None,
    dry_run: bool,
    skip_failed: bool,
    loggers: list[str],
    diagnostics: bool,
    **given: Any,
) -> None:
    """Run methods on one data stream, or on each of a grid of them, and print their tables.

    --dataset and --partition take lists, separated by commas.
    """
    from fczoo.core.registry import PROTOCOLS
    from fczoo.federation.settings import Settings
    from fczoo.reports.runs import read_experiments
    from fczoo.reports.tables import SHORT
    from fczoo.reports.text import sections
    from fczoo.runner.grid import Conduct, run_grid
    from fczoo.runner.resume import last_run

    options = parse_changes(changes)
    given |= options.pop("backbone", {})
    grid = [
        Settings.for_dataset(d, partition=p, **given)
        for d in specs(dataset)
        for p in (specs(partition) or (None,))
    ]
    protocol = grid[0].protocol and PROTOCOLS.get(grid[0].protocol)
    names = list(dict.fromkeys(methods)) or list(protocol.proposes if protocol else ())
    numbers = parse_seeds(seeds) if seeds or not protocol else list(protocol.seeds.value)
    if not names:
        raise FczooError("no methods are named; give --methods or --protocol")
    if dry_run:
        from fczoo.runner.dry_run import dry_run as page

        click.echo("\n\n".join(page(names, numbers, settings, options) for settings in grid))
        return
    out = out or (
        last_run(Path("results")) if resume else Path("results") / time.strftime("run-%Y%m%d-%H%M%S")
    )
    folders, failed = run_grid(
        names, numbers, grid, options, out, Conduct(resume, skip_failed, tuple(loggers), diagnostics)
    )
    click.echo(f"{sections(read_experiments(folders), 'text', [SHORT])}\n\nWritten to {out}")
    if failed:
        raise FczooError(
            f"{failed} of the runs failed; the table says which and why, and the same command tries them again"
        )


@main.command()
@click.argument("folders", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
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
def report(folders: tuple[Path, ...], style: str, html: Path | None, figures: Path | None) -> None:
    """Tables of any run folders, or of all below a folder."""
    from fczoo.reports.page import write_page
    from fczoo.reports.text import report as tables

    if html:
        write_page(folders, html, figures)
        click.echo(f"Written to {html}{f' and {figures}' if figures else ''}")
    else:
        click.echo(tables(folders, style))


@main.command()
@stream_options
@click.option("--save", type=click.Path(path_type=Path), help="Partition file for `--partition file:PATH`.")
@click.option("--table", type=click.Path(path_type=Path), help="CSV of images per task, client and class.")
@click.option(
    "--plot",
    type=click.Path(path_type=Path),
    help="Heat map as PNG, PDF or SVG; needs matplotlib (extra `plot`).",
)
@click.option(
    "--export",
    type=click.Path(path_type=Path),
    help="Plain JSON for other software: positions and labels by task and client.",
)
def partition(
    dataset: str, save: Path | None, table: Path | None, plot: Path | None, export: Path | None, **given: Any
) -> None:
    """Show, and write if asked, the split over clients and tasks that `bench` uses with the same options."""
    from fczoo.cli.show_partition import describe_split, write_export, write_plot, write_table
    from fczoo.federation.benchmark import open_stream
    from fczoo.federation.settings import Settings

    stream, made = open_stream(Settings.for_dataset(dataset, **given), pixels=False)
    click.echo(describe_split(made, stream))
    if save:
        made.save(save)
    for path, write in ((table, write_table), (plot, write_plot), (export, write_export)):
        if path:
            write(path, made, stream)


@main.group()
def data() -> None:
    """Download data sets and verify local copies."""


@data.command()
@click.argument("name")
@click.option("--data-root", type=click.Path(path_type=Path), help="Folder to put it in.  [FCZOO_HOME/data]")
@click.option("--mirror", metavar="URL", help="Another address that has the same files, also file:///FOLDER.")
def fetch(name: str, data_root: Path | None, mirror: str | None) -> None:
    """Download a data set from its official source. A download that broke off is resumed."""
    from fczoo.data.fetch import fetch as get

    click.echo(get(name, data_root, mirror))


@data.command()
@click.argument("name")
@click.option("--data-root", type=click.Path(path_type=Path), help="Folder that holds it.  [FCZOO_HOME/data]")
def check(name: str, data_root: Path | None) -> None:
    """Read a local copy and show its numbers beside the official ones."""
    from fczoo.data.verify import verify

    table, wrong = verify(name, data_root)
    click.echo(table)
    if wrong:
        raise FczooError(f"this is not the whole of {name}: {'; '.join(wrong)}")


@main.command()
@click.argument("paper", required=False)
@click.argument("table", required=False)
def papers(paper: str | None, table: str | None) -> None:
    """The papers' own tables: all of them, those of PAPER, or one TABLE."""
    from fczoo.papers.printed import overview, show_paper

    click.echo(show_paper(paper, table) if paper else overview())


@main.command()
@click.argument("folders", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--paper", required=True, help="See `fczoo papers`.")
def compare(folders: tuple[Path, ...], paper: str) -> None:
    """Our numbers beside a paper's, with every setting that differs."""
    from fczoo.papers.compare import compare as beside

    click.echo(beside(folders, paper))


@main.command(context_settings={"ignore_unknown_options": True})
@click.argument("card", required=False)
@click.argument("extra", nargs=-1, type=click.UNPROCESSED)
@click.option("--dry-run", is_flag=True, help="Print the command, do not run it.")
@click.option(
    "--results",
    type=click.Path(path_type=Path),
    default="results",
    show_default=True,
    help="Where cards without CARD look for runs.",
)
def reproduce(card: str | None, extra: tuple[str, ...], dry_run: bool, results: Path) -> None:
    """Run the command behind a paper's row, e.g. hgp/cifar100/dirichlet:0.05, and judge it. Without CARD: all cards, with status.

    EXTRA words go to `fczoo bench`, such as --data-root DIR, --backbone FILE or --out FOLDER.
    """
    from fczoo.papers.reproduce import get_card, listing, spelled, verdict
    from fczoo.reports.runs import read_experiments

    if card is None:
        click.echo(listing(results))
        return
    chosen = get_card(card)
    command = chosen.command(extra)
    click.echo(spelled(command))
    if not dry_run:
        ran = bench.make_context("bench", command[1:])
        with ran:
            bench.invoke(ran)
        (experiment,) = read_experiments([ran.params["out"]])
        click.echo(f"{chosen.name}: {verdict(chosen, experiment, experiment.lines[0])}")


@main.command("list")
@click.argument(
    "kind",
    type=click.Choice(
        [
            "methods",
            "baselines",
            "datasets",
            "partitioners",
            "aggregators",
            "attacks",
            "protocols",
            "backbones",
            "quirks",
        ]
    ),
)
def list_command(kind: str) -> None:
    """Names of one kind."""
    from fczoo.cli.show import listing

    click.echo(listing(kind))


@main.command()
@click.argument("names", nargs=-1, required=True, metavar="[protocol] NAME")
@click.option("--dataset", help="Data set whose values are shown.  [digits; of a protocol, all]")
def show(names: tuple[str, ...], dataset: str | None) -> None:
    """All about a method, data set, partitioner, aggregator or, as `show protocol NAME`, a protocol."""
    from fczoo.cli.show import show as page
    from fczoo.cli.show_protocol import protocol_page

    if len(names) > 1 and (names[0] != "protocol" or len(names) > 2):
        raise FczooError(f"cannot show {' '.join(names)!r}; write one name, or protocol and its name")
    click.echo(protocol_page(names[1], dataset) if len(names) == 2 else page(names[0], dataset or "digits"))


@main.command()
def doctor() -> None:
    """Versions, devices, data and weights on this machine."""
    from fczoo.cli.show import doctor as page

    click.echo(page())
