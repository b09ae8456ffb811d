"""Values that ``fczoo tune`` found, by its file or by the run folder that took them: whose, and how."""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fczoo.core.files import through_json
from fczoo.core.options import flag
from fczoo.core.registry import create_method
from fczoo.federation.settings import Settings
from fczoo.reports.run_folder import About, as_read
from fczoo.reports.runs import filled
from fczoo.reports.words import option_word
from fczoo.runner.tuning import WITHOUT_WEIGHT, read_tuned

log = logging.getLogger("fczoo")
OF_A_RUN = ("methods", "other_settings")  # what a record says of the run, beside what it says of the search


@dataclass(frozen=True)
class Found:
    """What a search found, as a run takes it."""

    values: Mapping[str, Mapping[str, Any]]  # options by method
    searched: Mapping[str, Collection[str]]  # those that may not be others, for a method to count as tuned
    settings: Mapping[str, Any]  # of the search
    effort: Mapping[str, Any]  # as a run folder records it

    def record(
        self, methods: Sequence[str], by_hand: Mapping[str, Mapping[str, Any]], settings: Settings
    ) -> dict[str, Any]:
        """For a run folder: the search, and for which methods its values are taken.

        Not for one of which an option that was searched is given another value by hand. A warning names
        these, methods for which nothing was searched, and settings that were others then.
        """
        known = sorted(self.searched.keys() & methods)
        changed = [name for name in known if self._changed(name, by_hand.get(name, {}), settings)]
        if changed:
            log.warning("--set changes what was searched for %s: not tuned any more", ", ".join(changed))
        if without := sorted(set(methods) - self.values.keys()):
            log.warning("--tuned has no values for %s, which run with their own", ", ".join(without))
        if other := self._other_settings(settings):
            then = ", ".join(f"{flag(name)} {option_word(value)}" for name, value in other.items())
            log.warning("the values of --tuned were found with %s, other than here, and may not fit", then)
        taken = [name for name in known if name not in changed]
        if not taken:
            return {}
        return {**self.effort, "methods": taken, **({"other_settings": other} if other else {})}

    def _changed(self, name: str, by_hand: Mapping[str, Any], settings: Settings) -> bool:
        """Whether an option that was searched has another value than what was found."""
        found = {**settings.method_options(name), **self.values[name]}
        before, after = (create_method(name, settings.dataset, **{**found, **own}) for own in ({}, by_hand))
        return any(getattr(before, option) != getattr(after, option) for option in self.searched[name])

    def _other_settings(self, settings: Settings) -> dict[str, Any]:
        """Settings, as they were in the search, that are others in a run and may call for other values."""
        here = through_json(settings.portable())
        return {k: v for k, v in self.settings.items() if k not in WITHOUT_WEIGHT and here.get(k) != v}


def found_in_file(path: Path) -> Found:
    """Of ``tuned.json``. Raises FczooError when it is missing, changed or of another form."""
    tuned = read_tuned(path)
    return Found(
        values={name: method.values for name, method in tuned.methods.items()},
        searched={name: method.space for name, method in tuned.methods.items()},
        settings=as_read(tuned.settings),
        effort={
            "dataset": tuned.settings["dataset"],
            **tuned.effort,
            "image_steps": tuned.image_steps,
            "scored": tuned.scored,
            **({"weights": tuned.weights} if tuned.weights else {}),
        },
    )


def found_in_run(about: About) -> Found:
    """Of a run folder that was begun with ``--tuned``: all options of such methods count as searched."""
    return Found(
        values=about.methods,
        searched={name: about.methods[name] for name in about.tuned["methods"] if name in about.methods},
        settings={**filled(about.settings), **about.tuned.get("other_settings", {})},
        effort={name: value for name, value in about.tuned.items() if name not in OF_A_RUN},
    )
