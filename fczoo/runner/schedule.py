"""Whether a run is long enough for the learning rates that it takes over."""

import logging
from collections.abc import Iterable

from fczoo.core.method import Method
from fczoo.core.registry import DATASETS
from fczoo.federation.settings import Settings
from fczoo.reports.words import option_word

log = logging.getLogger("fczoo")

ENOUGH = 0.25
"""Part of the steps for which rates were chosen, below which a run is warned of."""


def steps(settings: Settings) -> float:
    """Steps of a client on a class, up to a factor that belongs to the data set."""
    each = DATASETS.get(settings.dataset).official
    images = each.train_per_class if each and each.train_per_class else 1
    kept = min(settings.train_per_class or images, images)
    return settings.rounds * settings.epochs * kept / settings.clients / settings.batch_size


def warn_of_short_schedules(settings: Settings, methods: Iterable[Method]) -> None:
    """Name methods whose rates belong to a schedule with many more steps than they get."""
    schedule = next(reversed(settings.followed), f"data set {settings.dataset}")
    followed = {"protocol": settings.protocol, "as_released": settings.as_released}
    part = steps(settings) / steps(Settings.for_dataset(settings.dataset, **followed))
    for method in methods:
        chosen = {**method.tuned.get(settings.dataset, {}), **settings.method_options(method.name)}
        rates = {k: v for k, v in chosen.items() if k.split("_")[0] == "lr" or k.endswith("lr")}
        taken = [f"{k}={option_word(v)}" for k, v in rates.items() if getattr(method, k) == v]
        if taken and part < ENOUGH:
            log.warning(
                "%s has %s for the schedule of %s, which has %.0f times the steps of this run: "
                "it may hardly learn; see "
                "`fczoo tune --methods %s`, or give more --rounds or --epochs",
                method.name,
                ", ".join(taken),
                schedule,
                1 / part,
                method.name,
            )
