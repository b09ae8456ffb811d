"""Settings that have no effect on a method that does not train."""

import logging
from collections.abc import Iterable

from fczoo.core.method import Method
from fczoo.core.options import flag
from fczoo.federation.settings import Settings
from fczoo.reports.words import option_word

log = logging.getLogger("fczoo")

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


def warn_of_unused_settings(settings: Settings, methods: Iterable[Method]) -> None:
    """Name the given settings that methods without training ignore, in one line."""
    names = [method.name for method in methods if not method.training().trained]
    if names and (given := _given(settings)):
        verb = "does" if len(names) == 1 else "do"
        log.warning("%s %s not train: %s no effect", ", ".join(names), verb, _listed(given))


def _given(settings: Settings) -> tuple[str, ...]:
    """Return the settings of the training that differ from those of the data set or protocol."""
    followed = {"protocol": settings.protocol, "as_released": settings.as_released}
    usual = Settings.for_dataset(settings.dataset, **followed)
    changed = [name for name in OF_TRAINING if getattr(settings, name) != getattr(usual, name)]
    return tuple(f"{flag(name)} {option_word(getattr(settings, name))}" for name in changed)


def _listed(given: tuple[str, ...]) -> str:
    return f"{', '.join(given)} {'has' if len(given) == 1 else 'have'}"
