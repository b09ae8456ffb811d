"""Checks of a run's settings that need no data, and the sources of their values."""

from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

from fczoo.core.errors import FczooError, use_python_names
from fczoo.core.files import shorten
from fczoo.core.metrics import all_metrics
from fczoo.core.options import build, flag, quote
from fczoo.core.registry import ATTACKS, DATASETS
from fczoo.data.dataset import released_norm
from fczoo.protocols.registry import sources

PATH_SETTINGS = ("data_root", "backbone", "partition", "start_from", "client_devices")
"""Settings that name files and folders. A run folder stores only their last names, as it may be
shared; ``FCZOO_HOME/begun`` stores their paths, on the machine that began the run.
"""
MEASUREMENTS = ("eval_every", "personal_epochs")
"""Settings that measure more of a run and change nothing else of it; 0 by default."""
LATER_SETTINGS = (
    *(*MEASUREMENTS, "pool", "start_from", "stop_after_tasks", "server_optimizer", "compress"),
    *("base_classes", "ways", "shots", "imbalance", "blurry", "label_noise"),
    *("client_devices", "deadline", "over_select", "resize", "hf_columns"),
)
"""Settings that early versions did not have, and whose default leaves a run as it was."""
START_SETTINGS = ("protocol", "as_released", "test_crop", "resize")
"""Settings that a run which starts from a model has as the model's run."""


def portable(settings: Any) -> dict[str, Any]:
    """Return plain values of settings for ``Settings.portable``.

    Args:
        settings: Settings of a run.
    """
    return {
        k: shorten(v) if k in PATH_SETTINGS else v
        for k, v in asdict(settings).items()
        # records of earlier runs stay the same
        if k not in LATER_SETTINGS or v != getattr(type(settings), k)
    }


Channels = tuple[float, ...] | None


def normalisation_of(settings: Any) -> tuple[Channels, Channels]:
    """Return mean and standard deviation of the input; None for the checkpoint's own.

    Args:
        settings: Settings of a run.

    Raises:
        FczooError: No values are known for the data set.
    """
    if not settings.norm_by_dataset:
        return settings.mean, settings.std
    mean, std = released_norm(settings.dataset)
    return settings.mean or mean, settings.std or std


def locate_data(dataset: str, data_root: str | None, columns: str | None) -> dict[str, Any]:
    """Return the settings that ``locate_dataset`` gives a data set ``hf:``; {} for any other."""
    if not columns and not dataset.lower().startswith("hf:"):
        return {}
    from fczoo.data.hub_files import locate_dataset  # imports Pillow

    name, root = locate_dataset(dataset, data_root, columns)
    return {"dataset": name, "data_root": root, "hf_columns": None}


def check_participation(share: float, clients: int) -> None:
    """Raise FczooError unless ``--participation`` is a part of the clients or a number of them."""
    problem = ""
    if not share:
        problem = "is 0, so no client would train; give a share up to 1 or a number of clients"
    elif share > 1 and share % 1:
        problem = f"is {share:g}; it must be a share up to 1 or a whole number"
    elif share > clients:
        problem = f"{share:g} is more than the {clients} clients at the start; raise --clients"
    if problem:
        raise FczooError(f"--participation {problem}")


def few_shot_tasks(dataset: str, base: int | None, ways: int | None) -> tuple[int, ...]:
    """Return the classes per task of few-shot increments: ``base``, then ``ways`` in each task.

    Raises FczooError if the classes of the data set cannot be divided in this way.
    """
    if base is None or ways is None:
        raise FczooError("--base-classes and --ways only work together; give both")
    classes = DATASETS.get(dataset).classes
    if not classes:
        raise FczooError(
            f"--base-classes needs the number of classes, which {dataset} does not state; give "
            f"--tasks {base},{ways},{ways} and so on"
        )
    increments, remainder = divmod(classes - base, ways)
    if increments < 1 or remainder:
        raise FczooError(
            f"{dataset} has {classes} classes; --base-classes {base} leaves {classes - base}, "
            f"which cannot be divided into tasks of --ways {ways}; change one of the two"
        )
    return (base, *[ways] * increments)


def check_stream(s: Any) -> None:
    """Raise FczooError for settings of the stream that contradict each other."""
    if s.base_classes is not None or s.ways is not None:
        sizes = few_shot_tasks(s.dataset, s.base_classes, s.ways)
        if s.tasks != sizes:
            raise FczooError(
                f"--base-classes {s.base_classes} and --ways {s.ways} make {len(sizes)} tasks, "
                f"unlike --tasks {quote(s.tasks)}; leave out --tasks"
            )
    domains = s.tasks == "domains"
    for first, second, is_both, reason in (
        ("shots", "imbalance", s.shots and s.imbalance, "both state the images per class"),
        ("shots", "blurry", s.shots and s.blurry, "later tasks have only the images of --shots"),
        ("shots", "tasks domains", s.shots and domains, "every domain has all classes"),
        ("blurry", "tasks domains", s.blurry and domains, "domains have sharp boundaries"),
    ):
        if is_both:
            raise FczooError(f"--{first} does not work with --{second}: {reason}; leave one out")


def check_devices(s: Any) -> None:
    """Raise FczooError if options of the virtual clock do not fit each other or the run."""
    for name in ("deadline", "over_select"):
        if getattr(s, name) is not None and s.client_devices is None:
            raise FczooError(f"{flag(name)} needs the virtual clock; give --client-devices, too")
    if s.over_select is not None and s.participant_count(s.clients) == s.clients:
        raise FczooError(
            "--over-select samples more clients than participate, but --participation "
            f"{s.participation:g} already samples all; lower --participation"
        )
    if s.client_devices is not None:
        from fczoo.federation.client_devices import read_devices  # imports torch

        read_devices(s.client_devices, 0)
        if s.dp_subsampling:
            raise FczooError(
                "--dp-subsampling needs the same sampling probability for all clients, but "
                "--client-devices makes some less available; leave one out"
            )


