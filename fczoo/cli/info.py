"""``fczoo list``, ``show`` and ``doctor``: lists of names, and pages about them."""

from pathlib import Path

import click

from fczoo.cli.listing import KINDS, SOURCES, complete_names, kinds, listing
from fczoo.cli.options import GroupedCommand, Name
from fczoo.core.errors import FczooError
from fczoo.core.names import match


@click.command("list", cls=GroupedCommand)
@click.argument("kind", required=False, metavar="[KIND]", type=Name(list(KINDS)))
def list_command(kind: str | None) -> None:
    """List the names of one kind; without KIND, list the kinds."""
    click.echo(listing(kind) if kind else kinds())


@click.command(cls=GroupedCommand)
@click.argument(
    "names",
    nargs=-1,
    required=True,
    metavar="[protocol|release|backbone] NAME",
    shell_complete=complete_names,
)
@click.option(
    "--dataset",
    metavar="NAME",
    help="Data set whose values are shown  [default: digits; of a protocol or release, all]",
)
def show(names: tuple[str, ...], dataset: str | None) -> None:
    """Show all about a method, data set, partitioner, aggregator, attack, local training, protocol,
    release, backbone, setting or option. `show settings` has all settings of a run.

    `show protocol NAME` and `show release NAME` select one where several have the name. `show
    backbone NAME` also takes a file of weights.
    """
    kinds = (*SOURCES, "backbone")
    kind = match(names[0], kinds) or names[0]
    if len(names) > 1 and (kind not in kinds or len(names) > 2):
        words = " or ".join(kinds)
        raise FczooError(
            f"cannot show {' '.join(names)!r}; write one name, or {words} and its name"
        )
    if kind in kinds and len(names) == 1:
        click.echo(f"{listing(f'{kind}s')}\n\nfczoo show {kind} NAME describes one.")
    elif kind == "backbone":
        from fczoo.cli.show_backbone import backbone_page

        click.echo(backbone_page(names[1]))
    elif len(names) == 2:
        from fczoo.cli.show_protocol import source_page

        click.echo(source_page(SOURCES[kind].get(names[1]), dataset))
    else:
        from fczoo.cli.meanings import show_any

        click.echo(show_any(kind, dataset))


@click.command(cls=GroupedCommand)
@click.option(
    "--data-root",
    type=click.Path(path_type=Path),
    help="Folder that holds the data.  [default: FCZOO_HOME/data]",
)
def doctor(data_root: Path | None) -> None:
    """Show versions, devices, plug-ins, extras, data and weights on this machine."""
    from fczoo.cli.doctor import doctor as page

    click.echo(page(data_root))
