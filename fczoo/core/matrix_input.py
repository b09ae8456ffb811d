"""Accuracy matrices that users give: checks of their form, and their metrics as for a run."""

import math
from collections.abc import Sequence
from typing import Any

from fczoo.core.errors import FczooError
from fczoo.core.metrics import all_metrics
from fczoo.core.options import plain, plural, quote

FORM = "give rows of 1, 2, ..., T numbers, or T rows of T"


def compute_metrics(
    accuracy: Sequence[Sequence[float]], test_counts: Sequence[int] | None = None
) -> dict[str, float]:
    """Compute every metric of an accuracy matrix: A_N, Avg, FAA, Abar, forgetting, BWT and so on.

    Example: ``fczoo.compute_metrics([[90], [60, 80]])["A_N"]`` is 70. The formulas are in
    ``fczoo.core.metrics``; metrics of plug-ins are computed as well. The unit of a metric is that
    of the matrix.

    Args:
        accuracy: ``accuracy[t][i]``, the accuracy in percent on task i after task t, predicted over
            all classes seen so far: rows of 1, 2, ..., T numbers, or a matrix [T, T] whose entries
            above the diagonal are not read. NaN only for a task without test images.
        test_counts: Test images of each task [T]. Default: the same number for each.

    Returns:
        Metric -> its value.

    Raises:
        FczooError: The matrix is not of this form, a value is not a percentage, or the numbers of
            images do not fit it.
    """
    rows = _rows(accuracy)
    counts = [1] * len(rows) if test_counts is None else _counts(test_counts, len(rows))
    for t, row in enumerate(rows):
        for i, value in enumerate(row):
            if math.isnan(value) and counts[i]:
                problem = f"accuracy[{t}][{i}] is nan"
                raise FczooError(f"{problem}; give test_counts with 0 for a task without images")
            if not (math.isnan(value) or 0 <= value <= 100):
                raise FczooError(f"accuracy[{t}][{i}] is {value:g}; give percentages from 0 to 100")
    return all_metrics(rows, counts)


def _rows(accuracy: Any) -> list[list[float]]:
    """Return the lower triangle of a matrix, its diagonal included.

    Raises:
        FczooError: The matrix has another form, or an entry is not a number.
    """
    matrix = _list(accuracy)
    rows = None if matrix is None else [_list(row) for row in matrix]
    if not rows or None in rows:
        raise FczooError(f"accuracy is {quote(accuracy)}, which is not a matrix; {FORM}")
    lists = [row for row in rows if row is not None]
    lengths, tasks = [*map(len, lists)], len(lists)
    if lengths not in ([*range(1, tasks + 1)], [tasks] * tasks):
        raise FczooError(f"accuracy has {_count_rows(lengths)}; {FORM}")
    triangle = [[plain(value) for value in row[: t + 1]] for t, row in enumerate(lists)]
    for t, row in enumerate(triangle):
        for i, value in enumerate(row):
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise FczooError(f"accuracy[{t}][{i}] is {quote(value)}; give a number in percent")
    return [[*map(float, row)] for row in triangle]


def _count_rows(lengths: Sequence[int]) -> str:
    """Describe rows by their lengths: ``2 rows of 3`` or ``rows of 1, 3 and 2``."""
    if len(set(lengths)) == 1:
        return f"{plural(len(lengths), 'row')} of {lengths[0]}"
    return f"rows of {', '.join(map(str, lengths[:-1]))} and {lengths[-1]}"


def _counts(test_counts: Any, tasks: int) -> list[int]:
    """Return the numbers of test images.

    Raises:
        FczooError: There is not one whole number from 0 up per task, or all are 0.
    """
    values = [plain(value) for value in _list(test_counts) or ()]
    are_counts = all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in values)
    if len(values) != tasks or not are_counts:
        raise FczooError(
            f"test_counts is {quote(plain(test_counts))}; give {plural(tasks, 'whole number')}, "
            "the numbers of test images per task"
        )
    if not any(values):
        raise FczooError("test_counts is 0 for all tasks; give the numbers of test images per task")
    return values


def _list(values: Any) -> list[Any] | None:
    """Return the entries of a list, array, tensor or series; None for anything else."""
    values = values.tolist() if hasattr(values, "tolist") else values
    values = values.to_numpy().tolist() if hasattr(values, "to_numpy") else values
    is_list = isinstance(values, Sequence) and not isinstance(values, str | bytes)
    return list(values) if is_list else None