def check_vary(vary: Collection[str], partition: str, class_order: Any) -> None:
    """Raise FczooError if a saved partition or a list of classes leaves nothing to vary."""
    for name, is_fixed, reason in (
        ("partition", partition.startswith("file:"), "--partition is a file"),
        ("class-order", class_order != "natural", "--class-order is a list"),
    ):
        if name in vary and is_fixed:
            raise FczooError(f"--vary {name} has no effect, because {reason}; leave one out")


def with_start_values(overrides: dict[str, Any], dataset: str | None) -> dict[str, Any]:
    """Add the settings of the start model's run, if any; ``overrides`` take precedence."""
    folder = overrides.get("start_from", "none")
    if folder == "none":
        return overrides
    from fczoo.federation.model_record import start_values  # imports numpy

    return {**start_values(folder, dataset, overrides.get("data_root")), **overrides}


def check_start_settings(settings: Any) -> None:
    """Raise FczooError for settings that do not allow a start from a kept model."""
    from fczoo.data.stream import DOMAINS  # imports numpy
    from fczoo.data.stream_variants import VARIANTS
    from fczoo.federation.model_record import models_of, read_model_record

    path = models_of(settings.start_from)[0]
    record = read_model_record(path)
    run_settings = {**record.settings, "resize": record.resize}
    for name in START_SETTINGS:
        value, run_value = getattr(settings, name), run_settings.get(name)
        if value != run_value:
            raise FczooError(
                f"--start-from needs {flag(name)} {run_value or 'none'}, as in the run of the "
                f"model, not {value or 'none'}; without {flag(name)} the run takes the value of "
                "the model"
            )
    for name, is_given in (
        *((flag(n)[2:], getattr(settings, n) or run_settings.get(n)) for n in VARIANTS),
        ("tasks domains", DOMAINS in (settings.tasks, run_settings.get("tasks"))),
        ("moving", settings.moving is not None),
        ("task-order own", settings.task_order == "own"),
        ("vary", settings.vary != ("training",)),
    ):
        if is_given:
            raise FczooError(
                f"--start-from does not work with --{name}, in this run or the run of {path}: "
                "further tasks need new classes, the same for all clients; leave one out"
            )


def settings_for(settings: Any, dataset: str | None, changes: Mapping[str, Any]) -> Any:
    """Return an instance of the class ``settings`` for ``Settings.for_dataset``.

    Args:
        settings: The class ``Settings``.
        dataset: Name of the data set; None: that of a kept model.
        changes: Values other than the defaults, by setting.
    """
    overrides = {k: v for k, v in changes.items() if v is not None}
    dataset = overrides.pop("dataset", dataset)
    texts = [overrides.get(name, "none") for name in ("data_root", "hf_columns")]
    root, columns = (None if text == "none" else text for text in texts)
    placed = locate_data(dataset or "", root, columns)
    dataset = placed.pop("dataset", dataset)
    overrides = {k: v for k, v in {**overrides, **placed}.items() if v is not None}
    overrides = with_start_values(overrides, dataset)
    entry = DATASETS.get(overrides.pop("dataset", dataset) or "digits")
    defaults = {"dataset": entry.name, **asdict(entry.defaults)}
    origins = sources(overrides.get("protocol"), overrides.get("as_released")).values()
    for source in origins:
        source.check_names(frozenset(settings.__dataclass_fields__))
    statements = {k: v for source in origins for k, v in source.settings_on(entry.name).items()}
    if "class_order" in overrides:
        statements.pop("class_order_seed", None)
    few_shot = [str(overrides.get(name, "none")) for name in ("base_classes", "ways")]
    if "tasks" not in overrides and all(map(str.isdecimal, few_shot)):
        overrides["tasks"] = few_shot_tasks(entry.name, *map(int, few_shot))
    plain = {k: v.value for k, v in statements.items() if not v.depends_on_tasks}
    tasks = build(settings, "bench", {**defaults, **plain, **overrides}, flag).task_count
    values = {k: v.value_for(tasks) for k, v in statements.items()}
    return build(settings, "bench", {**defaults, **values, **overrides}, flag)


@use_python_names
def check_settings(settings: Any) -> None:
    """Raise FczooError for an unknown name or a wrong value in ``Settings``."""
    from fczoo.aggregators.merge import check_stateless
    from fczoo.data.client_stages import uses_stages  # imports numpy
    from fczoo.data.views import get_augment  # imports torch
    from fczoo.federation.compression import make_compression
    from fczoo.federation.local_rules import make_local_training
    from fczoo.federation.server_optimizers import make_server_optimizer

    if settings.min_clients > settings.clients:
        clients = f"the {settings.clients} clients at the start"
        problem = f"--min-clients {settings.min_clients} is more than {clients}"
        raise FczooError(f"{problem}, so every run would stop; lower it or raise --clients")
    if settings.stop_after_tasks and uses_stages(settings.moving, settings.task_order):
        raise FczooError(
            "--stop-after-tasks does not work with --moving or --task-order own, whose clients are "
            "in different tasks at the same time; leave one out"
        )
    _ = settings.partitioner, normalisation_of(settings)
    get_augment(settings.augment)
    all_metrics([[50.0]], [1])  # a plug-in's that fails should do so before the run
    if settings.aggregator is not None:
        check_stateless(settings.aggregator)
    if settings.attack is not None:
        ATTACKS.create(settings.attack)
    make_local_training(settings.local)
    make_server_optimizer(settings.server_optimizer)
    make_compression(settings.compress)
    check_devices(settings)
    if settings.start_from is not None:
        check_start_settings(settings)
