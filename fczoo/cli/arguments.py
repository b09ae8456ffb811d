"""Words of the command line, read."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fczoo.cli.pointers import check_fields, check_methods
from fczoo.core.errors import FczooError
from fczoo.core.names import fold, match
from fczoo.core.options import WIDEST, nearest, quoted, spell_fields
from fczoo.core.registry import METHODS

ALL = "all"
BACKBONE = "backbone"  # ``--set backbone.FIELD=VALUE`` gives a setting
MOST_SEEDS = 10_000
MOST_JOBS = 1024
EXECUTORS = ("cores", "slurm", "ray")  # NAME: fczoo.runner.on_NAME has ``workers(count, conduct, out)``


def words(value: str | Sequence[str] | None, option: str) -> list[str]:
    """Read a comma-separated list. Raises FczooError where an entry is empty or occurs twice."""
    found = _listed(value, option)
    for word in found:
        if found.count(word) > 1:
            raise FczooError(f"{option} names {quoted(word)} twice; give every name once")
    return found


def methods_named(value: str | Sequence[str] | None) -> list[str]:
    """Names of methods; ``all`` alone is every one. Raises FczooError where it is not alone."""
    named = words(value, "--methods")
    if ALL in map(fold, named):
        if len(named) > 1:
            raise FczooError(f"--methods {ALL} names every method already; leave the others out")
        return METHODS.names()
    check_methods(named)
    return words([METHODS.find(name) or name for name in named], "--methods")


def specs(value: str | Sequence[str] | None) -> list[str]:
    """Read a comma-separated list of NAME:FIELD=VALUE,FIELD=VALUE.

    A word that only sets a field belongs to the one before it. Raises FczooError for an empty entry.
    """
    found: list[str] = []
    for word in _listed(value, "a list"):
        if isinstance(value, str) and found and "=" in word and ":" not in word.partition("=")[0]:
            found[-1] += f",{word}"
        else:
            found.append(word)
    return list(dict.fromkeys(found))


def _listed(value: str | Sequence[Any] | None, option: str) -> list[str]:
    """Return the entries of a comma-separated list without the spaces around them.

    Raises FczooError where some of the entries, but not all, are empty.
    """
    entries = value.split(",") if isinstance(value, str) else [str(entry) for entry in value or ()]
    found = [entry.strip() for entry in entries]
    if not any(found):
        return []
    if "" in found:
        raise FczooError(f"{option} has an empty entry in {quoted(value)}; remove it and its comma")
    return found


def parse_changes(changes: Sequence[str]) -> dict[str, dict[str, str]]:
    """``hgp.lr=0.1`` -> {"hgp": {"lr": "0.1"}}. Raises FczooError for another form."""
    out: dict[str, dict[str, str]] = {}
    for change in changes:
        place, sign, value = change.partition("=")
        method, dot, field = place.partition(".")
        if not (sign and dot and method and field):
            raise FczooError(
                f"cannot read --set {quoted(change)}; write METHOD.FIELD=VALUE, e.g. hgp.lr=0.001"
            )
        out.setdefault(method, {})[field] = value
    return spell_options(out)


def spell_options(changes: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return options by method under the registered spelling of methods and fields.

    Unknown names stay as they are. Raises FczooError where one option has two spellings.
    """
    out: dict[str, dict[str, Any]] = {}
    for word, values in changes.items():
        name = METHODS.find(word)
        method = name or match(word, [BACKBONE]) or word
        known = METHODS.options(name) if name else {}
        spelled = spell_fields(known, f"--set {method}", values)
        check_fields(method, known, spelled)
        out[method] = {**out.get(method, {}), **spelled}
    return out


def parse_seeds(value: str | int | Sequence[int | str]) -> list[int]:
    """Read ``0,1,5-7`` as [0, 1, 5, 6, 7].

    Raises FczooError for anything but a list of distinct whole numbers from 0 up.
    """
    seeds: list[int] = []
    for word in _listed([value] if isinstance(value, int) else value, "--seeds"):
        ends = re.fullmatch(r"(\d{1,19})(?:-(\d{1,19}))?", word, re.ASCII)
        if ends is None:
            raise FczooError(f"--seeds has {quoted(word)}; give distinct whole numbers such as 0,1,2 or 0-4")
        first, last = int(ends[1]), int(ends[2] or ends[1])
        if not first <= last <= WIDEST or last - first >= MOST_SEEDS:
            raise FczooError(
                f"--seeds has {word}; a range goes up, to {WIDEST} at most, by {MOST_SEEDS:,} seeds at most"
            )
        seeds += range(first, last + 1)
    if len(set(seeds)) < len(seeds):
        twice = next(s for s in seeds if seeds.count(s) > 1)
        raise FczooError(f"--seeds has {twice} twice; give distinct whole numbers such as 0,1,2 or 0-4")
    if not seeds:
        raise FczooError("--seeds is empty; give distinct whole numbers such as 0,1,2 or 0-4")
    return seeds


def parse_cluster(given: Sequence[str], executor: str) -> tuple[tuple[str, str], ...]:
    """``threads=2`` -> (("threads", "2"),). Raises FczooError for another form, and without a cluster."""
    if given and executor == "cores":
        raise FczooError("--cluster is given without --executor; add --executor slurm or ray")
    pairs = [word.partition("=") for word in given]
    for (key, sign, value), word in zip(pairs, given, strict=True):
        if not (key and sign and value):
            raise FczooError(f"cannot read --cluster {quoted(word)}; write KEY=VALUE, e.g. threads=2")
        if key == "threads" and not re.fullmatch(r"[1-9]\d{0,3}", value, re.ASCII):
            raise FczooError(f"--cluster threads is {quoted(value)}; it must be a whole number from 1 up")
    return tuple((key, value) for key, _, value in pairs)


def parse_executor(word: str) -> str:
    """Return the executor that a word names. Raises FczooError for an unknown one."""
    name = match(word, EXECUTORS)
    if name is None:
        raise FczooError(f"no executor is called {quoted(word)}; {nearest(word, EXECUTORS)}")
    return name


def parse_jobs(value: str | int) -> int:
    """``auto`` -> one a graphics processor or, without any, one a core.

    Raises FczooError for what is no number from 1 to 1024.
    """
    word = str(value).strip()
    if word == "auto":
        import torch
        from loky import cpu_count

        return torch.cuda.device_count() or int(cpu_count())
    if not re.fullmatch(r"[1-9]\d{0,3}", word, re.ASCII) or int(word) > MOST_JOBS:
        raise FczooError(f"--jobs is {quoted(value)}; it must be auto or a number from 1 to {MOST_JOBS}")
    return int(word)
