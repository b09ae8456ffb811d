"""Learning curves: accuracy over rounds, bytes and hours, and the cost to reach an accuracy."""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from fczoo.federation.result import Result
from fczoo.reports.figure_data import Curves
from fczoo.reports.runs import Experiment, Line

OVER_SEEDS = "mean over seeds; band: standard deviation of the accuracy over seeds"


class CurvePoint(NamedTuple):
    """Accuracy over all classes seen so far, at one point of a run."""

    task: int
    rounds: int  # since the start of the run
    accuracy: float  # percent
    megabytes: float  # sent since the start of the run, up and down, over all clients
    hours: float | None = None  # virtual time since the start; None without client devices


def curve_points(result: Result) -> list[CurvePoint]:
    """Return the curve of a run, with the rounds counted over all tasks.

    Args:
        result: Result of the run; results of older versions have no curve.
    """
    points, earlier_rounds = [], 0
    hours: list[float | None] = [seconds / 3600 for seconds in result.curve_seconds]
    times = iter(hours or [None] * len(result.curve))
    for task, entries in groupby(result.curve, lambda entry: entry[0]):
        rounds = 0
        for _, rounds, accuracy, size in entries:
            points.append(
                CurvePoint(task, earlier_rounds + rounds, accuracy, size / 1e6, next(times))
            )
        earlier_rounds += rounds
    return points


def rounds_to(result: Result, accuracy: float) -> float | None:
    """Return the number of rounds until the accuracy over all classes reaches a value.

    Only points of the last task count, because earlier not all classes have arrived.

    Args:
        result: Result of the run.
        accuracy: Accuracy in percent.

    Returns:
        Rounds since the start of the run; None if the curve does not reach the accuracy.
    """
    point = _first_point_at(result, accuracy)
    return point.rounds if point else None


def megabytes_to(result: Result, accuracy: float) -> float | None:
    """Return the MB sent until the accuracy over all classes reaches a value.

    Args:
        result: Result of the run.
        accuracy: Accuracy in percent.

    Returns:
        MB of all clients since the start of the run; None if the curve does not reach the accuracy.
    """
    point = _first_point_at(result, accuracy)
    return point.megabytes if point else None


def hours_to(result: Result, accuracy: float) -> float | None:
    """Return the virtual hours until the accuracy over all classes reaches a value.

    Args:
        result: Result of the run.
        accuracy: Accuracy in percent.

    Returns:
        Hours since the start of the run; None without client devices, or if the curve does not
        reach the accuracy.
    """
    point = _first_point_at(result, accuracy)
    return point.hours if point else None


def _first_point_at(result: Result, accuracy: float) -> CurvePoint | None:
    last = len(result.task_sizes) - 1
    points = curve_points(result)
    return next((p for p in points if p.task == last and p.accuracy >= accuracy), None)


def accuracy_over_rounds(experiment: Experiment) -> Curves:
    """Plot the accuracy over all classes seen against the rounds of the run.

    Args:
        experiment: Experiment to show; methods without rounds are left out.
    """
    by_line = {
        label: p for label, p in _points_by_line(experiment.lines).items() if p[0][-1].rounds
    }
    return _accuracy_curves(
        "rounds",
        "against the rounds of the run; it falls where new classes arrive; band: standard "
        "deviation over seeds",
        "round of the run",
        by_line,
        {
            label: np.array([point.rounds for point in runs[0]], float)
            for label, runs in by_line.items()
        },
    )


def accuracy_over_bytes(experiment: Experiment) -> Curves:
    """Plot the accuracy over all classes seen against the bytes sent.

    Args:
        experiment: Experiment to show, including its rows with other compression.
    """
    by_line = _points_by_line((*experiment.lines, *experiment.other_compression_lines))
    return _accuracy_curves(
        "bytes",
        f"against all bytes sent by then, {OVER_SEEDS}",
        "MB sent in the run so far, all clients, up and down",
        by_line,
        {
            label: np.mean([[point.megabytes for point in run] for run in runs], 0)
            for label, runs in by_line.items()
        },
    )


def accuracy_over_hours(experiment: Experiment) -> Curves:
    """Plot the accuracy over all classes seen against the hours of the virtual clock.

    Args:
        experiment: Experiment to show; runs without ``--client-devices`` are left out.
    """
    lines = (*experiment.lines, *experiment.other_compression_lines)
    by_line = _points_by_line([x for x in lines if all(r.curve_seconds for r in x.results)])
    return _accuracy_curves(
        "hours",
        f"against the hours of the virtual clock, {OVER_SEEDS}",
        "hours of the virtual clock",
        by_line,
        {
            label: np.mean([[point.hours or 0.0 for point in run] for run in runs], 0)
            for label, runs in by_line.items()
        },
    )


def _accuracy_curves(
    quantity: str,
    description: str,
    x: str,
    by_line: dict[str, list[list[CurvePoint]]],
    positions: dict[str, np.ndarray],
) -> Curves:
    """Plot the accuracy over a quantity, whose values are ``positions``."""
    return Curves(
        name=f"accuracy over {quantity}",
        caption=f"Accuracy over all classes seen so far, {description}",
        x=x,
        y="accuracy over all classes seen, %",
        curves={label: _accuracies(runs) for label, runs in by_line.items()},
        positions=positions,
        marks=False,
    )


def _points_by_line(lines: Sequence[Line]) -> dict[str, list[list[CurvePoint]]]:
    """Return the curves of each line's runs; lines without curves are left out."""
    curves = {line.label: _shared_points(line) for line in lines}
    return {label: runs for label, runs in curves.items() if runs}


def _shared_points(line: Line) -> list[list[CurvePoint]]:
    """Return the curves of a line's runs at the points that all runs have.

    Runs with different ``eval_every`` share at least the ends of tasks.
    """
    runs = [curve_points(result) for result in line.results if result.curve]
    places = [_places(run) for run in runs]
    shared_places = set.intersection(*(set(by_place) for by_place in places)) if places else set()
    return [
        [by_place[place] for place in by_place if place in shared_places] for by_place in places
    ]


def _places(run: Sequence[CurvePoint]) -> dict[tuple[int, int, bool], CurvePoint]:
    """Return points by task, round, and whether it is the task's last point."""
    ends = {point.task: i for i, point in enumerate(run)}
    return {(point.task, point.rounds, ends[point.task] == i): point for i, point in enumerate(run)}


def _accuracies(runs: Sequence[Sequence[CurvePoint]]) -> np.ndarray:
    return np.array([[point.accuracy for point in run] for run in runs], float)
