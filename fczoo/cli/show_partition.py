"""Output of ``fczoo partition``: images per client and class."""

from pathlib import Path
from typing import Literal

import numpy as np
from tabulate import tabulate

from fczoo.core.files import encode_json, to_csv_text
from fczoo.data.partition import Partition
from fczoo.data.stream import Stream
from fczoo.data.stream_variants import describe_variants, noisy_count

PlotKind = Literal["heatmap", "bars", "bubbles"]


def class_counts(partition: Partition, stream: Stream) -> np.ndarray:
    """Count images per task, client and class.

    Args:
        partition: Images of each client.
        stream: Stream of the partition.

    Returns:
        int64 counts [tasks, clients, classes], with classes in order of arrival.
    """
    out = np.zeros((len(partition.tasks), partition.clients, len(stream.classes)), np.int64)
    for t, task in enumerate(partition.tasks):
        for k, client_indices in enumerate(task):
            labels = stream.train.labels[np.searchsorted(stream.train_index, client_indices)]
            out[t, k] = np.bincount(labels, minlength=len(stream.classes))
    return out


def describe_split(partition: Partition, stream: Stream, full: bool, protocol: str | None) -> str:
    """Format one line per task and, with ``full``, tables of images per client and class.

    Args:
        partition: Images of each client.
        stream: Stream that is split.
        full: Whether to add the tables.
        protocol: Name of the protocol or None; it is shown because it may use only some images.

    Returns:
        The text to print.
    """
    counts = class_counts(partition, stream)
    protocol_note = f", protocol {protocol}" if protocol else ""
    variant = "".join(f", {words}" for words in describe_variants(partition.variants))
    split = f"{partition.spec}{variant}, partition seed {partition.seed}, sha256 {partition.sha256}"
    parts = [
        f"{partition.dataset}{protocol_note}: {split}",
        _tasks_table(partition, stream, counts),
    ]
    if not full:
        return "\n\n".join(
            [*parts, "Images per client and class: --full prints them, --table FILE writes them."]
        )
    for task in stream.tasks:
        title = f"Task {task.index + 1}, images per client and class (original labels):"
        parts.append(
            f"{title}\n{_clients_table(counts[task.index], stream, task.start, task.stop)}"
        )
    return "\n\n".join(parts)


def write_table(path: Path, partition: Partition, stream: Stream) -> None:
    """Write CSV with a row per task, client and class with images.

    Args:
        path: File to write.
        partition: Images of each client.
        stream: Stream that is split.
    """
    rows: list[list[object]] = [["task", "client", "class", "name", "images"]]
    counts = class_counts(partition, stream)
    for t, k, c in np.argwhere(counts):
        rows.append([t, k, stream.class_order[c], stream.classes[c], counts[t, k, c]])
    path.write_text(to_csv_text(rows), encoding="utf-8")


def write_export(path: Path, partition: Partition, stream: Stream) -> None:
    """Write JSON for other software: positions and original labels, by task and client.

    Args:
        path: File to write.
        partition: Images of each client.
        stream: Stream that is split.
    """
    tasks = []
    for task in stream.tasks:
        client_indices = partition.tasks[task.index][: partition.client_count(task.index)]
        tasks.append(
            {
                "classes": list(stream.class_order[task.start : task.stop]),
                "clients": {
                    str(k): {"indices": index.tolist(), "labels": _original_labels(stream, index)}
                    for k, index in enumerate(client_indices)
                },
            }
        )
    about = {
        "dataset": partition.dataset,
        "partition": partition.spec,
        "seed": partition.seed,
        "sha256": partition.sha256,
    }
    path.write_text(
        encode_json(
            {
                **about,
                "class_names": dict(zip(map(str, stream.class_order), stream.classes, strict=True)),
                "tasks": tasks,
            }
        )
        + "\n",
        encoding="utf-8",
    )


def write_plot(
    path: Path, partition: Partition, stream: Stream, kind: PlotKind = "heatmap"
) -> None:
    """Plot the images per client and class, with all tasks in one picture.

    Args:
        path: File to write, which ``check_plot`` must accept.
        partition: Images of each client.
        stream: Stream that is split.
        kind: ``heatmap``, with a coloured cell per client and class; ``bars``, with a bar per
            client, stacked by class; or ``bubbles``, with areas in proportion to the images.
    """
    from fczoo.reports.partition_figure import draw_partition  # imports torch

    counts = class_counts(partition, stream).sum(0)
    title = [f"{partition.dataset}, {partition.spec}", *describe_variants(partition.variants)]
    starts = [task.start for task in stream.tasks[1:]]
    figure = draw_partition(
        counts, stream.classes, kind, "\n".join(title), "class, in order of arrival", starts
    )
    figure.savefig(path, dpi=120)


def _original_labels(stream: Stream, index: np.ndarray) -> list[int]:
    labels = stream.train.labels[np.searchsorted(stream.train_index, index)]
    return [stream.class_order[label] for label in labels]


def _tasks_table(partition: Partition, stream: Stream, counts: np.ndarray) -> str:
    rows, noise = [], partition.variants.get("label_noise")
    for task in stream.tasks:
        task_counts, client_indices = counts[task.index], partition.tasks[task.index]
        sizes = task_counts.sum(1)[task_counts.sum(1) > 0]
        images = stream.train_index[stream.positions(stream.train, task)]
        assigned_images, owner_counts = np.unique(
            np.concatenate(client_indices), return_counts=True
        )
        classes_per_client = (task_counts[task_counts.sum(1) > 0] > 0).sum(1)
        client_groups = [
            len(np.unique(stream.groups[np.searchsorted(stream.train_index, indices)]))
            for indices in client_indices
            if stream.groups is not None and len(indices)
        ]
        rows.append(
            (
                task.index + 1,
                task.size,
                len(images),
                partition.client_count(task.index),
                len(sizes),
                f"{sizes.min()} / {np.median(sizes):g} / {sizes.max()}",
                f"{classes_per_client.mean():.1f}",
                *([f"{np.mean(client_groups):.1f}"] if client_groups else []),
                len(np.setdiff1d(images, assigned_images)),
                int((owner_counts > 1).sum()),
                *([sum(noisy_count(int(n), noise) for n in sizes)] if noise else []),
            )
        )
    head = [
        "task",
        "classes",
        "images",
        "clients",
        "with data",
        "images per client: min / median / max",
        "classes per client",
        *([] if stream.groups is None else ["groups per client"]),
        "unassigned",
        "shared",
        *(["wrong labels"] if noise else []),
    ]
    return tabulate(
        rows, head, tablefmt="simple", disable_numparse=True, colalign=("right",) * len(head)
    )


def _clients_table(counts: np.ndarray, stream: Stream, start: int, stop: int) -> str:
    rows = [
        (k, *("" if n == 0 else n for n in row[start:stop]), row.sum())
        for k, row in enumerate(counts)
    ]
    head = ["client", *map(str, stream.class_order[start:stop]), "all"]
    return tabulate(
        [*rows, ("all", *counts[:, start:stop].sum(0), counts.sum())],
        head,
        tablefmt="simple",
        disable_numparse=True,
    )
