"""Figures of experiments, with matplotlib (extra ``plot``)."""

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fczoo.core.errors import FczooError
from fczoo.core.files import read_lines
from fczoo.core.metrics import drops, seen_accuracy
from fczoo.federation.result import Result
from fczoo.reports.drawing import COLOURS, INK, STYLE, band, coloured, heat, ink_of_style, legend, pyplot
from fczoo.reports.insights import insights
from fczoo.reports.run_folder import ROUNDS
from fczoo.reports.runs import Experiment, Line


def figures(experiment: Experiment, ink: str = INK) -> Iterator[tuple[str, str, Any]]:
    """(name, caption, figure) of all that can be drawn, text in colour ``ink``; the caller closes each."""
    inked = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    with pyplot().rc_context({**STYLE, **dict.fromkeys(inked, ink)}):
        for name, caption, draw in PLOTS:
            if draw is not loss_curves or _has_rounds(experiment):
                yield name, caption, draw(experiment)
        for line in experiment.lines:
            caption = f"{line.label}: accuracy on each task after each task, %, mean over seeds"
            yield f"matrix {line.label}", caption, accuracy_matrix(line)
        for line in experiment.lines:
            for name, caption, figure in insights(line):
                yield f"why {name} {line.label}", caption, figure


def _has_rounds(experiment: Experiment) -> bool:
    """False for runs of an archive, which keeps no rounds."""
    return any(cell.folder for line in experiment.lines for cell in line.cells)


def accuracy_curves(experiment: Experiment) -> Any:
    """Pooled accuracy after each task, mean over seeds, band of one standard deviation."""
    figure, axes = pyplot().subplots(figsize=(5.2, 3.2))
    tasks = np.arange(1, len(experiment.first.task_sizes) + 1)
    for line, colour, turn in coloured(experiment):
        curves = np.array(
            [[seen_accuracy(r.accuracy, r.test_counts, t) for t in range(len(tasks))] for r in line.results]
        )
        band(axes, tasks, curves, line.label, colour, turn)
    axes.set(xlabel="tasks learned", ylabel="accuracy over all classes seen, %", xticks=tasks)
    axes.set_ylim(bottom=0)
    return legend(figure, axes)


def forgetting_map(experiment: Experiment) -> Any:
    """For every method and old task the drop from its best accuracy to its last, mean over seeds."""
    tasks, lines = len(experiment.first.task_sizes), experiment.lines
    size = (max(4.0, 0.8 + 0.42 * tasks + _label_width(lines)), 0.9 + 0.27 * len(lines))
    figure, axes = pyplot().subplots(figsize=size)
    lost = np.array([np.mean([drops(r.accuracy) for r in line.results], 0) for line in lines])
    heat(axes, lost, "{:.0f}", "RdBu_r", -100, 100)
    axes.set(xlabel="task", xticks=np.arange(tasks - 1) + 0.5, xticklabels=range(1, tasks))
    axes.set_yticks(np.arange(len(lines)) + 0.5, [line.label for line in lines])
    return figure


def accuracy_against_bytes(experiment: Experiment) -> Any:
    """Final pooled accuracy against everything that went over the wire, one point a seed."""
    figure, axes = pyplot().subplots(figsize=(5.2, 3.2))
    for line, colour, turn in coloured(experiment):
        sent = [(r.bytes_up + r.bytes_down) / 1e6 for r in line.results]
        axes.scatter(
            sent,
            [r.metrics["A_N"] for r in line.results],
            label=line.label,
            color=colour,
            marker="o^s"[turn],
            zorder=3,
        )
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set(xscale="log", xlabel="MB sent in the run, all clients, up and down", ylabel="A_N, %")
    axes.set_ylim(0, 1.08 * max(r.metrics["A_N"] for line in experiment.lines for r in line.results))
    axes.margins(x=0.12)
    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0) if high < 3e3 * low else (1.0,)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(color=ink_of_style(), alpha=0.25)
    return legend(figure, axes)


def partition_map(experiment: Experiment) -> Any:
    """Training images of every client in every task."""
    counts = np.array(experiment.split.counts)
    figure, axes = pyplot().subplots(
        figsize=(max(3.5, 1 + 0.45 * counts.shape[1]), 1 + 0.36 * counts.shape[0])
    )
    heat(axes, counts.astype(float), "{:.0f}", "Blues")
    axes.set(
        xlabel="client",
        ylabel="task",
        xticks=np.arange(counts.shape[1]) + 0.5,
        yticks=np.arange(counts.shape[0]) + 0.5,
    )
    axes.set_xticklabels(range(counts.shape[1]))
    axes.set_yticklabels(range(1, counts.shape[0] + 1))
    return figure


