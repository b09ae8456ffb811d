"""Warnings of schedules that are too short for their learning rates, and of unused settings."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fczoo.core.files import shorten
from fczoo.core.options import flag
from fczoo.core.registry import DATASETS
from fczoo.federation.settings import Settings
from fczoo.protocols.registry import PROTOCOLS
from fczoo.protocols.stated_values import Statement
from fczoo.reports.run_config import DATASET, GIVEN, RunConfig, protocol_of_value
from fczoo.reports.text_format import option_word
from fczoo.security.privacy import has_class_counts

log = logging.getLogger("fczoo")


MIN_STEP_FRACTION = 0.25
"""Smallest part of the steps for which rates were chosen that a run can have without warning."""


def images_per_class(settings: Settings) -> int | None:
    """Return the number of training images per class; None if the settings do not determine it."""
    official = DATASETS.get(settings.dataset).official
    limits = settings.train_per_class, official.train_per_class if official else None
    return min(filter(None, limits), default=None)


def steps_per_image(settings: Settings) -> float:
    """Return a client's number of steps per training image of a class."""
    return settings.rounds * settings.epochs / settings.clients / settings.batch_size


def steps(settings: Settings) -> float:
    """Return a client's number of steps per class; if the images are unknown, those for one."""
    return steps_per_image(settings) * (images_per_class(settings) or 1)


def step_factor(chosen: Settings, settings: Settings) -> float | None:
    """Return the steps per class of ``chosen`` divided by those of ``settings``.

    If a number of images is unknown, the same data set is assumed to have as many in both, and two
    different data sets are not compared: the ratio is None.
    """
    if images_per_class(chosen) and images_per_class(settings):
        return steps(chosen) / steps(settings)
    if chosen.dataset == settings.dataset:
        return steps_per_image(chosen) / steps_per_image(settings)
    return None


def _dataset_value_schedule(
    method: str, option: str, value: Any, dataset: str
) -> tuple[Settings, str] | None:
    """Return the schedule for which a method's value for a data set was chosen, and its source.

    It is the schedule of a protocol that states the value. If no protocol has values for the data
    set, it is the data set's default schedule; otherwise None.
    """
    if stated := protocol_of_value(method, option, value, dataset):
        protocol, statement = stated
        name = protocol.name
        return _stated_schedule(f"protocol {name}", statement, dataset, protocol=name)
    if any(dataset in PROTOCOLS.get(name).dataset_options for name in PROTOCOLS.names()):
        return None
    return Settings.for_dataset(dataset), f"data set {dataset}"


def _stated_schedule(
    origin: str, statement: Statement, dataset: str, **sources: Any
) -> tuple[Settings, str]:
    """Return the schedule for which a protocol or released code chose a value, and its source."""
    settings: Mapping[str, Any] = {"dataset": dataset, **sources}
    if statement.chosen_for:
        settings = statement.chosen_for
        origin = f"a search on {settings['dataset']}"
    return Settings.for_dataset(**settings), f"{origin} ({statement.source})"


def _rate_schedule(config: RunConfig, option: str) -> tuple[Settings, str] | None:
    """Return the schedule for which a learning rate was chosen, and its source; None if unknown."""
    method, settings, origin = config.method, config.settings, config.option_origins[option]
    if origin == DATASET:
        return _dataset_value_schedule(method, option, config.options[option], settings.dataset)
    if origin not in settings.sources:
        return None
    statement = settings.sources[origin].hyperparameters(method, settings.dataset)[option]
    sources = {"protocol": settings.protocol, "as_released": settings.as_released}
    return _stated_schedule(origin, statement, settings.dataset, **sources)


def warn_of_short_schedules(configs: Iterable[RunConfig]) -> None:
    """Warn of methods whose learning rates were chosen for schedules with many more steps."""
    for config in {config.method: config for config in configs}.values():
        method, settings = config.method, config.settings
        rates_by_schedule: dict[tuple[Settings, str], list[str]] = {}
        for name, value in config.options.items():
            is_rate = name.split("_")[0] == "lr" or name.endswith("lr")
            if is_rate and (schedule := _rate_schedule(config, name)):
                rates_by_schedule.setdefault(schedule, []).append(f"{name}={option_word(value)}")
        for (chosen, source), rates in rates_by_schedule.items():
            times = step_factor(chosen, settings)
            if times and times * MIN_STEP_FRACTION > 1:
                log.warning(
                    "%s may learn little with %s, chosen for the schedule of %s, which has %.0f "
                    "times as many steps%s as this run; search with `fczoo tune --methods %s`, or "
                    "give more --rounds or --epochs",
                    method,
                    ", ".join(rates),
                    source,
                    times,
                    "" if chosen.dataset == settings.dataset else " per class",
                    method,
                )


TRAINING_SETTINGS = (
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


def warn_of_unused_settings(configs: Sequence[RunConfig]) -> None:
    """Warn of settings that have no effect: a line each on data, class statistics and training.

    Args:
        configs: Runs with the same settings.
    """
    settings = configs[0].settings
    dataset = DATASETS.get(settings.dataset)
    if settings.root and not settings.root.is_dir() and not (dataset.source or dataset.folder):
        log.warning(
            "%s needs no data folder: --data-root %s, which %s, has no effect",
            settings.dataset,
            shorten(settings.data_root),  # a shared run folder stores the warning
            "is not a folder" if settings.root.exists() else "does not exist",
        )
    declarations = {config.method: config.create_method().training() for config in configs}
    without_counts = [
        name for name, training in declarations.items() if not has_class_counts(training.uploads)
    ]
    if settings.min_class_count > 1 and without_counts:
        verb = "uploads" if len(without_counts) == 1 else "upload"
        count = settings.min_class_count
        log.warning(
            "%s %s no class counts: --min-class-count %d has no effect",
            ", ".join(without_counts),
            verb,
            count,
        )
    names = [name for name, training in declarations.items() if not training.trained_prefixes]
    origins = configs[0].setting_origins
    flags = [
        f"{flag(name)} {option_word(getattr(settings, name))}"
        for name in TRAINING_SETTINGS
        if origins[name] == GIVEN
    ]
    if names and flags:
        verb = "does" if len(names) == 1 else "do"
        log.warning("%s %s not train: %s no effect", ", ".join(names), verb, _list_with_verb(flags))


def _list_with_verb(flags: Sequence[str]) -> str:
    return f"{', '.join(flags)} {'has' if len(flags) == 1 else 'have'}"
