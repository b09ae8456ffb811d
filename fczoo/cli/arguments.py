"""Words of the command line, read."""

import click

from fczoo.core.errors import FczooError


def words(_: click.Context, __: click.Parameter, value: str | None) -> list[str]:
    """A comma-separated list."""
    return [w.strip() for w in (value or "").split(",") if w.strip()]


def specs(value: str | None) -> list[str]:
    """A comma-separated list of NAME:FIELD=VALUE,FIELD=VALUE: a word that only sets a field belongs to the one before it."""
    found: list[str] = []
    for word in (value or "").split(","):
        if found and "=" in word and ":" not in word.partition("=")[0]:
            found[-1] += f",{word}"
        elif word.strip():
            found.append(word.strip())
    return list(dict.fromkeys(found))


def parse_changes(changes: tuple[str, ...]) -> dict[str, dict[str, str]]:
    """``hgp.lr=0.1`` -> {"hgp": {"lr": "0.1"}}. Raises FczooError for another form."""
    out: dict[str, dict[str, str]] = {}
    for change in changes:
        place, sign, value = change.partition("=")
        method, dot, field = place.partition(".")
        if not (sign and dot and method and field):
            raise FczooError(f"cannot read --set {change!r}; write METHOD.FIELD=VALUE, e.g. hgp.lr=0.001")
        out.setdefault(method, {})[field] = value
    return out


def parse_seeds(seeds: list[str]) -> list[int]:
    """Distinct whole numbers from 0 up. Raises FczooError otherwise."""
    seeds = seeds or ["0"]
    if not all(s.isdecimal() for s in seeds) or len(set(seeds)) < len(seeds):
        raise FczooError(f"--seeds is {','.join(seeds)!r}; give distinct whole numbers such as 0,1,2")
    return [int(s) for s in seeds]
