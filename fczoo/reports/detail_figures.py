"""Detailed figures: heat maps of classes, clients and confusion, and a run's diagnostics."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from fczoo.core.class_metrics import confusion_matrix, task_confusion
from fczoo.core.errors import FczooError
from fczoo.federation.diagnostics import FILE, read
from fczoo.federation.result import Result
from fczoo.reports.figure_data import Colours, Curves, Figure, HeatMap, Points, number_labels
from fczoo.reports.runs import Experiment, Line

MAX_COLUMNS = 50  # columns of a readable heat map
MAX_CLASSES = 20  # classes of a readable confusion matrix


def class_map(experiment: Experiment) -> HeatMap | None:
    """Plot the accuracy on each class after the last task.

    Args:
        experiment: Experiment to show.

    Returns:
        Heat map [lines, classes] in percent, mean over seeds; None if no run recorded it, or with
        more than ``MAX_COLUMNS`` classes.
    """
    return _accuracy_map(
        experiment,
        lambda result: result.class_accuracy[-1] if result.class_accuracy else [],
        name="classes",
        caption=(
            "Accuracy on each class, in order of arrival, after the last task, %; mean over seeds"
        ),
        x="class",
        first=1,
    )


def client_map(experiment: Experiment) -> HeatMap | None:
    """Plot the accuracy of the global model for each client after the last task.

    Args:
        experiment: Experiment to show.

    Returns:
        Heat map [lines, clients] in percent, mean over seeds; None if no run recorded it, or with
        more than ``MAX_COLUMNS`` clients.
    """
    return _accuracy_map(
        experiment,
        lambda result: result.client_accuracy,
        name="client accuracies",
        caption=(
            "Accuracy of the global model for each client, on test images with its own class mix, "
            "after the last task, %; mean over seeds"
        ),
        x="client",
        first=0,
    )


def personal_map(experiment: Experiment) -> HeatMap | None:
    """Plot the accuracy of each client's own model, with ``--personal-epochs``.

    Args:
        experiment: Experiment to show.

    Returns:
        Heat map as from ``client_map``.
    """
    return _accuracy_map(
        experiment,
        lambda result: result.personal_accuracy,
        name="personal accuracies",
        caption=(
            "Accuracy of each client's own model after fine-tuning, on test images with its own "
            "class mix, %; mean over seeds"
        ),
        x="client",
        first=0,
    )


def _accuracy_map(
    experiment: Experiment,
    values_of: Callable[[Result], Sequence[float | None]],
    *,
    name: str,
    caption: str,
    x: str,
    first: int,
) -> HeatMap | None:
    """Return a heat map of one list of percentages per run; lines without it are left out."""
    rows = {}
    for line in experiment.lines:
        runs = [accuracies for r in line.results if (accuracies := values_of(r))]
        if runs:
            rows[line.label] = np.mean(np.array(runs, float), 0)
    if not rows or len(next(iter(rows.values()))) > MAX_COLUMNS:
        return None
    means = np.array([*rows.values()])
    return HeatMap(
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


def confusion_maps(line: Line) -> Iterator[HeatMap]:
    """Yield the confusion matrices of tasks and of classes, if a line has them.

    Args:
        line: Row of a table.
    """
    yield from filter(None, (confusion_map(line), class_confusion_map(line)))


def confusion_map(line: Line) -> HeatMap | None:
    """Plot which share of each task's test images is predicted as a class of each task.

    Args:
        line: Row of a table.

    Returns:
        Heat map [tasks, tasks] in percent after the last task, mean over seeds; None if no run
        recorded it, if tasks share classes, or with more than ``MAX_COLUMNS`` tasks.
    """
    sizes = line.results[0].task_sizes
    runs = [r for r in line.results if r.confusion and sum(sizes) == len(r.class_accuracy[-1])]
    if not runs or len(sizes) > MAX_COLUMNS:
        return None
    shares = [task_confusion(confusion_matrix(r.confusion, sum(sizes)), sizes) for r in runs]
    return HeatMap(
        name=f"confusion {line.label}",
        caption=(
            f"{line.label}: confusion of tasks after the last task, % of the test images of a "
            "task; mean over seeds"
        ),
        x="task of the predicted class",
        y="task of the image",
        values=np.mean(shares, 0),
        rows=number_labels(len(sizes)),
        columns=number_labels(len(sizes)),
        colours="orange",
        low=0,
        high=100,
        of_methods=False,
    )


def class_confusion_map(line: Line) -> HeatMap | None:
    """Plot which share of each class's test images is predicted as each class.

    Args:
        line: Row of a table.

    Returns:
        Heat map [classes, classes] in percent after the last task, mean over seeds; None if no run
        recorded it, or with more than ``MAX_CLASSES`` classes.
    """
    runs = [r for r in line.results if r.confusion]
    count = len(line.results[0].class_order)
    if not runs or count > MAX_CLASSES:
        return None
    matrices = [np.array(confusion_matrix(r.confusion, count), float) for r in runs]
    shares = [100 * m / np.maximum(m.sum(1, keepdims=True), 1) for m in matrices]
    return HeatMap(
        name=f"confusion of classes {line.label}",
        caption=(
            f"{line.label}: confusion of classes after the last task, % of the test images of a "
            "class; classes in order of arrival; mean over seeds"
        ),
        x="predicted class",
        y="true class",
        values=np.mean(shares, 0),
        rows=number_labels(count),
        columns=number_labels(count),
        colours="orange",
        low=0,
        high=100,
        of_methods=False,
    )


Records = dict[str, list[dict[str, Any]]]  # records by kind, one per task


def diagnostic_figures(line: Line) -> Iterator[Figure]:
    """Yield figures of the diagnostics of one line's first seed.

    Args:
        line: Row of a table; one from an archive has no diagnostics.

    Raises:
        FczooError: The records are invalid.
    """
    folder = line.records[0].folder
    if folder is None:  # an archive has no diagnostics
        return
    try:
        yield from _figures_of_records(line, read(folder))
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise FczooError(
            f"{folder / FILE} is not a valid list of diagnostics: {type(error).__name__} {error}"
        ) from error


def _figures_of_records(line: Line, diagnostics: Sequence[dict[str, Any]]) -> Iterator[Figure]:
    records: Records = {}
    for record in diagnostics:
        records.setdefault(record["kind"], []).append(record)
    seed = f"{line.label}, seed {line.seeds[0]}"
    if "confusion" in records:
        yield _task_map(
            f"why confusion {line.label}",
            f"{seed}: images of a task predicted as a class of another, % (after the last task)",
            "task of the predicted class",
            100 * np.array(records["confusion"][-1]["matrix"], dtype=float),
            "orange",
        )
    if "clients" in records:
        yield _clients(records["clients"], line.label, seed)
    if "lora" in records:
        yield _task_map(
            f"why lora {line.label}",
            f"{seed}: cosine between the LoRA updates of the tasks",
            "task",
            np.array(records["lora"][-1]["matrix"], dtype=float),
            "purple to orange",
            "{:.1f}",
            (-1, 1),
        )
    if "choices" in records:
        yield _choices(records["choices"][-1], line.label, seed)
    if "reweight" in records:
        yield _reweight(records["reweight"], line.label, seed)
    if "task drift" in records:
        yield _drift(records["task drift"], line.label, seed)


def _task_map(
    name: str,
    caption: str,
    columns: str,
    values: np.ndarray,
    colours: Colours,
    show: str = "{:.0f}",
    limits: tuple[float, float] = (0, 100),
) -> HeatMap:
    """Return a heat map of tasks against tasks."""
    return HeatMap(
        name=name,
        caption=caption,
        x=columns,
        y="task",
        values=values.astype(float),
        rows=number_labels(len(values)),
        columns=number_labels(values.shape[1]),
        colours=colours,
        show=show,
        low=limits[0],
        high=limits[1],
    )


def _clients(records: list[dict[str, Any]], label: str, seed: str) -> HeatMap:
    count = 1 + max(c["client"] for r in records for c in r["clients"])
    values = np.full((len(records), count), np.nan)
    for row, record in enumerate(records):
        for client in record["clients"]:
            values[row, client["client"]] = client["entropy"]
    return HeatMap(
        name=f"why clients {label}",
        caption=(
            f"{seed}: evenness (normalised entropy) of each client's predictions on the task's "
            "test images, after local training"
        ),
        x="client",
        y="task",
        values=values,
        rows=[str(r["task"] + 1) for r in records],
        columns=number_labels(count, first=0),
        colours="purple",
        show="{:.1f}",
        low=0,
        high=1,
    )


def _choices(record: dict[str, Any], label: str, seed: str) -> HeatMap:
    values = 100 * np.array(record["share"], dtype=float)
    return HeatMap(
        name=f"why choices {label}",
        caption=f"{seed}: how often the test images of a task select each prompt, % (last task)",
        x="prompt",
        y="images of task",
        values=values,
        rows=number_labels(len(values)),
        columns=number_labels(values.shape[1]),
        colours="green",
        low=0,
    )


def _reweight(records: list[dict[str, Any]], label: str, seed: str) -> Points:
    return Points(
        name=f"why reweight {label}",
        caption=f"{seed}: weight of a client's prototype against the client's share of the class",
        x="client's share of the class's images",
        y="weight of the client's prototype",
        points={
            f"task {r['task'] + 1}": np.stack(
                [np.ravel(r["share"]), np.ravel(r["weights"])], 1
            ).astype(float)
            for r in records
        },
        diagonal=True,
        of_methods=False,
    )


def _drift(records: list[dict[str, Any]], label: str, seed: str) -> Curves:
    return Curves(
        name=f"why drift {label}",
        caption=f"{seed}: change of the trained tensors in each task, |end - start| / |start|",
        x="task",
        y="relative change",
        curves={
            prefix.rstrip("."): np.array([[r["by prefix"][prefix] for r in records]], dtype=float)
            for prefix in records[0]["by prefix"]
        },
        log=True,
        of_methods=False,
    )
