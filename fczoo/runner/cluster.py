"""What runs on other machines have in common: how they are told to stop, and what a node must have."""

import os
from dataclasses import dataclass
from pathlib import Path
from signal import SIGTERM

from fczoo.core.errors import FczooError
from fczoo.federation.code import code_of
from fczoo.federation.device import pick_device
from fczoo.federation.environment import versions
from fczoo.reports.run_folder import read_about
from fczoo.runner.cell import Cell, Conduct
from fczoo.runner.resume import CLUSTER, Interrupted
from fczoo.runner.run_cell import described
from fczoo.runner.workers import Outcome, work


@dataclass(frozen=True)
class Command:
    """The command that began the runs, as other machines see it: by files.

    Once ``stop`` is in its run folder, runs end after their round.
    """

    out: Path  # run folder
    here: Path  # where it was given: names of files may be relative

    @property
    def stop(self) -> Path:
        """The file that tells every run to stop."""
        return self.out / CLUSTER / "stop"

    def obey(self) -> None:
        """Raise Interrupted once the file is there."""
        if self.stop.exists():
            raise Interrupted("stopped as told", SIGTERM)


def command_in(out: Path) -> Command:
    """This command, with its run folder; no run is told to stop, whatever an earlier command left."""
    command = Command(out.resolve(), Path.cwd())
    command.stop.parent.mkdir(parents=True, exist_ok=True)
    command.stop.unlink(missing_ok=True)
    return command


def work_on_node(cell: Cell, conduct: Conduct, command: Command) -> Outcome:
    """One run on another machine, if that has what the command has."""
    import torch

    os.chdir(command.here)
    torch.set_num_threads(conduct.threads)
    try:
        check_node(cell)
    except FczooError as error:
        return Outcome("failed", described(error))
    return work(cell, conduct, command.obey)


def check_node(cell: Cell) -> None:
    """Raise FczooError where this machine has other versions or other source than the folder's
    ``bench.json`` says: its numbers would not be those of the table's other rows.
    """
    about = read_about(cell.folder)
    other = [
        f"{name} is {here} here, {about.versions[name]} where the command was started"
        for name, here in versions().items()
        if about.versions.get(name, here) != here
    ]
    device = str(pick_device(cell.settings.device))
    if device != about.device:
        other.append(f"the runs are to be on {about.device}, it would take {device} (say --device)")
    code = code_of(cell.settings, cell.method)
    other += [f"{name} is another" for name, sha256 in code.items() if about.code.get(name, sha256) != sha256]
    if other:
        raise FczooError(
            f"this node cannot take part: {'; '.join(other[:3])}; give all nodes the same environment"
        )
