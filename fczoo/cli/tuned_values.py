"""Values that ``fczoo tune`` found, read from its file or from a run folder that used them."""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fczoo.core.files import through_json
from fczoo.core.options import flag
from fczoo.core.registry import create_method
from fczoo.federation.settings import Settings
from fczoo.reports.run_folder import About, current_settings
from fczoo.reports.runs import with_defaults
from fczoo.reports.text_format import option_word
from fczoo.runner.tune.tuned_file import WITHOUT_WEIGHT, read_tuned

log = logging.getLogger("fczoo")
# keys of a record that describe the run and not the search
RUN_KEYS = ("methods", "other_settings")


@dataclass(frozen=True)
class TunedValues:
    """Values of a search, for use in a run."""

    values: Mapping[str, Mapping[str, Any]]  # options by method
    # searched options by method; with other values it does not count as tuned
    searched_options: Mapping[str, Collection[str]]
    settings: Mapping[str, Any]  # settings of the search
    effort: Mapping[str, Any]  # effort of the search, as in a run folder

    def record(
        self, methods: Sequence[str], by_hand: Mapping[str, Mapping[str, Any]], settings: Settings
    ) -> dict[str, Any]:
        """Return the search for a run folder, and the methods whose values are used.

        A method is left out if one of its searched options has another value by hand. A warning
        names these methods, methods for which nothing was searched, and settings that differed in
        the search.

        Args:
            methods: Methods of the run.
            by_hand: Options given by hand, by method.
            settings: Settings of the run.

        Returns:
            Values for ``bench.json``; empty if no method counts as tuned.
        """
        searched_methods = sorted(self.searched_options.keys() & methods)
        changed_methods = [
            name
            for name in searched_methods
            if self._option_changed(name, by_hand.get(name, {}), settings)
        ]
        if changed_methods:
            log.warning(
                "--set changes searched options of %s, which no longer count as tuned",
                ", ".join(changed_methods),
            )
        if untuned_methods := sorted(set(methods) - self.values.keys()):
            log.warning(
                "--tuned has no values for %s, which run with their default options",
                ", ".join(untuned_methods),
            )
        if other_settings := self._other_settings(settings):
            differences = ", ".join(
                f"{flag(name)} {option_word(value)}" for name, value in other_settings.items()
            )
            log.warning(
                "the values of --tuned were found with %s, other than here, and may not fit",
                differences,
            )
        tuned_methods = [name for name in searched_methods if name not in changed_methods]
        if not tuned_methods:
            return {}
        return {
            **self.effort,
            "methods": tuned_methods,
            **({"other_settings": other_settings} if other_settings else {}),
        }

    def _option_changed(self, name: str, by_hand: Mapping[str, Any], settings: Settings) -> bool:
        """Return whether a searched option has another value than the search found."""
        tuned_options = {**settings.method_options(name), **self.values[name]}
        tuned_method, changed_method = (
            create_method(name, settings.dataset, **{**tuned_options, **changes})
            for changes in ({}, by_hand)
        )
        return any(
            getattr(tuned_method, option) != getattr(changed_method, option)
            for option in self.searched_options[name]
        )

    def _other_settings(self, settings: Settings) -> dict[str, Any]:
        """Return settings of the search that differ in a run and may need other values."""
        run_settings = through_json(settings.portable())
        return {
            k: v
            for k, v in self.settings.items()
            if k not in WITHOUT_WEIGHT and run_settings.get(k) != v
        }


def read_tuned_values(path: Path) -> TunedValues:
    """Read the tuned values of ``tuned.json``.

    Args:
        path: The file.

    Returns:
        The values and their search.

    Raises:
        FczooError: The file is missing, changed or invalid.
    """
    search_result = read_tuned(path)
    return TunedValues(
        values={name: method.values for name, method in search_result.methods.items()},
        searched_options={name: method.space for name, method in search_result.methods.items()},
        settings=current_settings(search_result.settings),
        effort={
            "dataset": search_result.settings["dataset"],
            **search_result.effort,
            "image_steps": search_result.image_steps,
            "scored": search_result.scored,
            **({"weights": search_result.weights} if search_result.weights else {}),
        },
    )


def tuned_values_of_run(about: About) -> TunedValues:
    """Return the tuned values of a run folder made with ``--tuned``.

    All options of these methods count as searched.

    Args:
        about: Content of ``bench.json``.

    Returns:
        The values and their search.
    """
    return TunedValues(
        values=about.methods,
        searched_options={
            name: about.methods[name] for name in about.tuned["methods"] if name in about.methods
        },
        settings={**with_defaults(about.settings), **about.tuned.get("other_settings", {})},
        effort={name: value for name, value in about.tuned.items() if name not in RUN_KEYS},
    )
