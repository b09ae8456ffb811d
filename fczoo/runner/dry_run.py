"""Dry run of a bench: the whole configuration, its work, traffic and memory."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

import numpy as np

from fczoo.backbones.load import configuration
from fczoo.backbones.weights import weights_needed
from fczoo.core.errors import FczooError
from fczoo.core.files import home
from fczoo.core.method import Method
from fczoo.core.options import plural
from fczoo.core.registry import DATASETS
from fczoo.core.tree import nbytes
from fczoo.data.dataset import Images
from fczoo.data.partition import Partition
from fczoo.data.stream import DOMAINS, Stream, make_tasks
from fczoo.federation.device import (
    DTYPES,
    group_size,
    pick_device,
    resolve_precision,
    warn_of_slow_bf16,
)
from fczoo.federation.settings import GROUPS, Settings
from fczoo.federation.stream import open_stream, split_stream
from fczoo.reports.text_format import option_word, word_table
from fczoo.runner.cost import FirstRound, first_round
from fczoo.runner.grid import Job
from fczoo.runner.progress import say
from fczoo.runner.schedule import warn_of_short_schedules, warn_of_unused_settings
from fczoo.runner.timing import StepTimer, duration_text

COPIES = 4  # of what a client trains: value, gradient and two moments
LEGEND = (
    "Trained: scalars that a client trains. MB up: a client's upload of a round; MB down: the "
    "broadcast of "
    "a task's first round (1 MB = 10^6\n"
    "bytes); both counted in the first task, for a client with every class of it. GFLOP: inputs, "
    "forward "
    "and backward of one image, counted;\n"
    "PFLOP a run: that times the image-steps, without statistics, server and evaluation. GB is an "
    "estimate: frozen weights, values, gradients and\n"
    "two moments of each client that trains at the same time, and the activations of one batch "
    "each; "
    "without images and libraries. Training is\n"
    "an estimate: image-steps one client after another, and query features that are computed once "
    "per "
    "image; without statistics, server and\n"
    "evaluation. Short steps were timed just now on this device; for others, GFLOP are divided by "
    "the speed "
    "of a few images in the backbone."
)


def dry_run(job: Job) -> str:
    """Describe settings, image-steps, bytes, operations and memory of runs.

    Nothing is trained or written.

    Raises FczooError for input that cannot work. Data and weights may be missing; missing parts are
    named.
    """
    built, settings = job.create(), resolve_precision(job.settings)
    warn_of_slow_bf16(settings)
    about, data = _data(settings)
    steps = image_steps(settings, *data) if data else []
    images = len(data[0].train.labels) if data else 0
    clients = settings.clients + settings.joining * (settings.task_count - 1)
    classes = len(data[0].classes) if data else 0
    config = configuration(settings.backbone, settings.image_size, settings.pool)
    timer = StepTimer(settings, classes, config)
    work = []
    for method in built:
        say(f"{method.name}: counting what it sends and computes")
        round_cost = first_round(method, settings, classes, config)
        work.append(_work(method, settings, round_cost, timer, clients, sum(steps), images))
    warn_of_short_schedules(settings, built)
    warn_of_unused_settings(settings, built)
    seeds = f"seed{'s' if len(job.seeds) > 1 else ''} {', '.join(map(str, job.seeds))}"
    runs = f"Settings of {plural(len(built) * len(job.seeds), 'run')}, {seeds}"
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
        "GFLOP an image-step",
        "PFLOP a run",
        "GB",
        "training",
    ]
    pages = []
    for method in built:
        values = _options(method, settings, job.options.get(method.name, {}))
        pages.append(f"{method.name}:\n{word_table(values, ['option', 'value', 'from'])}")
    weights = weights_needed(settings.backbone, "--download")
    return "\n\n".join(
        [
            f"{runs}:",
            *(
                f"{group.capitalize()}:\n"
                f"{word_table(rows, ['setting', 'value', 'from', 'meaning'])}"
                for group, rows in _settings(settings).items()
            ),
            *pages,
            f"{about}\nWeights: {weights or f'{settings.backbone} is at hand'}",
            f"Image-steps of a run, images x epochs x rounds, by task: {by_task}",
            f"{word_table(work, head)}\n\n{LEGEND}",
        ]
    )


def image_steps(settings: Settings, stream: Stream, partition: Partition) -> list[float]:
    """Return the images that pass through training per task.

    With sampled participants it is the expected number.
    """
    out = []
    for task in stream.tasks:
        sizes = np.array(
            [len(c) for c in partition.tasks[task.index][: partition.present(task.index)]]
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
    """Return whether the images are available, and their partition.

    Without images, labels of a known number take their place.
    """
    dataset = DATASETS.get(settings.dataset)()
    try:
        if dataset.folder:
            dataset.locate(settings.root or home() / "data")
    except FczooError as error:
        official = dataset.official
        if official is None or official.train is None:
            return f"Data: {error}", None
        stream = _stream_of_expected_size(settings, dataset.classes, official.train)
        return (
            f"Data: {error}\nWork is counted for {official.train:,} training images, shared out "
            "equally "
            "over the classes.",
            split_stream(settings, stream),
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
    domains = np.arange(len(labels)) % len(tasks) if settings.tasks == DOMAINS else None
    names = tuple(map(str, range(classes)))
    return Stream(
        settings.dataset,
        Images(nothing, labels, domains),
        Images(nothing, labels[:0]),
        np.arange(len(labels)),
        tuple(range(classes)),
        names,
        tasks,
    )


def _settings(settings: Settings) -> dict[str, list[tuple[Any, ...]]]:
    """Return setting, value, origin and meaning, by the groups of ``fczoo bench --help``."""
    statements = {
        name: (value, source_name)
        for source_name, source in settings.sources.items()
        for name, value in source.settings_on(settings.dataset).items()
    }
    dataset = asdict(DATASETS.get(settings.dataset).defaults)
    groups: dict[str, list[tuple[Any, ...]]] = {group: [] for group in GROUPS}
    for field in fields(Settings):
        value, origin = getattr(settings, field.name), "given"
        if field.name in statements and value == statements[field.name][0].value_for(
            settings.task_count
        ):
            origin = statements[field.name][1]
        elif (
            field.name in dataset and field.name not in statements and value == dataset[field.name]
        ):
            origin = "data set"
        elif field.name not in statements and value == field.default:
            origin = "default"
        row = field.name, option_word(value), origin, field.metadata["meaning"]
        groups[field.metadata["group"]].append(row)
    return groups


def _options(method: Method, settings: Settings, given: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    beta = getattr(settings.partitioner, "beta", None)
    source_options = {
        source_name: source.options(method.name, settings.dataset, beta)
        for source_name, source in reversed(settings.sources.items())
    }
    layers = {
        "--set": given,
        **source_options,
        "data set": method.dataset_options.get(settings.dataset, {}),
    }
    origin = {
        name: next((layer for layer, values in layers.items() if name in values), "default")
        for name in asdict(method)
    }
    return [
        (name, option_word(getattr(method, name)), source_name)
        for name, source_name in origin.items()
    ]


def _work(
    method: Method,
    settings: Settings,
    seen: FirstRound,
    timer: StepTimer,
    clients: int,
    steps: float,
    images: int,
) -> tuple[Any, ...]:
    trained_bytes, device = nbytes(seen.trained), pick_device(settings.device)
    scalars = sum(v.numel() for v in seen.trained.values())
    together = min(
        group_size(settings, device, clients, scalars), settings.participant_count(clients)
    )
    part = DTYPES[settings.precision].itemsize / 4  # of what was measured in float32
    memory = (
        seen.weights * part
        + trained_bytes * (1 + COPIES * together)
        + seen.step.activations * part * settings.batch_size * together
    )
    seconds = timer.seconds(method, seen.step, steps, images)
    operations = f"{seen.step.flops * steps / 1e15:,.3f}" if steps else "unknown"
    traffic = f"{seen.up / 1e6:.3f}", f"{nbytes(seen.received) / 1e6:.3f}"
    return (
        method.name,
        f"{scalars:,}",
        *traffic,
        f"{seen.step.flops / 1e9:.3f}",
        operations if seen.trained else "0",
        f"{memory / 1e9:.2f}",
        duration_text(seconds) if steps else "unknown",
    )
