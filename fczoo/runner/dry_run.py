"""What a bench would do, without doing it: the whole configuration, its work, traffic and memory."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

import numpy as np

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
from fczoo.federation.device import DTYPES, pick_device
from fczoo.federation.plan import group_size
from fczoo.federation.precision import resolve_precision, warn_of_slow_bf16
from fczoo.federation.settings import GROUPS, Settings
from fczoo.federation.stream import arranged, open_stream
from fczoo.reports.words import option_word, word_table
from fczoo.runner.cost import measure
from fczoo.runner.grid import Job
from fczoo.runner.progress import say
from fczoo.runner.timing import seconds_a_step, worded

COPIES = 4  # of what a client trains: value, gradient and two moments
LEGEND = (
    "Trained: scalars that a client trains. MB up: a client's upload of a round; MB down: the broadcast of "
    "a task's first round (1 MB = 10^6\n"
    "bytes); both measured in the first task, for a client with every class of it. GFLOP: inputs, forward "
    "and backward of one image, counted;\n"
    "PFLOP a run: that times the image-steps, without statistics, server and evaluation. GB is an "
    "estimate: frozen weights, values, gradients and\n"
    "two moments of each client that trains at the same time, and the activations of one batch each; "
    "without images and libraries. Training: image-steps at the speed of a few steps on full batches, taken "
    "just now on this device with random\n"
    "weights, one client after another; without statistics, server and evaluation."
)


def dry_run(job: Job) -> str:
    """Settings and hyper-parameters with their origin, image-steps, bytes, operations and memory.
    Nothing is trained or written. What is measured is said, since it takes seconds a method.

    Raises FczooError for input that cannot work. Data and weights may be missing; what is, is said.
    """
    built, settings = job.create(), resolve_precision(job.settings)
    warn_of_slow_bf16(settings)
    about, found = _data(settings)
    steps = image_steps(settings, *found) if found else []
    clients = settings.clients + settings.joining * (settings.task_count - 1)
    classes = len(found[0].classes) if found else 0
    work = []
    for method in built:
        say(f"{method.name}: measuring what it sends and a few steps of its training")
        work.append(_work(method, settings, classes, clients, sum(steps)))
    seeds = f"seed{'s' if len(job.seeds) > 1 else ''} {', '.join(map(str, job.seeds))}"
    runs = f"Settings of {plural(len(built) * len(job.seeds), 'run')}, {seeds}"
    by_task = (
        f"{' + '.join(f'{s:,.0f}' for s in steps)} = {sum(steps):,.0f}"
        if steps
        else "unknown without the data"
    )
    head = ["method", "trained", "MB up", "MB down", "GFLOP an image-step", "PFLOP a run", "GB", "training"]
    pages = []
    for method in built:
        values = _options(method, settings, job.options.get(method.name, {}))
        pages.append(f"{method.name}:\n{word_table(values, ['option', 'value', 'from'])}")
    return "\n\n".join(
        [
            f"{runs}:",
            *(
                f"{group.capitalize()}:\n{word_table(rows, ['setting', 'value', 'from', 'meaning'])}"
                for group, rows in _settings(settings).items()
            ),
            *pages,
            f"{about}\nWeights: {weights_needed(settings.backbone) or f'{settings.backbone} is at hand'}",
            f"Image-steps of a run, images x epochs x rounds, by task: {by_task}",
            f"{word_table(work, head)}\n\n{LEGEND}",
        ]
    )


def image_steps(settings: Settings, stream: Stream, partition: Partition) -> list[float]:
    """Images that pass through training in each task; where participants are drawn, the expected number."""
    out = []
    for task in stream.tasks:
        sizes = np.array([len(c) for c in partition.tasks[task.index][: partition.present(task.index)]])
        candidates = len(sizes) if settings.draw_among == "joined" else int((sizes > 0).sum())
        out.append(
            float(settings.rounds * settings.epochs * sizes.sum() * settings.drawn(candidates) / candidates)
        )
    return out


def _data(settings: Settings) -> tuple[str, tuple[Stream, Partition] | None]:
    """Whether the images are there, and their split; without them,
    one of as many labels as the data set is known to have.
    """
    dataset = DATASETS.get(settings.dataset)()
    try:
        if dataset.folder:
            dataset.locate(settings.root or home() / "data")
    except FczooError as error:
        official = dataset.official
        if official is None or official.train is None:
            return f"Data: {error}", None
        stream = _expected(settings, dataset.classes, official.train)
        return (
            f"Data: {error}\nWork is counted for {official.train:,} training images, shared out equally "
            "over the classes.",
            arranged(settings, stream),
        )
    stream, partition = open_stream(settings, pixels=False)
    return (
        f"Data: {len(stream.train.labels):,} training and {len(stream.test.labels):,} test images; "
        f"partition {partition.sha256}",
        (stream, partition),
    )


def _expected(settings: Settings, classes: int, images: int) -> Stream:
    counts = np.array([len(part) for part in np.array_split(np.arange(images), classes)])
    counts = counts if settings.train_per_class is None else counts.clip(max=settings.train_per_class)
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
    """Setting, value, origin and meaning, by the groups of ``fczoo bench --help``."""
    stated = {
        name: (value, place)
        for place, source in settings.followed.items()
        for name, value in source.stated(settings.dataset).items()
    }
    dataset = asdict(DATASETS.get(settings.dataset).defaults)
    groups: dict[str, list[tuple[Any, ...]]] = {group: [] for group in GROUPS}
    for field in fields(Settings):
        value, origin = getattr(settings, field.name), "given"
        if field.name in stated and value == stated[field.name][0].given(settings.task_count):
            origin = stated[field.name][1]
        elif field.name in dataset and field.name not in stated and value == dataset[field.name]:
            origin = "data set"
        elif field.name not in stated and value == field.default:
            origin = "default"
        row = field.name, option_word(value), origin, field.metadata["meaning"]
        groups[field.metadata["group"]].append(row)
    return groups


def _options(method: Method, settings: Settings, given: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    beta = getattr(settings.partitioner, "beta", None)
    followed = {
        place: source.options(method.name, settings.dataset, beta)
        for place, source in reversed(settings.followed.items())
    }
    layers = {
        "--set": given,
        **followed,
        "data set": method.tuned.get(settings.dataset, {}),
    }
    origin = {
        name: next((layer for layer, values in layers.items() if name in values), "default")
        for name in asdict(method)
    }
    return [(name, option_word(getattr(method, name)), place) for name, place in origin.items()]


def _work(method: Method, settings: Settings, classes: int, clients: int, steps: float) -> tuple[Any, ...]:
    seen = measure(method, settings, work=True, classes=classes)
    trained, device = nbytes(seen.trained), pick_device(settings.device)
    scalars = sum(v.numel() for v in seen.trained.values())
    together = min(group_size(settings, device, clients, scalars), settings.drawn(clients))
    part = DTYPES[settings.precision].itemsize / 4  # of what was measured in float32
    memory = (
        seen.weights * part
        + trained * (1 + COPIES * together)
        + seen.activations * part * settings.batch_size * together
    )
    seconds = seconds_a_step(method, settings, classes) * steps / settings.batch_size
    operations = f"{seen.flops * steps / 1e15:,.3f}" if steps else "unknown"
    sent = [seen.sent["round"]] if "round" in seen.sent else seen.sent.values()
    traffic = (
        f"{sum(nbytes(upload.tensors) for upload in sent) / 1e6:.3f}",
        f"{nbytes(seen.received) / 1e6:.3f}",
    )
    return (
        method.name,
        f"{scalars:,}",
        *traffic,
        f"{seen.flops / 1e9:.3f}",
        operations if seen.trained else "0",
        f"{memory / 1e9:.2f}",
        worded(seconds) if steps else "unknown",
    )
