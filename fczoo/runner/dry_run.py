"""Dry run of a bench: its whole configuration, computation, traffic, memory and stored state."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch

from fczoo.backbones.load import configuration
from fczoo.backbones.weights import describe_missing_weights
from fczoo.core.errors import FczooError
from fczoo.core.files import home
from fczoo.core.method import Method
from fczoo.core.options import plural, with_fewest_steps
from fczoo.core.registry import DATASETS
from fczoo.core.tasks import Task
from fczoo.core.tree import Tree, nbytes
from fczoo.core.vit_config import ViTConfig
from fczoo.data.dataset import Images
from fczoo.data.partition import Partition
from fczoo.data.stream import DOMAINS, Stream, make_tasks
from fczoo.data.stream_variants import vary_stream
from fczoo.data.views import Augment, ImageStore
from fczoo.federation.batches import Client
from fczoo.federation.client_engine import ClientEngine
from fczoo.federation.data_setup import open_stream, partition_stream, tasks_of
from fczoo.federation.device import (
    DTYPES,
    Plan,
    group_size,
    pick_device,
    resolve_precision,
    warn_of_slow_bf16,
)
from fczoo.federation.local_rules import ControlVariates, make_local_training
from fczoo.federation.local_trainer import skip_steps
from fczoo.federation.setting_groups import GROUPS
from fczoo.federation.settings import Settings
from fczoo.federation.warm_start import find_start
from fczoo.models.storage import KeepModel
from fczoo.reports.run_config import RunConfig
from fczoo.reports.text_format import option_word, word_table
from fczoo.runner.cost import (
    EXTRAPOLATION_CLASSES,
    MAX_FULL_CLASSES,
    FirstRound,
    first_round,
    simulate_task,
)
from fczoo.runner.outline import Outlines, outline_backbone
from fczoo.runner.progress import print_progress
from fczoo.runner.schedule_warnings import warn_of_short_schedules, warn_of_unused_settings
from fczoo.runner.timing import StepTimer, duration_text


def state_sizes(method: Method, settings: Settings, classes: int, config: ViTConfig) -> list[int]:
    """Estimate the bytes of the server's state after each task.

    Shapes give the state after the first two tasks; each further task adds as much as the second.
    A client with two classes is enough, unless a method uploads statistics: then the state may
    have rows only for classes with images. Many classes are extrapolated from few.

    Args:
        method: Method of the run.
        settings: Settings of the run.
        classes: Number of classes; 0: that of the data set.
        config: Configuration of the backbone.
    """
    tasks = tasks_of(settings, classes)
    if method.training().own_models:
        return [0] * len(tasks)
    few, many = EXTRAPOLATION_CLASSES
    most = max(task.size for task in tasks[:2]) if method.training().uploads else few
    sizes = _measure(method, settings, tasks[:2], config, most if most <= MAX_FULL_CLASSES else few)
    if most > MAX_FULL_CLASSES:
        larger_sizes = _measure(method, settings, tasks[:2], config, many)
        sizes = [
            size + (larger - size) // (many - few) * (most - few)
            for size, larger in zip(sizes, larger_sizes, strict=True)
        ]
    growth = sizes[-1] - sizes[0]
    return [sizes[0] + growth * index for index in range(len(tasks))]


def _measure(
    method: Method, settings: Settings, tasks: Sequence[Task], config: ViTConfig, classes: int
) -> list[int]:
    """Return the bytes of the server's state after each task, with one client of a few classes."""
    fast, sizes = with_fewest_steps(method), list[int]()
    state: Tree = {}
    with Outlines():
        backbone, rng = outline_backbone(config), torch.Generator().manual_seed(0)
        for task in tasks:
            labels = np.arange(task.start, min(task.start + classes, task.stop)).repeat(2)
            images = Images(np.zeros((len(labels), 8, 8, 3), np.uint8), labels)
            engine = ClientEngine(
                fast,
                backbone,
                ImageStore(images, backbone),
                Plan(1, len(labels), Augment(), seed=0, pass_size=len(labels)),
                controls=ControlVariates(make_local_training(settings.local)),
                make_optimizers=skip_steps,
            )
            state = fast.begin_task(state, task, backbone, rng)
            _, state = simulate_task(engine, Client(0, torch.arange(len(labels))), task, state, rng)
            sizes.append(nbytes(state))
    return sizes


