"""Runs one cell of a grid and writes its files."""

from collections.abc import Callable
from contextlib import ExitStack
from traceback import format_exc

from fczoo.core.errors import FczooError
from fczoo.core.files import write_json
from fczoo.federation.benchmark import Bench
from fczoo.federation.checkpoint import Checkpoint
from fczoo.federation.diagnostics import Probe
from fczoo.federation.observer import Several
from fczoo.federation.spread import Elsewhere
from fczoo.reports.run_folder import FAILURE, LOG, WARNINGS
from fczoo.runner.cell import Cell, Conduct
from fczoo.runner.progress import Progress, Shown, logged, say
from fczoo.runner.recorder import Recorder
from fczoo.runner.resume import Interrupted
from fczoo.runner.trackers import Logging
from fczoo.runner.warnings import WarningRecorder


def run_cell(
    cell: Cell,
    bench: Bench,
    conduct: Conduct,
    obey: Callable[[], None],
    progress: Progress | None = None,
    elsewhere: Elsewhere | None = None,
) -> None:
    """Run a cell: one that is finished is kept, one that was broken off goes on after its last saved round.

    ``obey`` is called after every saved round and may raise Interrupted. Whatever else is raised also stands
    in ``failed.json``; with ``conduct.skip_failed`` it is only told. ``progress`` is that of a grid whose
    runs take turns, ``elsewhere`` where its clients act if not here.
    """
    with logged(cell.folder / LOG):
        if kept(cell):
            return
        (cell.place / FAILURE).unlink(missing_ok=True)
        try:
            with WarningRecorder(cell.place / WARNINGS):
                _run(cell, bench, conduct, obey, progress, elsewhere)
        except Interrupted:
            raise
        except Exception as error:
            record_failure(cell, described(error), "" if isinstance(error, FczooError) else format_exc())
            if not conduct.skip_failed:
                raise
            say(f"{cell.numbered}: failed, {described(error)}")


def kept(cell: Cell) -> bool:
    """Whether an earlier command has finished the run; said, if so."""
    if cell.finished:
        Checkpoint(cell.checkpoint).remove()
        say(f"{cell.numbered}: finished before, kept")
    return cell.finished


def _run(
    cell: Cell,
    bench: Bench,
    conduct: Conduct,
    obey: Callable[[], None],
    progress: Progress | None,
    elsewhere: Elsewhere | None,
) -> None:
    checkpoint, portable = Checkpoint(cell.checkpoint, obey), bench.settings.portable()
    with ExitStack() as stack:
        trackers = [stack.enter_context(Logging(name, cell.place, portable)) for name in conduct.loggers]
        files = stack.enter_context(Recorder(cell.place))
        probe = Probe(cell.place) if conduct.diagnostics else None
        observer = Several([files, Shown(cell, progress), *trackers])
        bench.run(cell.method, cell.seed, observer, checkpoint, probe, elsewhere)
    checkpoint.remove()


def described(error: Exception) -> str:
    """An error in a line: ours speak for themselves, of others the kind says more than the words."""
    return str(error) if isinstance(error, FczooError) else f"{type(error).__name__}: {error}"


def record_failure(cell: Cell, error: str, traceback: str = "") -> None:
    """Leave ``failed.json`` in the run's folder, which tables name and the next command tries again.

    With the traceback of an error that is none of ours: whoever writes a method looks for it.
    """
    write_json(cell.place / FAILURE, {"error": error, **({"traceback": traceback} if traceback else {})})
