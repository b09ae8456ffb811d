"""``fczoo site``: runs between institutions that keep their images."""

from pathlib import Path

import click

from fczoo.cli.options import ExampleGroup, GroupedCommand
from fczoo.core.errors import FczooError

AGREEMENT_OPTION = click.option(
    "--agreed",
    type=click.Path(path_type=Path),
    required=True,
    help="Folder of the agreement: classes.txt, schedule.json and run.toml.",
)
PATIENCE_OPTION = click.option(
    "--patience",
    type=click.FloatRange(min=1),
    default=3600.0,
    show_default=True,
    help="Seconds that the server waits for a site before the round continues without it.",
)


@click.group(cls=ExampleGroup)
def site() -> None:
    """Run across institutions over Flower or NVIDIA FLARE; images never leave their site."""


@site.command(cls=GroupedCommand)
@click.argument("out", type=click.Path(path_type=Path))
@AGREEMENT_OPTION
@click.option(
    "--address",
    required=True,
    metavar="HOST:PORT",
    help="Address at which all sites reach the server.",
)
def init(out: Path, agreed: Path, address: str) -> None:
    """Write OUT: a folder for the server and one for each site, with keys and certificates.

    Give each site its own folder, and never that of another site: it holds the key by which the
    server knows the site.
    """
    from fczoo.sites.address import host_and_port
    from fczoo.sites.flower import write_federation

    try:
        host, port = host_and_port(address)
    except ValueError as error:
        raise FczooError(f"--address {error}") from error
    agreement = write_federation(out, agreed, host, port)
    click.echo(
        f"Written to {out}: {', '.join(['server', *agreement.sites])}. Next, at each of them:"
    )
    click.echo("  fczoo site start FOLDER --images DIR")


@site.command(cls=GroupedCommand)
@click.argument("out", type=click.Path(path_type=Path))
@AGREEMENT_OPTION
@PATIENCE_OPTION
def job(out: Path, agreed: Path, patience: float) -> None:
    """Write a job for institutions that run NVIDIA FLARE already; it replaces init and start."""
    try:
        from fczoo.sites.flare import write_job
    except ImportError as error:
        raise FczooError("NVIDIA FLARE is not installed; run pip install 'fczoo[flare]'") from error
    write_job(out, agreed, patience)
    click.echo(f"Written to {out}. Next: nvflare job submit -j {out}")


@site.command(cls=GroupedCommand)
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--images",
    type=click.Path(path_type=Path),
    required=True,
    help="Folder of class folders: a site's own images, or the server's test images.",
)
@PATIENCE_OPTION
def start(folder: Path, images: Path, patience: float) -> None:
    """Run the site of FOLDER until it is stopped, or the server until the run has ended."""
    from fczoo.sites.flower import start as begin
    from fczoo.sites.folders import LOG

    click.echo(f"Started; Ctrl-C stops it. Flower's log is {folder / LOG}")
    outcome = begin(folder, images, patience)
    if outcome is not None:
        result, tensor_bytes = outcome.result, outcome.result.bytes_up + outcome.result.bytes_down
        click.echo(result.table())
        click.echo(f"A_N {result.metrics['A_N']:.1f}; in {folder / 'result.json'}")
        click.echo(
            f"{outcome.seconds:.0f} s; {outcome.wire / 1e6:.2f} MB on the wire, "
            f"{tensor_bytes / 1e6:.2f} MB of tensors"
        )


@site.command(cls=GroupedCommand)
@click.argument("folder", type=click.Path(path_type=Path))
def status(folder: Path) -> None:
    """Show the progress of the run whose server has this FOLDER."""
    from fczoo.sites.flower import status as runs

    for run in runs(folder):
        traffic = run["network-traffic"]["total-bytes"] / 1e6
        click.echo(
            f"run {run['run-id']}: {run['status']}, {run['elapsed']:.0f} s, {traffic:.1f} MB"
        )
