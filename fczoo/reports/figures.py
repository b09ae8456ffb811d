"""Figures of an experiment."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from fczoo.core.errors import FczooError
from fczoo.core.files import read_lines
from fczoo.core.metrics import drops, seen_accuracy
from fczoo.federation.result import Result
from fczoo.reports.detail_figures import (
    class_map,
    client_map,
    confusion_maps,
    diagnostic_figures,
    personal_map,
)
from fczoo.reports.figure_data import Bars, Curves, Figure, HeatMap, Points, number_labels
from fczoo.reports.learning_curves import (
    accuracy_over_bytes,
    accuracy_over_hours,
    accuracy_over_rounds,
)
from fczoo.reports.run_folder import ROUNDS
from fczoo.reports.runs import Experiment, Line


def colour_order(experiments: Iterable[Experiment]) -> dict[str, int]:
    """Number the rows of a report; the number determines a row's colour in every figure.

    Args:
        experiments: All experiments of the report.

    Returns:
        Numbers from 0 by row label.
    """
    labels = (line.label for e in experiments for line in (*e.lines, *e.other_compression_lines))
    return {label: i for i, label in enumerate(dict.fromkeys(labels))}


def figures(experiment: Experiment) -> Iterator[Figure]:
    """Yield all figures: the overview, each line's accuracy and confusion matrices, diagnostics.

    Args:
        experiment: Experiment to show.
    """
    yield from overview(experiment)
    for line in experiment.lines:
        yield accuracy_matrix(line)
        yield from confusion_maps(line)
    for line in experiment.lines:
        yield from diagnostic_figures(line)


def overview(experiment: Experiment) -> Iterator[Figure]:
    """Yield the figures that compare all lines, and the figure of the partition.

    Args:
        experiment: Experiment to show.
    """
    yield accuracy_curves(experiment)
    for plot in (accuracy_over_rounds, accuracy_over_bytes, accuracy_over_hours):
        curves = plot(experiment)
        if any(values.shape[1] > 1 for values in curves.curves.values()):
            yield curves
    if len(experiment.first_result.task_sizes) > 1:
        yield forgetting_map(experiment)
    if (clients := client_quantiles(experiment)).curves:
        yield clients
    maps = class_map(experiment), client_map(experiment), personal_map(experiment)
    yield from filter(None, maps)
    yield accuracy_against_bytes(experiment)
    yield accuracy_against_seconds(experiment)
    # archives have no losses per round
    if any(record.folder for line in experiment.lines for record in line.records):
        yield loss_curves(experiment)
    yield time_bars(experiment)
    if experiment.split.counts:  # a saved result has no counts
        yield partition_map(experiment)


def accuracy_curves(experiment: Experiment) -> Curves:
    """Plot the accuracy over all seen classes after each task.

    Args:
        experiment: Experiment to show.

    Returns:
        Curves in percent, one row per run.
    """
    tasks = range(len(experiment.first_result.task_sizes))
    return Curves(
        name="accuracy",
        caption=(
            "Accuracy over all classes seen, after each task; band: standard deviation over seeds"
        ),
        x="tasks learned",
        y="accuracy over all classes seen, %",
        curves={
            line.label: np.array(
                [[seen_accuracy(r.accuracy, r.test_counts, t) for t in tasks] for r in line.results]
            )
            for line in experiment.lines
        },
    )


def forgetting_map(experiment: Experiment) -> HeatMap:
    """Plot the drop of each old task's accuracy from its best to its last value.

    Args:
        experiment: Experiment to show.

    Returns:
        Heat map [lines, tasks - 1] in points, mean over seeds.
    """
    lines = experiment.lines
    return HeatMap(
        name="forgetting",
        caption=(
            "Forgetting of each task, points: best accuracy before the last task minus final "
            "accuracy; mean over seeds"
        ),
        x="task",
        y="",
        values=np.array([np.mean([drops(r.accuracy) for r in line.results], 0) for line in lines]),
        rows=[line.label for line in lines],
        columns=number_labels(len(experiment.first_result.task_sizes) - 1),
        colours="blue to red",
        low=-100,
        high=100,
    )


def accuracy_against_bytes(experiment: Experiment) -> Points:
    """Plot final accuracy against all transferred bytes.

    Args:
        experiment: Experiment to show.

    Returns:
        Points of MB and A_N in percent, one per run, including runs with other compression.
    """
    return _accuracy_against_cost(
        (*experiment.lines, *experiment.other_compression_lines),
        "bytes",
        "Final accuracy against all bytes sent",
        "MB sent in the run, all clients, up and down",
        lambda r: (r.bytes_up + r.bytes_down) / 1e6,
    )


def accuracy_against_seconds(experiment: Experiment) -> Points:
    """Plot final accuracy against the time of the run.

    Args:
        experiment: Experiment to show.

    Returns:
        Points of seconds and A_N in percent, one per run.
    """
    return _accuracy_against_cost(
        experiment.lines,
        "seconds",
        "Final accuracy against the time of a run; times are comparable only with equal hardware "
        "and load",
        "seconds of the run",
        lambda r: r.seconds,
    )


def _accuracy_against_cost(
    lines: Sequence[Line], name: str, caption: str, x: str, cost: Callable[[Result], float]
) -> Points:
    """Plot final accuracy against a cost on a logarithmic axis, without runs of zero cost."""
    points = {
        line.label: np.array(
            [[cost(r), r.metrics["A_N"]] for r in line.results if cost(r) > 0]
        ).reshape(-1, 2)
        for line in lines
    }
    means = {
        line.label: points[line.label].mean(0)
        for line in lines
        if line.is_ranked and len(points[line.label])
    }
    return Points(
        name=name,
        caption=f"{caption}; line: Pareto front of the means",
        x=x,
        y="A_N, %",
        points=points,
        front=pareto_front(means),
        log=True,
    )


def pareto_front(means: dict[str, np.ndarray]) -> list[str]:
    """Return the labels of the Pareto front, in order of cost.

    Args:
        means: Cost (lower is better) and value (higher is better) [2], by label.
    """
    best, front_labels = -np.inf, []
    for label, (_, value) in sorted(means.items(), key=lambda item: (item[1][0], -item[1][1])):
        if value > best:
            best = value
            front_labels.append(label)
    return front_labels


QUANTILES = np.linspace(0, 1, 21)


def client_quantiles(experiment: Experiment) -> Curves:
    """Plot the quantiles of the accuracy over clients.

    Args:
        experiment: Experiment to show; runs without accuracies of clients are left out.
    """
    curves = {}
    for line in experiment.lines:
        clients = [[q for q in r.client_accuracy if q is not None] for r in line.results]
        if values := [np.quantile(of_run, QUANTILES) for of_run in clients if of_run]:
            curves[line.label] = np.array(values)
    return Curves(
        name="clients",
        caption=(
            "Accuracy of the global model for the clients, each on test images with its own class "
            "mix, after the last task; from the worst client to the best"
        ),
        x="clients with at most this accuracy, %",
        y="accuracy for a client, %",
        curves=curves,
        positions=dict.fromkeys(curves, 100 * QUANTILES),
        marks=False,
    )


def partition_map(experiment: Experiment) -> HeatMap:
    """Plot the training images per client and task.

    Args:
        experiment: Experiment whose split has counts.

    Returns:
        Heat map [tasks, clients].
    """
    counts = np.array(experiment.split.counts, dtype=float)
    return HeatMap(
        name="partition",
        caption="Training images of each client in each task",
        x="client",
        y="task",
        values=counts,
        rows=number_labels(counts.shape[0]),
        columns=number_labels(counts.shape[1], first=0),
        colours="blue",
    )


def loss_curves(experiment: Experiment) -> Curves:
    """Plot the clients' mean training loss per round.

    Args:
        experiment: Experiment from run folders; runs of archives have no losses and are left out.

    Returns:
        Curves, each with the length of the line's shortest run.

    Raises:
        FczooError: A list of rounds is invalid.
    """
    curves = {}
    for line in experiment.lines:
        losses = [_losses(record.folder / ROUNDS) for record in line.records if record.folder]
        if round_count := min(map(len, losses), default=0):
            curves[line.label] = np.array([c[:round_count] for c in losses])
    return Curves(
        name="loss",
        caption="Training loss in each round",
        x="round",
        y="loss, as each method defines it",
        curves=curves,
        marks=False,
    )


PHASES = ("training", "server", "surveys", "evaluation", "personal")


def time_bars(experiment: Experiment) -> Bars:
    """Plot seconds per phase, mean over seeds; ``other`` is time outside the recorded phases.

    Args:
        experiment: Experiment to show.
    """
    lines = experiment.lines
    recorded_phases = {phase for line in lines for r in line.results for phase in r.phases}
    phases = (*(phase for phase in PHASES if phase in recorded_phases), "other")
    return Bars(
        name="time",
        caption="Time by phase",
        x="seconds per run",
        y="",
        labels=[line.label for line in lines],
        parts={
            phase: [
                max(0.0, float(np.mean([_seconds(r, phase) for r in line.results])))
                for line in lines
            ]
            for phase in phases
        },
    )


def _seconds(result: Result, phase: str) -> float:
    if phase == "other":
        return result.seconds - sum(result.phases.values())
    return result.phases.get(phase, 0.0)


def accuracy_matrix(line: Line) -> HeatMap:
    """Plot the accuracy on each task after each task.

    Args:
        line: Row of a table.

    Returns:
        Heat map [tasks, tasks] in percent, mean over seeds; NaN above the diagonal.
    """
    tasks = len(line.results[0].task_sizes)
    mean = np.full((tasks, tasks), np.nan)
    for t in range(tasks):
        mean[t, : t + 1] = np.mean([r.accuracy[t] for r in line.results], 0)
    return HeatMap(
        name=f"matrix {line.label}",
        caption=f"{line.label}: accuracy on each task after each task, %, mean over seeds",
        x="accuracy on task",
        y="after task",
        values=mean,
        rows=number_labels(tasks),
        columns=number_labels(tasks),
        colours="green",
        low=0,
        high=100,
    )


def _losses(path: Path) -> np.ndarray:
    """Read the loss of each round; NaN if no participant had data."""
    try:
        return np.array([r["loss"] for r in read_lines(path, "list of rounds")], dtype=float)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise FczooError(
            f"{path} is not a valid list of rounds: a round has no numeric loss"
        ) from error
