"""Commands ``fczoo partition`` and ``fczoo data``: partitions, and local data sets."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import click

from fczoo.cli.options import (
    DATA_FOLDER,
    OUTPUT,
    Command,
    ExampleGroup,
    GroupedCommand,
    complete,
    grouped_option,
    settings_options,
)
from fczoo.core.errors import FczooError
from fczoo.core.options import quote
from fczoo.core.registry import DATASETS

SCHEMES = ("https://", "http://", "ftp://", "file://")  # schemes that urllib supports
STREAM_SETTINGS = (
    "dataset",
    "hf_columns",
    "data_root",
    "tasks",
    *("base_classes", "ways", "shots", "imbalance", "blurry", "label_noise"),
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
"""Settings that determine the images of each task and client."""


def output_file_option(name: str, what: str) -> Callable[[Command], Command]:
    """Return the decorator that adds an option for an output file.

    Args:
        name: Name of the option.
        what: Help text.
    """
    return grouped_option(
        OUTPUT, name, metavar="FILE", type=click.Path(dir_okay=False, path_type=Path), help=what
    )


@click.command(cls=GroupedCommand)
@settings_options(STREAM_SETTINGS)
@grouped_option(OUTPUT, "--full", is_flag=True, help="Also print the images per client and class")
@output_file_option("--save", "Write a partition file, for `--partition file:PATH`")
@output_file_option("--table", "Write a CSV of images per task, client and class")
@output_file_option(
    "--plot", "Write a picture, e.g. as PNG, PDF or SVG; needs matplotlib (extra `plot`)"
)
@grouped_option(
    OUTPUT,
    "--plot-kind",
    type=click.Choice(["heatmap", "bars", "bubbles"]),
    help="Images per client and class as a heat map, stacked bars or bubbles.  [default: heatmap]",
)
@output_file_option(
    "--export",
    "Write plain JSON for other software: by task and client, the positions of the images in the "
    "training part, and their original labels",
)
def partition(
    dataset: str | None,
    full: bool,
    save: Path | None,
    table: Path | None,
    plot: Path | None,
    plot_kind: Literal["heatmap", "bars", "bubbles"] | None,
    export: Path | None,
    **parameters: Any,
) -> None:
    """Show the partition over clients and tasks that `bench` uses with the same options."""
    from fczoo.cli.arguments import parse_specs
    from fczoo.cli.config import default_protocol
    from fczoo.cli.other_tools import check_partitions
    from fczoo.federation.settings import Settings

    if plot_kind and not plot:
        raise FczooError("--plot-kind needs --plot FILE; add it")
    _check_distinct({"--save": save, "--table": table, "--plot": plot, "--export": export})
    setting_values = {name: value for name, value in parameters.items() if value is not None}
    check_partitions(parse_specs(setting_values.get("partition"), "--partition"))
    settings = Settings.for_dataset(
        dataset or "digits",
        **setting_values,
        **default_protocol(dataset or "digits", setting_values),
    )
    _ = settings.partitioner  # report an invalid partition before searching the data

    from fczoo.cli.show_partition import describe_split, write_export, write_plot, write_table
    from fczoo.federation.data_setup import open_stream

    if plot:
        from fczoo.reports.drawing import check_plot

        check_plot(plot)
    stream, client_partition = open_stream(settings, pixels=False)
    click.echo(describe_split(client_partition, stream, full, settings.protocol))
    if save:
        client_partition.save(save)
    draw = partial(write_plot, kind=plot_kind or "heatmap")
    for path, write in ((table, write_table), (plot, draw), (export, write_export)):
        if path:
            write(path, client_partition, stream)


def _check_distinct(outputs: Mapping[str, Path | None]) -> None:
    """Raise FczooError if two options name the same output file."""
    by_path: dict[Path, str] = {}
    for option, path in outputs.items():
        if path is not None and (other := by_path.setdefault(path.resolve(), option)) != option:
            raise FczooError(f"{other} and {option} both name {path}; give each its own file")


HF_COLUMNS = click.option(
    "--hf-columns",
    metavar="image=NAME,label=NAME",
    help="Image and label columns of a data set hf:PLACE.  [default: by their types]",
)


def resolve_place(
    dataset: str, data_root: Path | None, hf_columns: str | None
) -> tuple[str, Path | None]:
    """Return name and data root of a data set; see ``locate_dataset``."""
    from fczoo.data.hub_files import locate_dataset

    name, root = locate_dataset(dataset, str(data_root) if data_root else None, hf_columns)
    return name, Path(root) if root else None


@click.group(cls=ExampleGroup)
def data() -> None:
    """Download data sets and verify local copies."""


@data.command(cls=GroupedCommand)
@click.argument("name", shell_complete=complete(DATASETS))
@click.option(
    "--data-root",
    type=click.Path(path_type=Path),
    help=f"Folder to which the data set is written.  {DATA_FOLDER}",
)
@click.option(
    "--mirror",
    metavar="URL",
    help="Another address with the same files, such as file:///FOLDER.  "
    "[default: the official source]",
)
def fetch(name: str, data_root: Path | None, mirror: str | None) -> None:
    """Download a data set from its official source. The same command resumes a download."""
    from fczoo.data.fetch import fetch as get

    if mirror is not None and not mirror.lower().startswith(SCHEMES):
        raise FczooError(
            f"--mirror {quote(mirror)} is not an address; it must begin with {' or '.join(SCHEMES)}"
        )

    click.echo(get(name, data_root, mirror))


@data.command(cls=GroupedCommand)
@click.argument("name", shell_complete=complete(DATASETS))
@click.option(
    "--data-root",
    type=click.Path(path_type=Path),
    help=f"Folder that contains the data set.  {DATA_FOLDER}",
)
@HF_COLUMNS
def check(name: str, data_root: Path | None, hf_columns: str | None) -> None:
    """Compare the numbers of classes and images of a local copy with the official ones."""
    from fczoo.data.verify import verify

    table, wrong = verify(*resolve_place(name, data_root, hf_columns))
    click.echo(table)
    if wrong:
        raise FczooError(f"this copy of {name} is incomplete: {'; '.join(wrong)}")
