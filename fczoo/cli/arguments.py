"""Parsers of command-line values."""

import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from fczoo.cli.other_tools import check_fields, check_methods
from fczoo.core.errors import FczooError
from fczoo.core.names import fold, match
from fczoo.core.options import MAX_INTEGER, nearest, quote, spell_fields
from fczoo.core.registry import METHODS
from fczoo.reports.text_format import columns

ALL = "all"
BACKBONE = "backbone"  # ``--set backbone.FIELD=VALUE`` gives a setting
MAX_SEEDS = 10_000
MAX_JOBS = 1024
# names of ``fczoo.runner.executors.MODULES``, which imports torch
EXECUTORS = ("cores", "slurm", "ray")
KEEP_MODEL = ("final", "tasks", "none")  # values of ``fczoo.models.storage.KeepModel``


def parse_words(value: str | Sequence[str] | None, option: str) -> list[str]:
    """Read a comma-separated list.

    Args:
        value: Text, or entries that are already separate.
        option: Name of the option in messages.

    Returns:
        Entries without the spaces around them.

    Raises:
        FczooError: An entry is empty or occurs twice.
    """
    entries = _split_list(value, option)
    for entry in entries:
        if entries.count(entry) > 1:
            raise FczooError(f"{option} names {quote(entry)} twice; give every name once")
    return entries


def parse_methods(value: str | Sequence[str] | None) -> list[str]:
    """Read names of methods; ``all`` means every one.

    Args:
        value: Comma-separated list, or names.

    Returns:
        Registered names.

    Raises:
        FczooError: ``all`` is given with other names, a name occurs twice, or a name is not a
            method but, for example, an aggregator.
    """
    names = parse_words(value, "--methods")
    if ALL in map(fold, names):
        if len(names) > 1:
            raise FczooError(f"--methods {ALL} includes every method; leave the other names out")
        return METHODS.names()
    check_methods(names)
    return parse_words([METHODS.find(name) or name for name in names], "--methods")


def parse_specs(value: str | Sequence[str] | None, option: str) -> list[str]:
    """Read a comma-separated list of NAME:FIELD=VALUE,FIELD=VALUE.

    An entry that only sets a field belongs to the entry before it.

    Args:
        value: Text, or entries that are already separate.
        option: Name of the option in messages.

    Returns:
        Distinct entries.

    Raises:
        FczooError: An entry is empty.
    """
    entries: list[str] = []
    for entry in _split_list(value, option):
        if (
            isinstance(value, str)
            and entries
            and "=" in entry
            and ":" not in entry.partition("=")[0]
        ):
            entries[-1] += f",{entry}"
        else:
            entries.append(entry)
    return list(dict.fromkeys(entries))


def _split_list(value: str | Sequence[Any] | None, option: str) -> list[str]:
    """Return the entries of a comma-separated list without the spaces around them.

    None and an empty text have no entries. Raises FczooError if an entry is empty.
    """
    entries = value.split(",") if isinstance(value, str) else [str(entry) for entry in value or ()]
    stripped_entries = [entry.strip() for entry in entries]
    if not any(stripped_entries):
        if len(stripped_entries) > 1:
            raise FczooError(f"{option} is empty; give one or more entries, separated by commas")
        return []
    if "" in stripped_entries:
        raise FczooError(f"{option} has an empty entry in {quote(value)}; remove it and its comma")
    return stripped_entries


def parse_changes(changes: Sequence[str]) -> dict[str, dict[str, str]]:
    """Parse ``hgp.lr=0.1`` to {"hgp": {"lr": "0.1"}}.

    Args:
        changes: Values of ``--set``.

    Returns:
        Values by method and option.

    Raises:
        FczooError: A value is not METHOD.FIELD=VALUE.
    """
    out: dict[str, dict[str, str]] = {}
    for change in changes:
        target, sign, value = change.partition("=")
        method, dot, field = target.partition(".")
        if not (sign and dot and method and field):
            raise FczooError(
                f"cannot read --set {quote(change)}; write METHOD.FIELD=VALUE, e.g. hgp.lr=0.001"
            )
        out.setdefault(method, {})[field] = value
    return spell_options(out)


