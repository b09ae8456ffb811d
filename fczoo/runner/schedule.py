"""Warnings for schedules that are too short for a method's learning rates."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from fczoo.core.method import Method
from fczoo.core.options import flag
from fczoo.core.registry import DATASETS
from fczoo.federation.settings import Settings
from fczoo.protocols.registry import PROTOCOLS
from fczoo.protocols.statements import Statement
from fczoo.reports.text_format import option_word
from fczoo.security.privacy import has_class_counts

log = logging.getLogger("fczoo")


ENOUGH = 0.25
"""Part of the steps for which rates were chosen, below which a run is warned of."""


class Origin(NamedTuple):
    """The settings for which a rate was chosen, and words for their schedule and source."""

    settings: Settings
    words: str


def images_per_class(settings: Settings) -> int | None:
    """Return the training images per class; None if the settings do not give it."""
    official = DATASETS.get(settings.dataset).official
    limits = settings.train_per_class, official.train_per_class if official else None
    return min(filter(None, limits), default=None)


def steps_per_image(settings: Settings) -> float:
    """Return a client's steps for each image per class."""
    return settings.rounds * settings.epochs / settings.clients / settings.batch_size


def steps(settings: Settings) -> float:
    """Return a client's steps per class; of an unknown number of images, those of one image."""
    return steps_per_image(settings) * (images_per_class(settings) or 1)


def times_the_steps(chosen: Settings, settings: Settings) -> float | None:
    """Return by how much ``chosen`` has more steps per class than ``settings``.

    Where a number of images is unknown, one data set counts as having as many in both; two data
    sets are not compared (None).
    """
    if images_per_class(chosen) and images_per_class(settings):
        return steps(chosen) / steps(settings)
    if chosen.dataset == settings.dataset:
        return steps_per_image(chosen) / steps_per_image(settings)
    return None


def rate_origins(method: Method, settings: Settings) -> Iterator[tuple[str, Any, Origin]]:
    """Yield the learning rates that are not a method's defaults, with value and known origin."""
    options = {
        **method.dataset_options.get(settings.dataset, {}),
        **settings.method_options(method.name),
    }
    for name, value in options.items():
        is_rate = name.split("_")[0] == "lr" or name.endswith("lr")
        if is_rate and (origin := _origin(method.name, name, value, settings)):
            yield name, value, origin


def _origin(method: str, option: str, value: Any, settings: Settings) -> Origin | None:
    """Return where the protocol or released code of a run has a value from, or its data set."""
    source_names = {"protocol": settings.protocol, "as_released": settings.as_released}
    for words, source in reversed(settings.sources.items()):
        choice = source.hyperparameters(method, settings.dataset).get(option)
        if choice:
            return _stated_origin(words, choice, dataset=settings.dataset, **source_names)
    return origin_for_dataset(method, option, value, settings.dataset)


def origin_for_dataset(method: str, option: str, value: Any, dataset: str) -> Origin | None:
    """Return the origin of a method's own value for a data set: a protocol that states it.

    If no protocol states values on the data set, it is the data set's default schedule.
    """
    protocols = [p for p in map(PROTOCOLS.get, PROTOCOLS.names()) if dataset in p.dataset_options]
    for protocol in sorted(protocols, key=lambda p: method not in p.proposes):
        choice = protocol.hyperparameters(method, dataset).get(option)
        if choice and value in choice.columns:
            words = f"protocol {protocol.name}"
            return _stated_origin(words, choice, dataset=dataset, protocol=protocol.name)
    return None if protocols else Origin(Settings.for_dataset(dataset), f"data set {dataset}")


def _stated_origin(words: str, stated: Statement, **own: Any) -> Origin:
    if stated.chosen_for:
        words = f"a search on {stated.chosen_for['dataset']}"
    return Origin(Settings.for_dataset(**(stated.chosen_for or own)), f"{words} ({stated.source})")


def warn_of_short_schedules(settings: Settings, methods: Iterable[Method]) -> None:
    """Name methods whose rates belong to a schedule with many more steps than they get."""
    for method in methods:
        rates_by_origin: dict[Origin, list[str]] = {}
        for name, value, origin in rate_origins(method, settings):
            if getattr(method, name) == value:
                rates_by_origin.setdefault(origin, []).append(f"{name}={option_word(value)}")
        for origin, rates in rates_by_origin.items():
            times = times_the_steps(origin.settings, settings)
            if times and times * ENOUGH > 1:
                log.warning(
                    "%s has %s for the schedule of %s, which has %.0f times the steps%s of this "
                    "run: "
                    "it may hardly learn; see "
                    "`fczoo tune --methods %s`, or give more --rounds or --epochs",
                    method.name,
                    ", ".join(rates),
                    origin.words,
                    times,
                    "" if origin.settings.dataset == settings.dataset else " per class",
                    method.name,
                )


OF_TRAINING = (
    "rounds",
    "epochs",
    "batch_size",
    "augment",
    "cache_queries",
    "participation",
    "draw_among",
    "client_draw",
    "drop_rate",
    "aggregator",
)


def warn_of_unused_settings(settings: Settings, methods: Sequence[Method]) -> None:
    """Warn of settings that methods ignore: one line on training, one on class statistics."""
    without_counts = [
        method.name for method in methods if not has_class_counts(method.training().uploads)
    ]
    if settings.min_class_count > 1 and without_counts:
        verb = "uploads" if len(without_counts) == 1 else "upload"
        count = settings.min_class_count
        log.warning(
            "%s %s no counts of classes: --min-class-count %d has no effect",
            ", ".join(without_counts),
            verb,
            count,
        )
    names = [method.name for method in methods if not method.training().trained_prefixes]
    if names and (flags := _ignored_settings(settings)):
        verb = "does" if len(names) == 1 else "do"
        log.warning("%s %s not train: %s no effect", ", ".join(names), verb, _list_with_verb(flags))


def _ignored_settings(settings: Settings) -> tuple[str, ...]:
    """Return the settings of the training that differ from those of the data set or protocol."""
    source_names = {"protocol": settings.protocol, "as_released": settings.as_released}
    usual = Settings.for_dataset(settings.dataset, **source_names)
    differences = [name for name in OF_TRAINING if getattr(settings, name) != getattr(usual, name)]
    return tuple(f"{flag(name)} {option_word(getattr(settings, name))}" for name in differences)


def _list_with_verb(given: tuple[str, ...]) -> str:
    return f"{', '.join(given)} {'has' if len(given) == 1 else 'have'}"
