"""Heat maps of classes and clients, and of the confusion between tasks."""

from collections.abc import Callable, Sequence

import numpy as np

from fczoo.core.class_metrics import confusion_matrix, task_confusion
from fczoo.federation.result import Result
from fczoo.reports.figure import Heat, number_labels
from fczoo.reports.runs import Experiment, Line

MOST_COLUMNS = 50  # of a heat map that a reader can take in


def class_map(experiment: Experiment) -> Heat | None:
    """Return the accuracy on each class after the last task.

    Args:
        experiment: Experiment to show.

    Returns:
        Heat map [lines, classes] in percent, mean over seeds; None where no run recorded it, or
        with more than ``MOST_COLUMNS`` classes.
    """
    return _map_of(
        experiment,
        lambda result: result.class_accuracy[-1] if result.class_accuracy else [],
        name="classes",
        caption="Accuracy on each class after the last task, %, in order of arrival; mean of seeds",
        x="class",
        first=1,
    )


def client_map(experiment: Experiment) -> Heat | None:
    """Return the accuracy of the global model for each client after the last task.

    Args:
        experiment: Experiment to show.

    Returns:
        Heat map [lines, clients] in percent, mean over seeds; None where no run recorded it, or
        with more than ``MOST_COLUMNS`` clients.
    """
    return _map_of(
        experiment,
        lambda result: result.client_accuracy,
        name="client accuracies",
        caption=(
            "Accuracy of the global model for each client, on test images with its own class mix, "
            "after the last task, %; mean of seeds"
        ),
        x="client",
        first=0,
    )


def _map_of(
    experiment: Experiment,
    values_of: Callable[[Result], Sequence[float | None]],
    *,
    name: str,
    caption: str,
    x: str,
    first: int,
) -> Heat | None:
    """Return a heat map of one list of percentages per run, over the lines that have it."""
    rows = {}
    for line in experiment.lines:
        runs = [accuracies for r in line.results if (accuracies := values_of(r))]
        if runs:
            rows[line.label] = np.mean(np.array(runs, float), 0)
    if not rows or len(next(iter(rows.values()))) > MOST_COLUMNS:
        return None
    means = np.array([*rows.values()])
    return Heat(
        name=name,
        caption=caption,
        x=x,
        y="",
        values=means,
        rows=[*rows],
        columns=number_labels(means.shape[1], first=first),
        colours="green",
        low=0,
        high=100,
    )


def confusion_map(line: Line) -> Heat | None:
    """Return the share of each task's test images that are taken for a class of each task.

    Args:
        line: Row of a table.

    Returns:
        Heat map [tasks, tasks] in percent after the last task, mean over seeds; None where no run
        recorded it, or where tasks share classes.
    """
    sizes = line.results[0].task_sizes
    runs = [r for r in line.results if r.confusion and sum(sizes) == len(r.class_accuracy[-1])]
    if not runs or len(sizes) > MOST_COLUMNS:
        return None
    shares = [task_confusion(confusion_matrix(r.confusion, sum(sizes)), sizes) for r in runs]
    return Heat(
        name=f"confusion {line.label}",
        caption=(
            f"{line.label}: test images of each task that are taken for a class of each task, "
            "after the last task, %; mean of seeds"
        ),
        x="task of the answer",
        y="task of the image",
        values=np.mean(shares, 0),
        rows=number_labels(len(sizes)),
        columns=number_labels(len(sizes)),
        colours="orange",
        low=0,
        high=100,
        of_methods=False,
    )
