"""The figures of an experiment."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from fczoo.core.errors import FczooError
from fczoo.core.files import read_lines
from fczoo.core.metrics import drops, seen_accuracy
from fczoo.federation.result import Result
from fczoo.reports.figure import Bars, Curves, Figure, Heat, Points, counted
from fczoo.reports.insights import insights
from fczoo.reports.run_folder import ROUNDS
from fczoo.reports.runs import Experiment, Line


def colour_order(experiments: Iterable[Experiment]) -> dict[str, int]:
    """Number the rows of a report: a row has the colour of its number in every figure."""
    labels = (line.label for experiment in experiments for line in experiment.lines)
    return {label: i for i, label in enumerate(dict.fromkeys(labels))}


def figures(experiment: Experiment) -> Iterator[Figure]:
    """All that there is to draw: of the experiment, then each line's accuracy matrix and diagnostics."""
    yield from overview(experiment)
    for line in experiment.lines:
        yield accuracy_matrix(line)
    for line in experiment.lines:
        yield from insights(line)


def overview(experiment: Experiment) -> Iterator[Figure]:
    """The figures in which all lines stand beside each other, and the partition's."""
    yield accuracy_curves(experiment)
    if len(experiment.first.task_sizes) > 1:
        yield forgetting_map(experiment)
    yield accuracy_against_bytes(experiment)
    yield accuracy_against_seconds(experiment)
    if any(cell.folder for line in experiment.lines for cell in line.cells):  # an archive keeps no rounds
        yield loss_curves(experiment)
    yield time_bars(experiment)
    if experiment.split.counts:  # a file of one result has none
        yield partition_map(experiment)


def accuracy_curves(experiment: Experiment) -> Curves:
    """Pooled accuracy after each task."""
    tasks = range(len(experiment.first.task_sizes))
    return Curves(
        name="accuracy",
        caption="Accuracy over all classes seen, after each task; band: standard deviation over seeds",
        x="tasks learned",
        y="accuracy over all classes seen, %",
        curves={
            line.label: np.array(
                [[seen_accuracy(r.accuracy, r.test_counts, t) for t in tasks] for r in line.results]
            )
            for line in experiment.lines
        },
    )


def forgetting_map(experiment: Experiment) -> Heat:
    """For every method and old task the drop from its best accuracy to its last."""
    lines = experiment.lines
    return Heat(
        name="forgetting",
        caption="Forgetting of each task, points: best accuracy before the end minus the last; mean of seeds",
        x="task",
        y="",
        values=np.array([np.mean([drops(r.accuracy) for r in line.results], 0) for line in lines]),
        rows=[line.label for line in lines],
        columns=counted(len(experiment.first.task_sizes) - 1),
        colours="blue to red",
        low=-100,
        high=100,
    )


def accuracy_against_bytes(experiment: Experiment) -> Points:
    """Final pooled accuracy against everything that went over the wire."""
    return _against(
        experiment,
        "bytes",
        "Final accuracy against all bytes sent",
        "MB sent in the run, all clients, up and down",
        lambda r: (r.bytes_up + r.bytes_down) / 1e6,
    )


def accuracy_against_seconds(experiment: Experiment) -> Points:
    """Final pooled accuracy against the time of the run."""
    return _against(
        experiment,
        "seconds",
        "Final accuracy against the seconds of a run, which compare where hardware and load are the same",
        "seconds of the run",
        lambda r: r.seconds,
    )


def _against(
    experiment: Experiment, name: str, caption: str, x: str, cost: Callable[[Result], float]
) -> Points:
    """Final pooled accuracy against a cost on a logarithmic axis; runs that cost nothing have no place."""
    points = {
        line.label: np.array([[cost(r), r.metrics["A_N"]] for r in line.results if cost(r) > 0]).reshape(
            -1, 2
        )
        for line in experiment.lines
    }
    means = {
        line.label: points[line.label].mean(0)
        for line in experiment.lines
        if line.competes and len(points[line.label])
    }
    return Points(
        name=name,
        caption=f"{caption}; the line joins those that no other beats in both",
        x=x,
        y="A_N, %",
        points=points,
        front=front(means),
        log=True,
    )


def front(means: dict[str, np.ndarray]) -> list[str]:
    """Labels of the points (cost, value) that no other beats in both, in order of their cost."""
    best, kept = -np.inf, []
    for label, (_, value) in sorted(means.items(), key=lambda item: (item[1][0], -item[1][1])):
        if value > best:
            best = value
            kept.append(label)
    return kept


def partition_map(experiment: Experiment) -> Heat:
    """Training images of every client in every task."""
    counts = np.array(experiment.split.counts, dtype=float)
    return Heat(
        name="partition",
        caption="Training images of each client in each task",
        x="client",
        y="task",
        values=counts,
        rows=counted(counts.shape[0]),
        columns=counted(counts.shape[1], first=0),
        colours="blue",
    )


def loss_curves(experiment: Experiment) -> Curves:
    """Mean training loss of the clients in each round."""
    curves = {}
    for line in experiment.lines:
        losses = [_losses(cell.folder / ROUNDS) for cell in line.cells if cell.folder]
        if shortest := min(map(len, losses), default=0):
            curves[line.label] = np.array([c[:shortest] for c in losses])
    return Curves(
        name="loss",
        caption="Training loss in each round",
        x="round",
        y="loss, each method's own",
        curves=curves,
        marks=False,
    )


PHASES = ("training", "server", "surveys", "evaluation")


def time_bars(experiment: Experiment) -> Bars:
    """Seconds of a run by phase, mean over seeds; ``other`` is what no phase was recorded for."""
    lines = experiment.lines
    there = {phase for line in lines for r in line.results for phase in r.phases}
    phases = (*(phase for phase in PHASES if phase in there), "other")
    return Bars(
        name="time",
        caption="Time by phase",
        x="seconds a run",
        y="",
        labels=[line.label for line in lines],
        parts={
            phase: [max(0.0, float(np.mean([_seconds(r, phase) for r in line.results]))) for line in lines]
            for phase in phases
        },
    )


def _seconds(result: Result, phase: str) -> float:
    if phase == "other":
        return result.seconds - sum(result.phases.values())
    return result.phases.get(phase, 0.0)


def accuracy_matrix(line: Line) -> Heat:
    """Accuracy on each task after each task."""
    tasks = len(line.results[0].task_sizes)
    mean = np.full((tasks, tasks), np.nan)
    for t in range(tasks):
        mean[t, : t + 1] = np.mean([r.accuracy[t] for r in line.results], 0)
    return Heat(
        name=f"matrix {line.label}",
        caption=f"{line.label}: accuracy on each task after each task, %, mean over seeds",
        x="accuracy on task",
        y="after task",
        values=mean,
        rows=counted(tasks),
        columns=counted(tasks),
        colours="green",
        low=0,
        high=100,
    )


def _losses(path: Path) -> np.ndarray:
    """Loss of each round, NaN where nobody drawn had data."""
    try:
        return np.array([r["loss"] for r in read_lines(path, "list of rounds")], dtype=float)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise FczooError(
            f"{path} is no valid list of rounds: a round has no loss that is a number"
        ) from error
