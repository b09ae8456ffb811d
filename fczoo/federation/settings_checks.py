"""Checks of a run's settings that need no data."""

from typing import Any

from fczoo.core.errors import FczooError
from fczoo.core.registry import ATTACKS


def check_participation(share: float, clients: int) -> None:
    """Raise FczooError unless ``--participation`` is a part of the clients or a number of them."""
    problem = ""
    if not share:
        problem = "is 0, so no one would train; give a part up to 1 or a number"
    elif share > 1 and share % 1:
        problem = f"is {share:g}; it must be a part up to 1 or a whole number"
    elif share > clients:
        there_are = f"the {clients} clients at the start"
        problem = f"{share:g} asks for more than {there_are}; raise --clients"
    if problem:
        raise FczooError(f"--participation {problem}")


def check_settings(settings: Any) -> None:
    """Raise FczooError for an unknown name or a wrong value in ``Settings``."""
    from fczoo.aggregators.merge import check_stateless
    from fczoo.data.views import get_augment  # imports torch
    from fczoo.federation.local_rules import make_local_training

    if settings.min_clients > settings.clients:
        clients = f"the {settings.clients} clients at the start"
        problem = f"--min-clients {settings.min_clients} is more than {clients}"
        raise FczooError(f"{problem}, so every run would stop; lower it or raise --clients")
    _ = settings.partitioner, settings.normalisation
    get_augment(settings.augment)
    if settings.aggregator is not None:
        check_stateless(settings.aggregator)
    if settings.attack is not None:
        ATTACKS.create(settings.attack)
    make_local_training(settings.local)
