"""Generated pages that are in the repository: ``python docs/reference.py`` writes them again.

They can be read on a code host. A test compares them with the code.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import click
import torch
from blocks import pipe_table, result_page
from schema import write_schemas

from fczoo.cli.app import main as fczoo_command
from fczoo.cli.listing import MethodFacts, read_facts
from fczoo.cli.options import ALL_OPTIONS, EXAMPLES
from fczoo.cli.show import part_page
from fczoo.core.method import Method
from fczoo.core.registry import create_method
from fczoo.federation.settings import Settings
from fczoo.models.card import method_entries
from fczoo.runner.cost import first_round, measure

DOCS = Path(__file__).parent
DATASET = "cifar100"
"""Data set on whose schedule bytes are counted."""
NOTICE = "<!-- Written by python docs/reference.py; do not edit it. -->"
GENERATED_IMAGES = {"synthetic": "images", "generator": "generator"}
"""First word of a tensor that clients receive -> what takes the place of old images."""
GRADIENTS = "gradients"  # of single images, in the words of the list of methods


def write() -> None:
    """Write all pages and the schemas."""
    torch.set_num_threads(1)  # a step on few images is too small to share
    for name, text in {"methods": methods_page(), **quick_pages()}.items():
        (DOCS / f"{name}.md").write_text(text, encoding="utf-8")
    write_schemas(DOCS / "schemas")


def quick_pages() -> dict[str, str]:
    """Return the pages that need no measurement, by name."""
    result = f"{NOTICE}\n{result_page()}\n"
    return {"commands": commands_page(), "settings": settings_page(), "result": result}


# --- which method needs what

COLUMNS = (
    *("method", "year", "venue", "trained", "sent", "MB up", "exemplars", "synthetic data"),
    *("rounds", "classes may recur", "secure sums"),
)
TABLE = "<!-- What follows is written by python docs/reference.py; do not edit it. -->"
"""Line of the page of methods above its table."""


def methods_page() -> str:
    """Return the page of all methods: its text, and a table of what each needs."""
    text = (DOCS / "methods.md").read_text(encoding="utf-8").partition(TABLE)[0]
    settings, facts = Settings.for_dataset(DATASET), read_facts()
    schedule = f"{settings.tasks} tasks, {settings.backbone.partition('.')[0]}"
    table = pipe_table([needs_of(facts[name]) for name in facts], COLUMNS)
    return f"{text}{TABLE}\n\nMB up: {DATASET}, {schedule}, no compression.\n\n{table}\n"


def needs_of(fact: MethodFacts) -> tuple[str, ...]:
    """Return the row of a method.

    Args:
        fact: Its row of ``fczoo list methods``.
    """
    method = create_method(fact.method, DATASET)
    training = method.training()
    package = type(method).__module__.split(".")[-2]
    return (
        f"[{fact.method}](../{package}/{source_of(type(method))}.py)",
        fact.year or "–",
        venue_of(type(method), fact.year),
        fact.trained,
        "nothing" if training.own_models else fact.sent,
        "0" if training.own_models else megabytes_up(method),
        "kept" if training.exemplars else "none" if training.data_scope == "task" else "all images",
        synthetic_data(method, fact),
        "yes" if training.trained_prefixes else "none",
        "yes" if method.supports_recurring_classes else "no",
        secure_sums(method),
    )


def source_of(cls: type[Method]) -> str:
    """Return the name of the file that defines a method.

    Args:
        cls: Class of the method.
    """
    return cls.__module__.rpartition(".")[2]


def venue_of(cls: type[Method], year: str) -> str:
    """Return the venue of the source with this year.

    Args:
        cls: Class of the method.
        year: Year in the list of methods.
    """
    for entry in method_entries(cls):
        fields = dict(re.findall(r"(\w+) = \{([^{}]*)\}", entry))
        if year and fields.get("year") == year:
            names = [fields.get(name) for name in ("booktitle", "journal", "howpublished")]
            return next(filter(None, names), "arXiv" if "eprint" in fields else "–")
    return "–"


def megabytes_up(method: Method) -> str:
    """Return the megabytes of a client's upload in its first round.

    Args:
        method: Method with its values for the data set.
    """
    return f"{first_round(method, Settings.for_dataset(DATASET)).upload_bytes / 1e6:.3f}"


def synthetic_data(method: Method, fact: MethodFacts) -> str:
    """Return what takes the place of old images.

    Args:
        method: The method.
        fact: Its row of ``fczoo list methods``.
    """
    if GRADIENTS in fact.sent.split(", "):
        return "from gradients"
    small = create_method(method.name, "digits")
    broadcast = measure(small, Settings.for_dataset("digits")).stored_broadcast
    kinds = dict.fromkeys(name.partition(".")[0] for name in broadcast)
    return ", ".join(GENERATED_IMAGES[kind] for kind in kinds if kind in GENERATED_IMAGES) or "none"


def secure_sums(method: Method) -> str:
    """Return whether the server needs only sums over clients.

    Args:
        method: The method.
    """
    training = method.training()
    if training.own_models:
        return "–"
    own_merge = type(method).aggregate is not Method.aggregate
    return "no" if own_merge or training.per_client_statistics else "yes"


# --- commands and settings


def commands_page() -> str:
    """Return a page with a section per command and a heading, which is an anchor, per option."""
    context = click.Context(fczoo_command, info_name="fczoo")
    about = (
        "`fczoo COMMAND --help` prints the same on a terminal. For `bench` and `tune` it prints "
        "only the common options; `--help-all` prints all."
    )
    parts = [NOTICE, "# Commands", about]
    for path, command, inner in _commands(fczoo_command, context):
        parts += [f"## {path}", _plain(command.help or "")]
        usage = " ".join(command.collect_usage_pieces(inner))
        if examples := EXAMPLES.get(path.removeprefix("fczoo ")):
            lines = [f"{line}  # {meaning}" for line, meaning in examples]
            parts.append("\n".join(["```bash", *lines, "```"]))
        parts.append(f"```text\n{path} {usage}\n```")
        if not isinstance(command, click.Group):
            parts += _options(path, command, inner)
    return "\n\n".join(parts) + "\n"


def _commands(
    group: click.Group, context: click.Context
) -> Iterator[tuple[str, click.Command, click.Context]]:
    """Yield all commands with their words and contexts, subcommands after their group."""
    for name, command in group.commands.items():
        inner = click.Context(command, info_name=name, parent=context)
        inner.meta[ALL_OPTIONS] = True
        yield inner.command_path, command, inner
        if isinstance(command, click.Group):
            yield from _commands(command, inner)


def _options(path: str, command: click.Command, context: click.Context) -> list[str]:
    """Return a heading and the meaning of each option of a command, below their groups."""
    parts, last_group = [], ""
    for param in command.get_params(context):
        record = param.get_help_record(context)
        if isinstance(param, click.Argument) or record is None or "--help" in param.opts:
            continue
        group = getattr(param, "group", "")
        if group and group != last_group:
            parts.append(f"**{group.capitalize()}**")
            last_group = group
        names, meaning = record
        parts += [f"### {path} {param.opts[0]}", f"`{names}`: {_plain(_sentences(meaning))}"]
    return parts


def _sentences(record: str) -> str:
    """Return the help of an option and each note of click, such as its default, as a sentence."""
    limits = r"(?=[\d.]*<?=?x[<>])"
    marked = re.sub(rf" +\[{limits}|; {limits}", "  [range: ", record)
    text, *notes = re.split(r" +\[(?=default|required|range)", marked)
    notes = [f"{note[0].upper()}{note[1:].removesuffix(']')}" for note in notes]
    return " ".join(f"{part.removesuffix('.')}." for part in (text, *notes))


def _plain(text: str) -> str:
    """Return the text of a help as Markdown: one line per paragraph, no marks of click."""
    paragraphs = [" ".join(part.split()) for part in text.replace("\b", "").split("\n\n")]
    return "\n\n".join(paragraphs).replace("<", "&lt;").replace("*", "\\*")


def settings_page() -> str:
    """Return the page of all settings of a run."""
    return f"{NOTICE}\n# Settings\n\n```text\n{part_page('settings', 'digits')}\n```\n"


if __name__ == "__main__":
    write()
