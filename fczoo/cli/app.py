"""Command ``fczoo``: its subcommands and error messages."""

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import click

from fczoo import __version__
from fczoo.cli.bench import bench
from fczoo.cli.data import data, partition
from fczoo.cli.info import doctor, list_command, show
from fczoo.cli.listing import KINDS
from fczoo.cli.message_options import print_error
from fczoo.cli.models import cite, evaluate, export, predict
from fczoo.cli.new import new
from fczoo.cli.options import CONTEXT, ExampleGroup
from fczoo.cli.other_tools import command_pointer, option_pointer
from fczoo.cli.papers import claims, compare, papers, reproduce
from fczoo.cli.plot import plot
from fczoo.cli.report import leaderboard, report, submit
from fczoo.cli.site import site
from fczoo.cli.suite import suite
from fczoo.cli.tune import tune
from fczoo.core.command_messages import MessageStyle, use_message_style
from fczoo.core.errors import OUT_OF_MEMORY, FczooError, lacks_memory, options_in_messages
from fczoo.core.terminal import lossy_output
from fczoo.runner.warnings import gather_warnings

# click 8.2 raises what 8.1 prints
_HELP_ERRORS = getattr(click.exceptions, "NoArgsIsHelpError", ())


@contextmanager
def shorten_usage_errors() -> Iterator[None]:
    """Reduce usage errors of click to one line, with advice.

    The new errors have no context, because click prints the whole usage of errors with a context.
    """
    try:
        yield
    except click.UsageError as error:
        message = " ".join(error.format_message().split()).rstrip(".")
        if isinstance(error, _HELP_ERRORS):
            raise
        command = error.ctx.command_path if error.ctx else "fczoo"
        if isinstance(error, click.NoSuchOption):
            params = error.ctx.command.params if error.ctx else []
            known_options = {
                option.lstrip("-").replace("-", "_") for param in params for option in param.opts
            }
            suggestions = ", ".join(error.possibilities or [])
            advice = f"did you mean {suggestions}?" if suggestions else f"see {command} --help"
            advice = option_pointer(error.option_name, known_options) or advice
            raise click.UsageError(
                f"{command}: no such option {error.option_name}; {advice}"
            ) from error
        raise click.UsageError(f"{message}; see {command} --help") from error


class Commands(ExampleGroup):
    """Group of all commands; errors that users can fix become one line and a non-zero exit code."""

    def main(self, *arguments: Any, **more: Any) -> Any:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                # print ? for characters that a terminal lacks, such as ±
                stream.reconfigure(errors="replace")
        if not more.get("prog_name"):  # click would show the file's name for python -m fczoo
            more["prog_name"] = "fczoo"
        with lossy_output() as output, options_in_messages(), use_message_style(MessageStyle()):
            try:
                return super().main(*arguments, **more)
            except SystemExit as ending:
                output.flush()
                if ending.code or output.disk_error is None:
                    raise
                problem = f"cannot write stdout: {output.disk_error.strerror}"
                print_error(f"{problem}; free some space, or write to another disk")
                raise SystemExit(1) from ending

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if self.get_command(ctx, args[0]) is None and (advice := command_pointer(args[0], KINDS)):
            raise click.UsageError(f"No such command {args[0]!r}; write {advice}", ctx)
        return super().resolve_command(ctx, args)

    def make_context(self, *arguments: Any, **more: Any) -> click.Context:
        with shorten_usage_errors():
            return super().make_context(*arguments, **more)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with shorten_usage_errors(), gather_warnings():
                return super().invoke(ctx)
        except FczooError as error:
            _fail(ctx, str(error), error.exit_code)
        except KeyboardInterrupt:
            _fail(ctx, "interrupted; no run was active", 130)
        except OSError as error:
            file_note = f": {error.filename}" if error.filename else ""
            _fail(ctx, f"{error.strerror or error}{file_note}")
        except (RuntimeError, MemoryError, ImportError) as error:
            if not lacks_memory(error):
                raise
            _fail(ctx, OUT_OF_MEMORY)


def _fail(ctx: click.Context, text: str, code: int = 1) -> NoReturn:
    """Print an error in the style of messages and end the command."""
    print_error(text)
    ctx.exit(code)


@click.group(
    "fczoo", cls=Commands, context_settings={"help_option_names": ["-h", "--help"], **CONTEXT}
)
@click.version_option(__version__, prog_name="fczoo")
def main() -> None:
    """Compare methods of Federated Class-Incremental Learning on pre-trained vision
    transformers.
    """


for command in (
    bench,
    tune,
    report,
    plot,
    leaderboard,
    submit,
    partition,
    data,
    papers,
    compare,
    reproduce,
    claims,
    suite,
    predict,
    evaluate,
    export,
    cite,
    list_command,
    show,
    doctor,
    new,
    site,
):
    main.add_command(command)
