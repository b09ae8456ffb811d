"""``tuned.json``: what ``fczoo tune`` found for each method, and with how much effort."""

from dataclasses import fields
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import msgspec

from fczoo.core.errors import FczooError
from fczoo.core.files import Count, Number, read_record, write_record
from fczoo.core.registry import METHODS
from fczoo.federation.settings import MEASUREMENTS

FORMAT = "fczoo-tuned-1"
TUNED = "tuned.json"
WITHOUT_WEIGHT = {  # settings of which the best values of a method do not depend
    *("data_root", "test_per_class", "class_order", "class_order_seed", "partition_seed", "vary"),
    *("device", "deterministic", "together", "cache_queries", *MEASUREMENTS),
}


class Spent(TypedDict):
    """``Effort``, as it is in a file."""

    trials: Count
    tasks: Count
    held_out: Number
    score_per_class: NotRequired[Count | None]
    seed: Count


class TunedMethod(msgspec.Struct, frozen=True, kw_only=True):
    """Values found for one method."""

    values: dict[str, Any]  # of the best trial
    score: Number  # its A_N on the images held out, %
    default_score: Number  # that of the method with default options, the first trial
    space: dict[str, Any]
    trials: list[dict[str, Any]]  # values and score of each; 0 and the reason where a run failed
    importance: dict[str, Number]  # share of the score's variance that an option explains (fANOVA)
    code: str  # SHA-256 of the modules that took part, as in the versions of a run
    command: list[str] = []  # that searched; older files lack it, and versions
    versions: dict[str, str] = {}  # of libraries then, Optuna among them


class TunedFile(msgspec.Struct, frozen=True, kw_only=True):
    """``tuned.json``."""

    settings: dict[str, Any]
    effort: Spent
    image_steps: (
        Count  # images of a trial's tasks, times rounds and epochs; a mean where clients are drawn.
    )
    # What a method trains on as well, exemplars or the images of earlier tasks, comes on top.
    scored: Count  # training images on which a trial is scored
    weights: str = ""  # SHA-256 of the backbone's; older files lack it
    methods: dict[str, TunedMethod]

    def write(self, path: Path) -> None:
        """Write the file that ``read_tuned`` reads."""
        write_record(path, FORMAT, msgspec.to_builtins(self))


def read_tuned(path: Path) -> TunedFile:
    """Read the file that ``fczoo tune`` wrote.

    Raises FczooError when it is missing, changed or of another form, and where a method of it was
    searched for an option that the method here does not have.
    """
    content = read_record(path, "file of fczoo tune", TunedFile, FORMAT)
    if not isinstance(content.settings.get("dataset"), str):
        raise FczooError(
            f"{path} is not a valid file of fczoo tune: settings name no dataset; search again"
        )
    for name in sorted(content.methods.keys() & METHODS.names()):
        method, option_names = (
            content.methods[name],
            {field.name for field in fields(METHODS.get(name))},
        )
        if unknown := sorted((method.space.keys() | method.values.keys()) - option_names):
            problem = (
                f"{path} has values of {name}.{unknown[0]}, an option that {name} does not have"
            )
            raise FczooError(f"{problem}; search again with fczoo tune and another --out")
    return content
