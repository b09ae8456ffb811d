"""Checks of a run's settings that need no data."""

from collections.abc import Collection
from typing import Any

from fczoo.core.errors import FczooError, use_python_names
from fczoo.core.options import flag
from fczoo.core.registry import ATTACKS

PATH_SETTINGS = ("data_root", "backbone", "partition", "start_from")
"""Settings that name files and folders. A run folder stores only their last names, as it may be
shared; ``FCZOO_HOME/begun`` stores their paths, on the machine that began the run.
"""
START_SETTINGS = ("protocol", "as_released", "test_crop", "resize")
"""Settings that a run which starts from a model has as the model's run."""


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


def check_vary(vary: Collection[str], partition: str, class_order: Any) -> None:
    """Raise FczooError where a saved partition or a list of classes leaves nothing to vary."""
    for name, is_fixed, place in (
        ("partition", partition.startswith("file:"), "a saved partition"),
        ("class-order", class_order != "natural", "--class-order's list"),
    ):
        if name in vary and is_fixed:
            raise FczooError(f"--vary {name} has nothing to vary in {place}; leave one out")


def with_start_values(overrides: dict[str, Any], dataset: str | None) -> dict[str, Any]:
    """Return settings with those of the run of the model from which they start, if any."""
    folder = overrides.get("start_from", "none")
    if folder == "none":
        return overrides
    from fczoo.federation.model_record import start_values  # imports numpy

    return {**start_values(folder, dataset, overrides.get("data_root")), **overrides}


def check_start_settings(settings: Any) -> None:
    """Raise FczooError for settings with which no run can start from a kept model."""
    from fczoo.data.stream import DOMAINS  # imports numpy
    from fczoo.federation.model_record import models_of, read_model_record

    path = models_of(settings.start_from)[0]
    record = read_model_record(path)
    run_settings = {**record.settings, "resize": record.resize}
    for name in START_SETTINGS:
        value, run_value = getattr(settings, name), run_settings.get(name)
        if value != run_value:
            raise FczooError(
                f"--start-from continues with {flag(name)} {run_value or 'none'} of its model's run, "
                f"and this one has {value or 'none'}; leave it out"
            )
    for name, is_given in (
        ("tasks domains", DOMAINS in (settings.tasks, run_settings.get("tasks"))),
        ("moving", settings.moving is not None),
        ("task-order own", settings.task_order == "own"),
        ("vary", settings.vary != ("training",)),
    ):
        if is_given:
            raise FczooError(
                f"--start-from does not work with --{name}, here or in the run of {path}: further "
                "tasks have new classes, the same for all; leave one out"
            )


@use_python_names
def check_settings(settings: Any) -> None:
    """Raise FczooError for an unknown name or a wrong value in ``Settings``."""
    from fczoo.aggregators.merge import check_stateless
    from fczoo.data.views import get_augment  # imports torch
    from fczoo.federation.compression import make_compression
    from fczoo.federation.local_rules import make_local_training
    from fczoo.federation.server_optimizers import make_server_optimizer

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
    make_server_optimizer(settings.server_optimizer)
    make_compression(settings.compress)
    if settings.start_from is not None:
        check_start_settings(settings)
