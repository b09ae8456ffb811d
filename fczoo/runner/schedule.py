"""Whether a run is long enough for the learning rates that its methods take over."""

import logging
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from fczoo.core.method import Method
from fczoo.core.registry import DATASETS, PROTOCOLS
from fczoo.federation.settings import Settings
from fczoo.reports.words import option_word

log = logging.getLogger("fczoo")

ENOUGH = 0.25
"""Part of the steps for which rates were chosen, below which a run is warned of."""


class Origin(NamedTuple):
    """The settings for which a rate was chosen, and words for their schedule and source."""

    settings: Settings
    words: str


def images_per_class(settings: Settings) -> int | None:
    """Return the training images per class; None if the settings do not tell."""
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
    options = {**method.tuned.get(settings.dataset, {}), **settings.method_options(method.name)}
    for name, value in options.items():
        is_rate = name.split("_")[0] == "lr" or name.endswith("lr")
        if is_rate and (origin := _origin(method.name, name, value, settings)):
            yield name, value, origin


def _origin(method: str, option: str, value: Any, settings: Settings) -> Origin | None:
    """Return where the protocol or released code of a run has a value from, or its data set."""
    followed = {"protocol": settings.protocol, "as_released": settings.as_released}
    for words, source in reversed(settings.followed.items()):
        stated = source.hyperparameters(method, settings.dataset).get(option)
        if stated:
            return _stated_origin(words, stated, dataset=settings.dataset, **followed)
    return _origin_for_dataset(method, option, value, settings.dataset)


def _origin_for_dataset(method: str, option: str, value: Any, dataset: str) -> Origin | None:
    """Return the origin of a method's own value for a data set: a protocol that states it.

    If no protocol states values on the data set, it is the data set's default schedule.
    """
    protocols = [p for p in map(PROTOCOLS.get, PROTOCOLS.names()) if dataset in p.tuned]
    for protocol in sorted(protocols, key=lambda p: method not in p.proposes):
        stated = protocol.hyperparameters(method, dataset).get(option)
        if stated and stated.has(value):
            words = f"protocol {protocol.name}"
            return _stated_origin(words, stated, dataset=dataset, protocol=protocol.name)
    return None if protocols else Origin(Settings.for_dataset(dataset), f"data set {dataset}")


def _stated_origin(words: str, stated: Any, **own: Any) -> Origin:
    if stated.chosen_for:
        words = f"a search on {stated.chosen_for['dataset']}"
    return Origin(Settings.for_dataset(**(stated.chosen_for or own)), f"{words} ({stated.source})")


def warn_of_short_schedules(settings: Settings, methods: Iterable[Method]) -> None:
    """Name methods whose rates belong to a schedule with many more steps than they get."""
    for method in methods:
        taken: dict[Origin, list[str]] = {}
        for name, value, origin in rate_origins(method, settings):
            if getattr(method, name) == value:
                taken.setdefault(origin, []).append(f"{name}={option_word(value)}")
        for origin, rates in taken.items():
            times = times_the_steps(origin.settings, settings)
            if times and times * ENOUGH > 1:
                log.warning(
                    "%s has %s for the schedule of %s, which has %.0f times the steps%s of this run: "
                    "it may hardly learn; see "
                    "`fczoo tune --methods %s`, or give more --rounds or --epochs",
                    method.name,
                    ", ".join(rates),
                    origin.words,
                    times,
                    "" if origin.settings.dataset == settings.dataset else " per class",
                    method.name,
                )