COPIES = 4  # of a client's trained tensors: value, gradient and Adam's two moments
LEGEND = (
    "trained: scalars that a client trains\n"
    "MB up: a client's upload per round, with every class of the first task (1 MB = 10^6 bytes)\n"
    "MB down: the broadcast at the start of the first task\n"
    "GFLOP per image-step: counted operations for one image: inputs such as query features, "
    "forward, backward\n"
    "PFLOP per run: GFLOP per image-step x image-steps, without statistics, server and evaluation\n"
    "GB: estimated memory without images and libraries: frozen weights and, for each client of\n"
    "  those that train together, trained tensors, gradients, two moments, activations of a batch\n"
    "MB kept: models and server state in each run's folder, estimated from two tasks\n"
    "training: estimated time of the image-steps, one client after another, and of query features\n"
    "  that are computed once per image; without statistics, server and evaluation. Short steps\n"
    "  are timed on this device; for others, GFLOP are divided by the backbone's measured speed."
)


def dry_run(runs: Sequence[RunConfig], keep: KeepModel = "final") -> str:
    """Describe settings, image-steps, bytes, operations and memory of runs in one setting.

    Nothing is trained or written. Data and weights may be missing; the text names missing parts.

    Args:
        runs: Runs of one setting.
        keep: Models that each run would store.

    Raises:
        FczooError: A run could not start with this configuration.
    """
    settings = resolve_precision(runs[0].settings)
    configs = {c.method: replace(c, settings=settings) for c in runs}
    seeds = list(dict.fromkeys(config.seed for config in runs))
    warn_of_slow_bf16(settings)
    for run in runs if settings.start_from else ():
        find_start(str(settings.start_from), run.create_method(), run.seed)
    data_summary, data = _data(settings)
    steps = image_steps(settings, *data) if data else []
    images = len(data[0].train.labels) if data else 0
    clients = settings.clients + settings.joining * (settings.task_count - 1)
    classes = len(data[0].classes) if data else 0
    backbone = configuration(settings.backbone, settings.image_size, settings.pool)
    timer = StepTimer(settings, classes, backbone)
    cost_rows = []
    for name, config in configs.items():
        print_progress(f"{name}: counting bytes and operations")
        method = config.create_method()
        round_cost = first_round(method, settings, classes, backbone)
        sizes = state_sizes(method, settings, classes, backbone)
        stored_bytes = {"final": sizes[-1], "tasks": sum(sizes), "none": 0}[keep]
        cost_rows.append(
            _cost_row(
                method, settings, round_cost, stored_bytes, timer, clients, sum(steps), images
            )
        )
    warn_of_short_schedules(configs.values())
    warn_of_unused_settings(list(configs.values()))
    seed_list = f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
    by_task = (
        f"{' + '.join(f'{s:,.0f}' for s in steps)} = {sum(steps):,.0f}"
        if steps
        else "unknown without the data"
    )
    head = [
        "method",
        "trained",
        "MB up",
        "MB down",
        "GFLOP per image-step",
        "PFLOP per run",
        "GB",
        "MB kept",
        "training",
    ]
    pages = []
    for name, config in configs.items():
        values = [
            (option, option_word(config.options[option]), origin)
            for option, origin in config.option_origins.items()
        ]
        pages.append(f"{name}:\n{word_table(values, ['option', 'value', 'from'])}")
    weights = describe_missing_weights(settings.backbone, "--download")
    return "\n\n".join(
        [
            f"Settings of {plural(len(runs), 'run')}, {seed_list}:",
            *(
                f"{group.capitalize()}:\n"
                f"{word_table(rows, ['setting', 'value', 'from', 'meaning'])}"
                for group, rows in _settings(next(iter(configs.values()))).items()
            ),
            *pages,
            f"{data_summary}\nWeights: {weights or f'{settings.backbone} is available'}",
            f"Image-steps per run (images x epochs x rounds), by task: {by_task}",
            f"{word_table(cost_rows, head)}\n\n{LEGEND}",
        ]
    )


def run_seconds(config: RunConfig) -> tuple[float, float] | None:
    """Estimate the seconds of a run, and those of frozen features that runs share.

    A method that trains nothing reads features of all images, which are cached for other runs.

    Args:
        config: Configuration of the run.

    Returns:
        Seconds of training and evaluation, and of shared features; None without the run's data.
    """
    settings = resolve_precision(config.settings)
    _, data = _data(settings)
    if data is None:
        return None
    stream = data[0]
    backbone = configuration(settings.backbone, settings.image_size, settings.pool)
    classes, method = len(stream.classes), config.create_method()
    timer, images = StepTimer(settings, classes, backbone), len(stream.train.labels)
    test_counts = [len(stream.positions(stream.test, task)) for task in stream.tasks]
    if not timer.trains(method):
        return 0.0, timer.forward_seconds(images + sum(test_counts))
    cost = first_round(method, settings, classes, backbone)
    training = timer.seconds(method, cost, sum(image_steps(settings, *data)), images)
    passes = images + sum(sum(test_counts[: i + 1]) for i in range(len(test_counts)))
    return training + timer.forward_seconds(passes), 0.0


