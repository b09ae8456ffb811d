"""``fczoo partition`` and ``fczoo data``: who owns what, and where the images come from."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from fczoo.cli.options import (
    OUTPUT,
    Command,
    ExampleGroup,
    GroupedCommand,
    complete,
    grouped,
    settings_options,
)
from fczoo.core.errors import FczooError
from fczoo.core.registry import DATASETS

STREAM = (
    "dataset",
    "data_root",
    "tasks",
    "train_per_class",
    "test_per_class",
    "class_order",
    "class_order_seed",
    "protocol",
    "partition",
    "partition_seed",
    "clients",
    "joining",
    "transition",
    "moving",
    "task_order",
)
"""Settings that say which images arrive when and at whom."""


def written(name: str, what: str) -> Callable[[Command], Command]:
    """An option that names a file to write."""
    return grouped(OUTPUT, name, metavar="FILE", type=click.Path(dir_okay=False, path_type=Path), help=what)


@click.command(cls=GroupedCommand)
@settings_options(STREAM)
@grouped(OUTPUT, "--full", is_flag=True, help="Print images per client and class as well")
@written("--save", "partition file for `--partition file:PATH`")
@written("--table", "CSV of images per task, client and class")
@written("--plot", "heat map, e.g. as PNG, PDF or SVG; needs matplotlib (extra `plot`)")
@written("--export", "plain JSON for other software: positions and labels by task and client")
def partition(
    dataset: str | None,
    full: bool,
    save: Path | None,
    table: Path | None,
    plot: Path | None,
    export: Path | None,
    **given: Any,
) -> None:
    """Show, and write if asked, the split over clients and tasks that `bench` uses with the same options."""
    from fczoo.cli.arguments import specs
    from fczoo.cli.followed import followed_here
    from fczoo.cli.pointers import check_partitions
    from fczoo.federation.settings import Settings

    said = {name: value for name, value in given.items() if value is not None}
    check_partitions(specs(said.get("partition")))
    settings = Settings.for_dataset(dataset or "digits", **said, **followed_here(dataset or "digits", said))
    _ = settings.partitioner  # a misspelt one is told before data are looked for

    from fczoo.cli.pictures import check_plot
    from fczoo.cli.show_partition import describe_split, write_export, write_plot, write_table
    from fczoo.federation.stream import open_stream

    if plot:
        check_plot(plot)
    stream, made = open_stream(settings, pixels=False)
    click.echo(describe_split(made, stream, full, settings.protocol))
    if save:
        made.save(save)
    for path, write in ((table, write_table), (plot, write_plot), (export, write_export)):
        if path:
            write(path, made, stream)


@click.group(cls=ExampleGroup)
def data() -> None:
    """Download data sets and verify local copies."""


@data.command(cls=GroupedCommand)
@click.argument("name", shell_complete=complete(DATASETS))
@click.option("--data-root", type=click.Path(path_type=Path), help="Folder to write to.  [FCZOO_HOME/data]")
@click.option("--mirror", metavar="URL", help="Another address with the same files, such as file:///FOLDER.")
def fetch(name: str, data_root: Path | None, mirror: str | None) -> None:
    """Download a data set from its official source. A download that broke off is resumed."""
    from fczoo.data.fetch import fetch as get

    click.echo(get(name, data_root, mirror))


@data.command(cls=GroupedCommand)
@click.argument("name", shell_complete=complete(DATASETS))
@click.option("--data-root", type=click.Path(path_type=Path), help="Folder that holds it.  [FCZOO_HOME/data]")
def check(name: str, data_root: Path | None) -> None:
    """Read a local copy and show its numbers beside the official ones."""
    from fczoo.data.verify import verify

    table, wrong = verify(name, data_root)
    click.echo(table)
    if wrong:
        raise FczooError(f"this is not the whole of {name}: {'; '.join(wrong)}")