def loss_curves(experiment: Experiment) -> Any:
    """Mean training loss of the clients in each round, mean over seeds."""
    figure, axes = pyplot().subplots(figsize=(5.2, 3))
    for line, colour, turn in coloured(experiment):
        curves = [_losses(cell.folder / ROUNDS) for cell in line.cells if cell.folder]
        shortest = min(map(len, curves), default=0)
        if shortest:
            rounds, losses = np.arange(1, shortest + 1), np.array([c[:shortest] for c in curves])
            band(axes, rounds, losses, line.label, colour, turn, marker="")
    axes.set(xlabel="round", ylabel="loss, each method's own")
    axes.xaxis.get_major_locator().set_params(integer=True)
    return legend(figure, axes)


def _label_width(lines: Sequence[Line]) -> float:
    """Inches that the longest label takes beside an axis."""
    return max(0.8, 0.065 * max(len(line.label) for line in lines))


PHASES = ("training", "server", "surveys", "evaluation")


def time_bars(experiment: Experiment) -> Any:
    """Seconds of a run by phase, mean over seeds; ``other`` is what no phase was recorded for."""
    lines = experiment.lines
    figure, axes = pyplot().subplots(figsize=(4.4 + _label_width(lines), 1.2 + 0.34 * len(lines)))
    results = [r for line in lines for r in line.results]
    phases = [phase for phase in PHASES if any(phase in r.phases for r in results)]
    labels, start = [line.label for line in lines], np.zeros(len(lines))
    for phase, colour in zip((*phases, "other"), COLOURS, strict=False):
        means = [np.mean([_seconds(r, phase) for r in line.results]) for line in lines]
        length = np.array(means).clip(min=0)
        axes.barh(labels, length, left=start, label=phase, color=colour, height=0.65)
        start += length
    axes.invert_yaxis()
    axes.set(xlabel="seconds a run")
    return legend(figure, axes)


def _seconds(result: Result, phase: str) -> float:
    if phase == "other":
        return result.seconds - sum(result.phases.values())
    return result.phases.get(phase, 0.0)


def accuracy_matrix(line: Line) -> Any:
    """Accuracy on each task after each task."""
    tasks = len(line.results[0].task_sizes)
    mean = np.full((tasks, tasks), np.nan)
    for t in range(tasks):
        mean[t, : t + 1] = np.mean([r.accuracy[t] for r in line.results], 0)
    figure, axes = pyplot().subplots(figsize=(1.3 + 0.42 * tasks, 1 + 0.36 * tasks))
    heat(axes, mean, "{:.0f}", "Greens", 0, 100)
    ticks = np.arange(tasks) + 0.5
    axes.set(xlabel="accuracy on task", ylabel="after task", xticks=ticks, yticks=ticks)
    axes.set_xticklabels(range(1, tasks + 1))
    axes.set_yticklabels(range(1, tasks + 1))
    return figure


PLOTS: tuple[tuple[str, str, Callable[[Experiment], Any]], ...] = (
    (
        "accuracy",
        "Accuracy over all classes seen, after each task; band: standard deviation over seeds",
        accuracy_curves,
    ),
    (
        "forgetting",
        "Forgetting of each task, points: its best accuracy before the end minus its last, mean over seeds",
        forgetting_map,
    ),
    ("bytes", "Final accuracy against all bytes sent", accuracy_against_bytes),
    ("partition", "Training images of each client in each task", partition_map),
    ("loss", "Training loss in each round", loss_curves),
    ("time", "Time by phase", time_bars),
)


def write_figures(experiment: Experiment, folder: Path) -> list[Path]:
    """Every figure as PNG and PDF."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, _, figure in figures(experiment, "black"):
        stem = re.sub(r"[^\w=.-]+", "-", name).strip("-")
        for end in ("png", "pdf"):
            written.append(folder / f"{stem}.{end}")
            figure.savefig(
                written[-1], dpi=160, **({"metadata": {"CreationDate": None}} if end == "pdf" else {})
            )
        pyplot().close(figure)
    return written


def _losses(path: Path) -> np.ndarray:
    """Loss of each round, NaN where nobody drawn had data."""
    try:
        return np.array([r["loss"] for r in read_lines(path, "list of rounds")], dtype=float)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise FczooError(
            f"{path} is no valid list of rounds: a round has no loss that is a number"
        ) from error