def image_steps(settings: Settings, stream: Stream, partition: Partition) -> list[float]:
    """Return the number of image-steps per task, images x epochs x rounds.

    If participants are sampled, it is the expected number.
    """
    out = []
    for task in stream.tasks[stream.learned_count :]:
        sizes = np.array(
            [len(c) for c in partition.tasks[task.index][: partition.client_count(task.index)]]
        )
        candidates = len(sizes) if settings.draw_among == "joined" else int((sizes > 0).sum())
        out.append(
            float(
                settings.rounds
                * settings.epochs
                * sizes.sum()
                * settings.participant_count(candidates)
                / candidates
            )
        )
    return out


def _data(settings: Settings) -> tuple[str, tuple[Stream, Partition] | None]:
    """Return a description of the data, and stream and partition if their size is known.

    Without images, the official number of training images is split evenly among the classes.
    """
    dataset = DATASETS.get(settings.dataset)()
    try:
        if dataset.folder:
            dataset.locate(settings.root or home() / "data")
    except FczooError as error:
        official = dataset.official
        if official is None or official.train is None or settings.start_from:
            return f"Data: {error}", None
        stream = _stream_of_expected_size(settings, dataset.classes, official.train)
        return (
            f"Data: {error}\nCosts assume {official.train:,} training images, equally many per "
            "class.",
            partition_stream(settings, stream),
        )
    stream, partition = open_stream(settings, pixels=False)
    return (
        f"Data: {len(stream.train.labels):,} training and {len(stream.test.labels):,} test images; "
        f"partition {partition.sha256}",
        (stream, partition),
    )


def _stream_of_expected_size(settings: Settings, classes: int, images: int) -> Stream:
    counts = np.array([len(part) for part in np.array_split(np.arange(images), classes)])
    counts = (
        counts if settings.train_per_class is None else counts.clip(max=settings.train_per_class)
    )
    labels, nothing = np.repeat(np.arange(classes), counts), np.empty((0, 0, 0, 3), np.uint8)
    tasks = make_tasks(settings.dataset, classes, settings.tasks)
    domain_count = len(DATASETS.get(settings.dataset).domains)
    groups = np.arange(len(labels)) % domain_count if domain_count else None
    domains = groups if settings.tasks == DOMAINS else None
    names = tuple(map(str, range(classes)))
    stream = Stream(
        settings.dataset,
        Images(nothing, labels, domains),
        Images(nothing, labels[:0]),
        np.arange(len(labels)),
        tuple(range(classes)),
        names,
        tasks,
        groups=groups,
    )
    return vary_stream(stream, vars(settings), settings.partition_seed)


def _settings(config: RunConfig) -> dict[str, list[tuple[Any, ...]]]:
    """Return rows of setting, value, origin and meaning, by group of ``fczoo bench --help``."""
    groups: dict[str, list[tuple[Any, ...]]] = {group: [] for group in GROUPS}
    for field in fields(Settings):
        value, origin = getattr(config.settings, field.name), config.setting_origins[field.name]
        row = field.name, option_word(value), origin, field.metadata["meaning"]
        groups[field.metadata["group"]].append(row)
    return groups


def _cost_row(
    method: Method,
    settings: Settings,
    round_cost: FirstRound,
    stored_bytes: int,
    timer: StepTimer,
    clients: int,
    steps: float,
    images: int,
) -> tuple[Any, ...]:
    trained_bytes, device = nbytes(round_cost.trained_tensors), pick_device(settings.device)
    scalars = sum(v.numel() for v in round_cost.trained_tensors.values())
    together = min(
        group_size(settings, device, clients, scalars), settings.participant_count(clients)
    )
    part = DTYPES[settings.precision].itemsize / 4  # of the bytes in float32
    memory = (
        round_cost.weight_bytes * part
        + trained_bytes * (1 + COPIES * together)
        + round_cost.activation_bytes * part * settings.batch_size * together
    )
    seconds = timer.seconds(method, round_cost, steps, images)
    operations = f"{round_cost.flops * steps / 1e15:,.3f}" if steps else "unknown"
    traffic = f"{round_cost.upload_bytes / 1e6:.3f}", f"{nbytes(round_cost.broadcast) / 1e6:.3f}"
    return (
        method.name,
        f"{scalars:,}",
        *traffic,
        f"{round_cost.flops / 1e9:.3f}",
        operations if round_cost.trained_tensors else "0",
        f"{memory / 1e9:.2f}",
        f"{stored_bytes / 1e6:.2f}",
        duration_text(seconds) if steps else "unknown",
    )
