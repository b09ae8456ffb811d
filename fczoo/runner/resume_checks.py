"""Checks before a run folder is resumed: same configuration, same code."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fczoo.core.errors import FczooError
from fczoo.core.names import join_first_names
from fczoo.federation.environment import file_of

MUTABLE_KEYS = (
    "command",
    "earlier_commands",
    "started",
    "hardware",
    "settings.min_clients",
    "settings.data_root",  # the data's own hash is compared
    "data.remarks",
    "code",  # compared by check_code
    "changed_code",
    "keep",
    "warnings",
)  # parts of bench.json that may change when a run resumes


def check_same(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise FczooError that names the differences if ``bench.json`` has another configuration."""
    old, new = _flatten(before), _flatten(now)
    differences = [
        k
        for k in old.keys() | new.keys()
        if old.get(k) != new.get(k) and not k.startswith(MUTABLE_KEYS)
    ]
    if differences:
        # settings first, since their values explain more than hashes
        differences.sort(key=lambda name: ("sha256" in name, name))

        def describe(tree: Mapping[str, Any], name: str) -> str:
            value = str(tree.get(name, "missing"))
            return value[:8] if "sha256" in name else value

        texts = [f"{k} was {describe(old, k)}, is {describe(new, k)}" for k in differences]
        listing = join_first_names(texts, 4, "; ")
        listing = " ".join(listing.split())  # values from the file may have line breaks
        raise FczooError(
            f"output folder {folder} is already in use by another configuration: {listing}"
            "; give another with --out"
        )


def check_code(
    folder: Path, before: Mapping[str, Any], now: Mapping[str, Any], accept: bool
) -> list[str]:
    """Return modules whose source differs from that of the folder's first runs.

    Raises FczooError, which names their files, unless ``accept`` is true.
    """
    old_hashes = before.get("code", {})
    changed_modules = [
        name for name, sha256 in now["code"].items() if old_hashes.get(name, sha256) != sha256
    ]
    if changed_modules and not accept:
        files = join_first_names([str(file_of(name) or name) for name in changed_modules], 3)
        raise FczooError(
            f"the runs in {folder} were started with other code: {files}; give another "
            "folder with --out, or --accept-changed-code to resume all the same"
        )
    return changed_modules


def last_run(results: Path) -> Path:
    """Return the newest run folder in ``results`` that has a default name.

    Raises FczooError if there is none.
    """
    runs = sorted(
        results / p.relative_to(results).parts[0] for p in results.glob("run-*/**/bench.json")
    )
    if not runs:
        raise FczooError(f"no run to resume in {results}; name its folder with --out")
    return runs[-1]


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in tree.items():
        out |= (
            _flatten(value, f"{prefix}{key}.")
            if isinstance(value, dict)
            else {f"{prefix}{key}": value}
        )
    return out
