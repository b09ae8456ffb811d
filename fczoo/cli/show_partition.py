"""What ``fczoo partition`` shows and writes: who owns how many images of which class,
in tables, a picture and JSON.
"""

from pathlib import Path

import numpy as np
from tabulate import tabulate

from fczoo.core.csv_text import to_csv_text
from fczoo.core.files import encode_json
from fczoo.data.partition import Partition
from fczoo.data.stream import Stream


def class_counts(partition: Partition, stream: Stream) -> np.ndarray:
    """Images, [tasks, clients, classes]; classes in order of arrival."""
    out = np.zeros((len(partition.tasks), partition.clients, len(stream.classes)), np.int64)
    for t, task in enumerate(partition.tasks):
        for k, owned in enumerate(task):
            labels = stream.train.labels[np.searchsorted(stream.train_index, owned)]
            out[t, k] = np.bincount(labels, minlength=len(stream.classes))
    return out


def describe_split(partition: Partition, stream: Stream, full: bool, protocol: str | None) -> str:
    """A line a task and, in ``full``, a table of images per client and class for each task.

    ``protocol`` is named, since it may have taken a part of the images.
    """
    counts = class_counts(partition, stream)
    followed = f", protocol {protocol}" if protocol else ""
    split = f"{partition.spec}, partition seed {partition.seed}, sha256 {partition.sha256}"
    parts = [
        f"{partition.dataset}{followed}: {split}",
        _tasks_table(partition, stream, counts),
    ]
    if not full:
        return "\n\n".join(
            [*parts, "Images per client and class: --full prints them, --table FILE writes them."]
        )
    for task in stream.tasks:
        title = f"Task {task.index + 1}, images per client and class (original labels):"
        parts.append(f"{title}\n{_clients_table(counts[task.index], stream, task.start, task.stop)}")
    return "\n\n".join(parts)


def write_table(path: Path, partition: Partition, stream: Stream) -> None:
    """CSV with a row for each task, client and class of which it owns something."""
    rows: list[list[object]] = [["task", "client", "class", "name", "images"]]
    counts = class_counts(partition, stream)
    for t, k, c in np.argwhere(counts):
        rows.append([t, k, stream.class_order[c], stream.classes[c], counts[t, k, c]])
    path.write_text(to_csv_text(rows), encoding="utf-8")


def write_export(path: Path, partition: Partition, stream: Stream) -> None:
    """Plain JSON for other software: positions in the data set's training part,
    by task and client, with original labels.
    """
    tasks = []
    for task in stream.tasks:
        owned = partition.tasks[task.index][: partition.present(task.index)]
        tasks.append(
            {
                "classes": list(stream.class_order[task.start : task.stop]),
                "clients": {
                    str(k): {"indices": index.tolist(), "labels": _original(stream, index)}
                    for k, index in enumerate(owned)
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


def write_plot(path: Path, partition: Partition, stream: Stream) -> None:
    """Heat map of images per client and class, tasks side by side,
    where ``check_plot`` has nothing against it.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    counts = class_counts(partition, stream).sum(0)
    clients, classes = counts.shape
    figure = Figure(
        figsize=(min(2 + 0.25 * classes, 24), min(1.5 + 0.25 * clients, 24)), layout="constrained"
    )
    axes = figure.subplots()
    image = axes.imshow(
        np.ma.masked_equal(counts, 0), aspect="auto", cmap="viridis", interpolation="nearest", vmin=0
    )
    axes.set_facecolor("white")
    for task in stream.tasks[1:]:
        axes.axvline(task.start - 0.5, color="black", linewidth=0.8)
    axes.set(
        xlabel="class, in order of arrival (lines part tasks)",
        ylabel="client",
        title=f"{partition.dataset}, {partition.spec}",
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    figure.colorbar(image, label="images (white: none)")
    figure.savefig(path, dpi=120)


def _original(stream: Stream, index: np.ndarray) -> list[int]:
    labels = stream.train.labels[np.searchsorted(stream.train_index, index)]
    return [stream.class_order[label] for label in labels]


def _tasks_table(partition: Partition, stream: Stream, counts: np.ndarray) -> str:
    rows = []
    for task in stream.tasks:
        here, own = counts[task.index], partition.tasks[task.index]
        sizes = here.sum(1)[here.sum(1) > 0]
        images = stream.train_index[stream.positions(stream.train, task)]
        owned, owners = np.unique(np.concatenate(own), return_counts=True)
        held = (here[here.sum(1) > 0] > 0).sum(1)
        rows.append(
            (
                task.index + 1,
                task.size,
                len(images),
                partition.present(task.index),
                len(sizes),
                f"{sizes.min()} / {np.median(sizes):g} / {sizes.max()}",
                f"{held.mean():.1f}",
                len(np.setdiff1d(images, owned)),
                int((owners > 1).sum()),
            )
        )
    head = [
        "task",
        "classes",
        "images",
        "clients",
        "with data",
        "images a client: least / median / most",
        "classes a client",
        "nobody's",
        "shared",
    ]
    return tabulate(rows, head, tablefmt="simple", disable_numparse=True, colalign=("right",) * len(head))


def _clients_table(counts: np.ndarray, stream: Stream, start: int, stop: int) -> str:
    rows = [(k, *("" if n == 0 else n for n in row[start:stop]), row.sum()) for k, row in enumerate(counts)]
    head = ["client", *map(str, stream.class_order[start:stop]), "all"]
    return tabulate(
        [*rows, ("all", *counts[:, start:stop].sum(0), counts.sum())],
        head,
        tablefmt="simple",
        disable_numparse=True,
    )
