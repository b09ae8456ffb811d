"""Command ``fczoo site``: runs between institutions that keep their images."""

from pathlib import Path

import click

from fczoo.cli.options import ExampleGroup, GroupedCommand
from fczoo.cli.values import Number
from fczoo.core.errors import FczooError

AGREEMENT_OPTION = click.option(
    "--agreed",
    type=click.Path(path_type=Path),
    required=True,
    help="Folder with the three files on which all sites agreed: classes.txt, schedule.json and "
    "run.toml.",
)
PATIENCE_OPTION = click.option(
    "--patience",
    type=Number(min=1),
    default=3600.0,
    show_default=True,
    help="Seconds that the server waits for a site before the round continues without it, and that "
    "a site waits for an unreachable server.",
)


@click.group(cls=ExampleGroup)
def site() -> None:
    """Run across institutions over HTTPS or NVIDIA FLARE; images never leave their site."""


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

    Give each site only its own folder, which contains the key that identifies the site.
    """
    _need_cryptography()
    from fczoo.sites.credentials import host_and_port, write_federation

    try:
        host, port = host_and_port(address)
    except ValueError as error:
        raise FczooError(f"--address {error}") from error
    agreement = write_federation(out, agreed, host, port)
    click.echo(f"Written to {out}: {', '.join(['server', *agreement.sites])}")
    click.echo("Next, at the server and each site:")
    click.echo("  fczoo site start FOLDER --images DIR")


@site.command(cls=GroupedCommand)
@click.argument("out", type=click.Path(path_type=Path))
@AGREEMENT_OPTION
@PATIENCE_OPTION
def job(out: Path, agreed: Path, patience: float) -> None:
    """Write a job for institutions that already run NVIDIA FLARE; it replaces init and start."""
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
    help="Folder with one folder per class: a site's own images, or the server's test images.",
)
@PATIENCE_OPTION
@click.option(
    "--epsilon-budget",
    type=Number(min=0, min_open=True),
    help="Largest total epsilon of this institution's uploads in all runs. The site refuses runs "
    "without noise, and uploads that would exceed this limit.  [default: no limit]",
)
@click.option(
    "--ledger",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="File that records this institution's uploads under differential privacy.  [default: one "
    "per user, outside the folders of runs]",
)
def start(
    folder: Path,
    images: Path,
    patience: float,
    epsilon_budget: float | None,
    ledger: Path | None,
) -> None:
    """Run the server or the site of FOLDER until the run has ended.

    The server writes result.json and the final model; each site fetches the model. If the run
    fails, the server and all sites end with the reason.
    """
    _need_cryptography()
    from fczoo.federation.result import read_result
    from fczoo.sites import node
    from fczoo.sites.ledger import PrivacyLedger, default_ledger

    click.echo(f"Started; the log is {folder / node.LOG}; Ctrl-C stops this process")
    ledger_file = PrivacyLedger(ledger or default_ledger(), epsilon_budget)
    outcome = node.start(folder, images, patience, ledger_file)
    if outcome.is_dir():
        click.echo(f"The run has ended; its model is in {outcome}. Next:")
        click.echo(f"  fczoo predict {outcome} IMAGES")
        return
    result, traffic = read_result(outcome), node.status(folder)
    click.echo(result.table())
    click.echo(f"A_N {result.metrics['A_N']:.1f}; in {outcome}")
    click.echo(
        f"{traffic['seconds']:.0f} s; {traffic['wire_bytes'] / 1e6:.2f} MB on the wire, "
        f"{(result.bytes_up + result.bytes_down) / 1e6:.2f} MB of tensors"
    )


@site.command(cls=GroupedCommand)
@click.argument("folder", type=click.Path(path_type=Path))
def status(folder: Path) -> None:
    """Show the progress of a run; FOLDER is the folder of its server."""
    _need_cryptography()
    from fczoo.sites import node

    state = node.status(folder)
    numbers = f"{state['seconds']:.0f} s, {state['wire_bytes'] / 1e6:.1f} MB on the wire"
    reason = f": {state['reason']}" if state["reason"] else ""
    click.echo(f"{state['status']}, {numbers}{reason}")
    if state["status"] == "running":
        for group in ("connected", "missing"):
            click.echo(f"{group}: {', '.join(state[group]) or 'none'}")


def _need_cryptography() -> None:
    """Raise FczooError if the package cryptography is not installed."""
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise FczooError("cryptography is not installed; run pip install 'fczoo[sites]'") from None
