"""File ``tuned.json``: the values that ``fczoo tune`` found for each method, and its effort."""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import msgspec

from fczoo.core.errors import FczooError
from fczoo.core.files import Count, Number, read_record, through_json, write_record
from fczoo.core.options import flag
from fczoo.core.registry import METHODS, create_method
from fczoo.federation.settings import Settings
from fczoo.federation.settings_checks import MEASUREMENTS
from fczoo.reports.run_folder import BenchFile, current_settings
from fczoo.reports.runs import with_defaults
from fczoo.reports.text_format import option_word

FORMAT = "fczoo-tuned-1"
TUNED_FILE = "tuned.json"
IRRELEVANT_SETTINGS = {  # settings that do not affect the best values of a method
    *("data_root", "test_per_class", "class_order", "class_order_seed", "partition_seed", "vary"),
    *("device", "deterministic", "together", "cache_queries", *MEASUREMENTS),
}

# fields of the record in ``bench.json`` that describe the run, not the search
RUN_KEYS = ("methods", "other_settings")

log = logging.getLogger("fczoo")


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Effort of the search per method."""

    trials: Count
    tasks: Count  # first tasks of the stream that a trial runs
    held_out: Number  # fraction of each class's training images on which a trial is scored
    # number instead of a fraction, in addition to the images that ``train_per_class`` keeps
    score_per_class: Count | None = None
    seed: Count


class TunedMethod(msgspec.Struct, frozen=True, kw_only=True):
    """Values found for one method."""

    values: dict[str, Any]  # of the best trial
    score: Number  # A_N of the best trial on the held-out images, in %
    default_score: Number  # A_N of the first trial, with default options
    space: dict[str, Any]
    trials: list[dict[str, Any]]  # values and score of each; score 0 and ``error`` of a failed one
    importance: dict[str, Number]  # share of the score's variance that an option explains (fANOVA)
    code: str  # SHA-256 of the modules with which the best values would run
    command: list[str] = []  # of the search; older files lack command and versions
    versions: dict[str, str] = {}  # of libraries during the search, including Optuna


class TunedFile(msgspec.Struct, frozen=True, kw_only=True):
    """Content of ``tuned.json``."""

    settings: dict[str, Any]
    effort: Effort
    # images x epochs x rounds per trial, without exemplars; a mean if clients are sampled
    image_steps: Count
    scored: Count  # training images on which a trial is scored
    weights: str = ""  # SHA-256 of the backbone's weights; older files lack it
    methods: dict[str, TunedMethod]

    def write(self, path: Path) -> None:
        """Write the file; ``read_tuned`` reads it."""
        write_record(path, FORMAT, msgspec.to_builtins(self))


def read_tuned(path: Path) -> TunedFile:
    """Read the file that ``fczoo tune`` wrote.

    Raises FczooError if it is missing, changed or has another format, or if a method in it has an
    option that the installed method lacks.
    """
    content = read_record(path, "file of fczoo tune", TunedFile, FORMAT)
    if not isinstance(content.settings.get("dataset"), str):
        raise FczooError(
            f"{path} is not a valid file of fczoo tune: settings have no dataset; search again"
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


@dataclass(frozen=True)
class TunedValues:
    """Values of a search, for use in a run."""

    values: Mapping[str, Mapping[str, Any]]  # options by method
    # searched options by method; if one has another value, the method does not count as tuned
    searched_options: Mapping[str, Collection[str]]
    settings: Mapping[str, Any]  # settings of the search
    effort: Mapping[str, Any]  # effort of the search, as in a run folder

    def record(
        self,
        methods: Sequence[str],
        user_options: Mapping[str, Mapping[str, Any]],
        settings: Settings,
    ) -> dict[str, Any]:
        """Return the record of the search for a run folder, with the methods that use its values.

        A method is left out if the user sets one of its searched options to another value. Warnings
        name these methods, methods without values, and settings that differed in the search.

        Args:
            methods: Methods of the run.
            user_options: Options set by the user, by method.
            settings: Settings of the run.

        Returns:
            Values for ``bench.json``; empty if no method counts as tuned.
        """
        searched_methods = sorted(self.searched_options.keys() & methods)
        changed_methods = [
            name
            for name in searched_methods
            if self._option_changed(name, user_options.get(name, {}), settings)
        ]
        if changed_methods:
            log.warning(
                "--set changes searched options, so these methods do not count as tuned: %s",
                ", ".join(changed_methods),
            )
        if untuned_methods := sorted(set(methods) - self.values.keys()):
            log.warning(
                "--tuned has no values for these methods, which run with default options: %s",
                ", ".join(untuned_methods),
            )
        if other_settings := self._other_settings(settings):
            differences = ", ".join(
                f"{flag(name)} {option_word(value)}" for name, value in other_settings.items()
            )
            log.warning(
                "the values of --tuned were found with %s, unlike this run, and may not fit",
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

    def _option_changed(
        self, name: str, user_options: Mapping[str, Any], settings: Settings
    ) -> bool:
        """Return whether a searched option has another value than the search found."""
        tuned_options = {**settings.method_options(name), **self.values[name]}
        tuned_method, changed_method = (
            create_method(name, settings.dataset, **{**tuned_options, **changes})
            for changes in ({}, user_options)
        )
        return any(
            getattr(tuned_method, option) != getattr(changed_method, option)
            for option in self.searched_options[name]
        )

    def _other_settings(self, settings: Settings) -> dict[str, Any]:
        """Return settings of the search that differ in a run and may affect the best values."""
        run_settings = with_defaults(through_json(settings.portable()))
        return {
            k: v
            for k, v in self.settings.items()
            if k not in IRRELEVANT_SETTINGS and run_settings.get(k) != v
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
    return tuned_values_of(read_tuned(path))


def tuned_values_of(search_result: TunedFile) -> TunedValues:
    """Return the tuned values of a search.

    Args:
        search_result: Content of ``tuned.json``.
    """
    return TunedValues(
        values={name: method.values for name, method in search_result.methods.items()},
        searched_options={name: method.space for name, method in search_result.methods.items()},
        settings=current_settings(search_result.settings),
        effort={
            "dataset": search_result.settings["dataset"],
            **asdict(search_result.effort),
            "image_steps": search_result.image_steps,
            "scored": search_result.scored,
            **({"weights": search_result.weights} if search_result.weights else {}),
        },
    )


def tuned_values_of_run(bench_file: BenchFile) -> TunedValues:
    """Return the tuned values of a run folder that used ``--tuned``.

    All options of its tuned methods count as searched.

    Args:
        bench_file: Content of ``bench.json``.

    Returns:
        The values and their search.
    """
    return TunedValues(
        values=bench_file.methods,
        searched_options={
            name: bench_file.methods[name]
            for name in bench_file.tuned["methods"]
            if name in bench_file.methods
        },
        settings={
            **with_defaults(bench_file.settings),
            **bench_file.tuned.get("other_settings", {}),
        },
        effort={name: value for name, value in bench_file.tuned.items() if name not in RUN_KEYS},
    )