def spell_options(changes: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Replace the names of methods and options by their registered spelling.

    Args:
        changes: Values by method and option. Unknown names stay as they are.

    Returns:
        The same values under registered names.

    Raises:
        FczooError: One option has two spellings.
    """
    out: dict[str, dict[str, Any]] = {}
    for given_name, values in changes.items():
        name = METHODS.find(given_name)
        method = name or match(given_name, [BACKBONE]) or given_name
        method_options = METHODS.options(name) if name else {}
        spelled_values = spell_fields(method_options, f"--set {method}", values)
        check_fields(method, method_options, spelled_values)
        out[method] = {**out.get(method, {}), **spelled_values}
    return out


def parse_seeds(value: str | int | Sequence[int | str]) -> list[int]:
    """Parse ``0,1,5-7`` to [0, 1, 5, 6, 7].

    Args:
        value: Text, a number, or a list of either.

    Returns:
        Seeds in the given order.

    Raises:
        FczooError: The value is not a list of distinct whole numbers from 0 up.
    """
    seeds: list[int] = []
    for entry in _split_list([value] if isinstance(value, int) else value, "--seeds"):
        ends = re.fullmatch(r"(\d{1,19})(?:-(\d{1,19}))?", entry, re.ASCII)
        if ends is None:
            raise FczooError(
                f"--seeds has {quote(entry)}; give distinct whole numbers such as 0,1,2 or 0-4"
            )
        first, last = int(ends[1]), int(ends[2] or ends[1])
        if not first <= last <= MAX_INTEGER or last - first >= MAX_SEEDS:
            raise FczooError(
                f"--seeds has {entry}; in a range FIRST-LAST, LAST must be at least FIRST and at "
                f"most {MAX_INTEGER}, with at most {MAX_SEEDS:,} seeds"
            )
        seeds += range(first, last + 1)
    if len(set(seeds)) < len(seeds):
        twice = next(s for s in seeds if seeds.count(s) > 1)
        raise FczooError(
            f"--seeds has {twice} twice; give distinct whole numbers such as 0,1,2 or 0-4"
        )
    if not seeds:
        raise FczooError("--seeds is empty; give distinct whole numbers such as 0,1,2 or 0-4")
    return seeds


def parse_cluster(words: Sequence[str], executor: str) -> tuple[tuple[str, str], ...]:
    """Parse ``threads=2`` to (("threads", "2"),).

    Args:
        words: Values of ``--cluster``.
        executor: Registered name of the executor.

    Returns:
        Keys and values.

    Raises:
        FczooError: A value is not KEY=VALUE, or the executor is not a cluster.
    """
    if words and executor == "cores":
        raise FczooError("--cluster needs --executor slurm or ray; add it, or leave --cluster out")
    pairs = [entry.partition("=") for entry in words]
    for (key, sign, value), entry in zip(pairs, words, strict=True):
        if not (key and sign and value):
            raise FczooError(
                f"cannot read --cluster {quote(entry)}; write KEY=VALUE, e.g. threads=2"
            )
        if key == "threads" and not re.fullmatch(r"[1-9]\d{0,3}", value, re.ASCII):
            raise FczooError(
                f"--cluster threads is {quote(value)}; it must be a whole number from 1 to 9999"
            )
    return tuple((key, value) for key, _, value in pairs)


def parse_executor(word: str) -> str:
    """Return the registered name of an executor.

    Args:
        word: Name in any spelling.

    Raises:
        FczooError: No executor has this name.
    """
    name = match(word, EXECUTORS)
    if name is None:
        raise FczooError(f"no executor is called {quote(word)}; {nearest(word, EXECUTORS)}")
    return name


def parse_jobs(value: str | int) -> int:
    """Parse the value of ``--jobs``.

    Args:
        value: A number, or ``auto``: one per GPU or, without any, one per core.

    Returns:
        Number of parallel runs.

    Raises:
        FczooError: The value is not a number from 1 to 1024.
    """
    text = str(value).strip()
    if text == "auto":
        import torch
        from loky import cpu_count

        return torch.cuda.device_count() or int(cpu_count())
    if not re.fullmatch(r"[1-9]\d{0,3}", text, re.ASCII) or int(text) > MAX_JOBS:
        raise FczooError(
            f"--jobs is {quote(value)}; it must be auto or a number from 1 to {MAX_JOBS}"
        )
    return int(text)


def wrap_to_terminal(text: str) -> str:
    """Wrap sentences at words for a terminal; rows of tables stay whole.

    Args:
        text: Text to print.

    Returns:
        The wrapped text; without a terminal, the text itself.
    """
    width = columns()
    if width is None:
        return text
    # do not break file names
    wrapper = textwrap.TextWrapper(width, break_on_hyphens=False, break_long_words=False)
    return "\n".join(
        line if "  " in line or len(line) <= width else wrapper.fill(line)
        for line in text.splitlines()
    )


def parse_keep_model(options: Mapping[str, Any]) -> Any:
    """Parse ``--keep-model`` and ``--no-keep-model``.

    Args:
        options: Options of the command by name.

    Returns:
        One of ``KEEP_MODEL``.

    Raises:
        FczooError: The value is unknown, or both options are given.
    """
    word = options.get("keep_model")
    if word is not None and options.get("no_keep_model"):
        raise FczooError("--keep-model and --no-keep-model are both given; leave one out")
    if word is None:
        return "none" if options.get("no_keep_model") else "final"
    name = match(word, KEEP_MODEL)
    if name is None:
        raise FczooError(
            f"--keep-model is {quote(word)}; it must be one of {', '.join(KEEP_MODEL)}"
        )
    return name
