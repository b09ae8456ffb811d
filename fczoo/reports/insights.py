"""Figures of the diagnostics of a run; the page draws them where a run has any."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from fczoo.core.errors import FczooError
from fczoo.federation.diagnostics import FILE, read
from fczoo.reports.drawing import COLOURS, heat, legend, pyplot
from fczoo.reports.runs import Line

Records = dict[str, list[dict[str, Any]]]  # kind -> its records, by task


def insights(line: Line) -> Iterator[tuple[str, str, Any]]:
    """(name, caption, figure) of what one line's first seed recorded.

    Raises FczooError for records of another form.
    """
    folder = line.cells[0].folder
    if folder is None:  # an archive keeps no diagnostics
        return
    try:
        yield from _insights(line, read(folder))
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise FczooError(
            f"{folder / FILE} is no valid list of diagnostics: {type(error).__name__} {error}"
        ) from error


def _insights(line: Line, found: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str, Any]]:
    records: Records = {}
    for record in found:
        records.setdefault(record["kind"], []).append(record)
    seed = f"{line.label}, seed {line.seeds[0]}"
    if "confusion" in records:
        share = 100 * np.array(records["confusion"][-1]["matrix"])
        yield (
            "confusion",
            f"{seed}: images of a task taken for a class of another, % (after the last task)",
            _square(share, "answered", "Oranges"),
        )
    if "clients" in records:
        yield (
            "clients",
            f"{seed}: evenness of each client's answers on the task's test images after local training",
            _clients(records["clients"]),
        )
    if "lora" in records:
        cosine = np.array(records["lora"][-1]["matrix"])
        yield (
            "lora",
            f"{seed}: cosine between the LoRA updates of the tasks",
            _square(cosine, "task", "PuOr", -1, 1),
        )
    if "choices" in records:
        yield (
            "choices",
            f"{seed}: share of each prompt in a task's test images' choices, % (last task)",
            _choices(records["choices"][-1]),
        )
    if "reweight" in records:
        yield (
            "reweight",
            f"{seed}: weight of a client's prototype against its share of the class's images",
            _reweight(records["reweight"]),
        )
    if "task drift" in records:
        yield (
            "drift",
            f"{seed}: how far trained tensors moved in each task, relative to their size",
            _drift(records["task drift"]),
        )


def _square(values: np.ndarray, columns: str, colours: str, low: float = 0, high: float = 100) -> Any:
    size = len(values)
    figure, axes = pyplot().subplots(figsize=(1.3 + 0.42 * size, 1 + 0.36 * size))
    heat(axes, values, "{:.0f}" if high == 100 else "{:.1f}", colours, low, high)
    ticks = np.arange(size) + 0.5
    axes.set(
        xlabel=columns,
        ylabel="task",
        xticks=ticks,
        yticks=ticks,
        xticklabels=range(1, size + 1),
        yticklabels=range(1, size + 1),
    )
    return figure


def _clients(records: list[dict[str, Any]]) -> Any:
    count = 1 + max(c["client"] for r in records for c in r["clients"])
    values = np.full((len(records), count), np.nan)
    for row, record in enumerate(records):
        for client in record["clients"]:
            values[row, client["client"]] = client["entropy"]
    figure, axes = pyplot().subplots(figsize=(max(3.5, 1 + 0.45 * count), 1 + 0.36 * len(records)))
    heat(axes, values, "{:.1f}", "Purples", 0, 1)
    axes.set(
        xlabel="client", ylabel="task", xticks=np.arange(count) + 0.5, yticks=np.arange(len(records)) + 0.5
    )
    axes.set(xticklabels=range(count), yticklabels=[r["task"] + 1 for r in records])
    return figure


def _choices(record: dict[str, Any]) -> Any:
    values = 100 * np.array(record["share"])
    figure, axes = pyplot().subplots(figsize=(max(3.5, 1 + 0.42 * values.shape[1]), 1 + 0.36 * len(values)))
    heat(axes, values, "{:.0f}", "Greens", 0)
    axes.set(
        xlabel="prompt",
        ylabel="images of task",
        xticks=np.arange(values.shape[1]) + 0.5,
        yticks=np.arange(len(values)) + 0.5,
    )
    axes.set(xticklabels=range(1, values.shape[1] + 1), yticklabels=range(1, len(values) + 1))
    return figure


def _reweight(records: list[dict[str, Any]]) -> Any:
    figure, axes = pyplot().subplots(figsize=(4.2, 3.4))
    axes.plot([0, 1], [0, 1], color=pyplot().rcParams["text.color"], linewidth=0.8)
    for record, colour in zip(records, COLOURS * len(records), strict=False):
        axes.scatter(
            np.ravel(record["share"]),
            np.ravel(record["weights"]),
            s=14,
            color=colour,
            alpha=0.7,
            label=f"task {record['task'] + 1}",
        )
    axes.set(xlabel="share of the class's images", ylabel="weight of the client's prototype")
    return legend(figure, axes)


def _drift(records: list[dict[str, Any]]) -> Any:
    figure, axes = pyplot().subplots(figsize=(5.2, 3))
    for prefix, colour in zip(records[0]["by prefix"], COLOURS, strict=False):
        axes.plot(
            [r["task"] + 1 for r in records],
            [r["by prefix"][prefix] for r in records],
            marker="o",
            color=colour,
            label=prefix.rstrip("."),
        )
    axes.set(xlabel="task", ylabel="change / size", yscale="log", xticks=[r["task"] + 1 for r in records])
    return legend(figure, axes)
