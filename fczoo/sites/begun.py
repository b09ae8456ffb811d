"""What the server keeps of a run that is under way, so that another process goes on where one ended."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from fczoo.core.errors import FczooError
from fczoo.core.files import read_json, typed, write_json
from fczoo.federation.checkpoint import Checkpoint
from fczoo.sites.messages import Enrolment
from fczoo.sites.terms import check_terms

BEGUN, CHECKPOINT = "begun.json", "checkpoint.safetensors"


class Begun(msgspec.Struct):
    """What a run began with."""

    run: str  # its name
    terms: dict[str, Any]  # see ``terms_of``
    enrolments: list[Enrolment]


class Beginning:
    """A server's folder: the last round's checkpoint, and what the run that it is of began with."""

    def __init__(self, folder: Path):
        self.path = folder / BEGUN
        self.checkpoint = Checkpoint(folder / CHECKPOINT)

    def run(self, terms: Mapping[str, Any]) -> str | None:
        """Name of the run that goes on; None: no round of one is done.

        Raises FczooError where it began with other terms.
        """
        if not self.checkpoint.path.exists():
            return None
        begun = self._read()
        try:
            check_terms(terms, begun.terms, "in the run that goes on")
        except FczooError as error:
            raise FczooError(f"{error}, or {self._anew}") from error
        return begun.run

    def enrolled(self, names: Sequence[str], begun: Begun, goes_on: bool) -> None:
        """Note what a run began with; for one that goes on, see that its sites are as they were.

        Raises FczooError where one is not.
        """
        if not goes_on:
            write_json(self.path, msgspec.to_builtins(begun))
            return
        for name, before, now in zip(names, self._read().enrolments, begun.enrolments, strict=True):
            if before != now:
                problem = f"site {name} has other images than when the run began"
                raise FczooError(f"{problem}; bring them back, or {self._anew}")

    @property
    def _anew(self) -> str:
        return f"remove {self.checkpoint.path} to begin anew"

    def _read(self) -> Begun:
        try:
            return typed(read_json(self.path, "beginning of a run"), Begun)
        except ValueError as error:
            raise FczooError(f"{self.path} is no beginning of a run: {error}; {self._anew}") from error
