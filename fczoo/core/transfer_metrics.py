"""Metrics of runs whose clients are in different tasks at the same time, each with its formula.

A client-task j is one task of one client: it begins in stage f_j and ends after stage l_j.
``b[s][j]`` is the accuracy, in percent, on test images with the class mix of j after stage s
(f_j <= s, counted from 0); None without test images. S stages. The formulas are those of the code
released with Powder (Piao et al., ICML 2024), where a stage is three rounds.
"""

from collections.abc import Callable, Sequence

ClientTasks = Sequence[Sequence[int]]
"""Client, first stage f_j and last stage l_j of each client-task, in order of first stages."""
Rows = Sequence[Sequence[float | None]]
"""Accuracies b[s][j] in percent; row s has the client-tasks that have begun by then."""


def final_accuracy(tasks: ClientTasks, b: Rows) -> float:
    """Compute the mean of b[S-1][j] over all client-tasks.

    Args:
        tasks: Client-tasks.
        b: Accuracies [S][j] in percent.
    """
    return _mean(_numbers(b[-1]))


def stage_accuracy(tasks: ClientTasks, b: Rows) -> float:
    """Compute 1/S sum_s of the mean of b[s][j] over the client-tasks that have begun.

    Args:
        tasks: Client-tasks.
        b: Accuracies [S][j] in percent.
    """
    return _mean([_mean(_numbers(row)) for row in b if _numbers(row)])


def stage_forgetting(tasks: ClientTasks, b: Rows) -> float:
    """Compute 1/S sum_s of the mean of max_{f_j <= u < s} b[u][j] - b[s][j].

    A client-task that begins in stage s counts as 0.

    Args:
        tasks: Client-tasks.
        b: Accuracies [S][j] in percent.

    Returns:
        Percentage points; may be negative.
    """
    means = []
    for s, row in enumerate(b):
        terms = []
        for j, value in enumerate(row):
            earlier = _numbers([b[u][j] for u in range(tasks[j][1], s)])
            if value is not None:
                terms.append(max(earlier) - value if earlier else 0.0)
        means += [_mean(terms)] if terms else []
    return _mean(means)


def backward_transfer(tasks: ClientTasks, b: Rows) -> float:
    """Compute the mean over stages s of the mean of b[s][j] - b[l_j][j] over tasks with l_j < s.

    Args:
        tasks: Client-tasks.
        b: Accuracies [S][j] in percent.

    Returns:
        Percentage points; 0 if no client-task has ended before the last stage.
    """
    stages = _backward(tasks, b)
    return _mean(stages) if stages else 0.0


def forward_transfer(tasks: ClientTasks, b: Rows, isolated_accuracy: Rows) -> float:
    """Compute the mean over stages s of the mean of b[s][j] - b*[s][j] over tasks with l_j = s.

    Args:
        tasks: Client-tasks.
        b: Accuracies [S][j] in percent.
        isolated_accuracy: Accuracies b* [S][j] of a run whose clients do not communicate.

    Returns:
        Percentage points that clients gain from the others by the end of a task.
    """
    return _mean(_forward(tasks, b, isolated_accuracy))


def total_transfer(tasks: ClientTasks, b: Rows, isolated_accuracy: Rows) -> float:
    """Compute the sum of forward and backward transfer of all stages, over the number of stages.

    Args:
        tasks: Client-tasks.
        b: Accuracies [S][j] in percent.
        isolated_accuracy: Accuracies b* [S][j] of a run whose clients do not communicate.
    """
    forward = _forward(tasks, b, isolated_accuracy)
    return (sum(forward) + sum(_backward(tasks, b))) / len(forward) if forward else float("nan")


def _backward(tasks: ClientTasks, b: Rows) -> list[float]:
    """Return the mean of b[s][j] - b[l_j][j] of each stage after which a client-task has ended."""
    means = []
    for s, row in enumerate(b):
        pairs = [(row[j], b[last][j]) for j, (_, _, last) in enumerate(tasks) if last < s]
        changes = [x - y for x, y in pairs if x is not None and y is not None]
        means += [_mean(changes)] if changes else []
    return means


def _forward(tasks: ClientTasks, b: Rows, isolated_accuracy: Rows) -> list[float]:
    """Return the mean of b[s][j] - b*[s][j] of each stage in which a client-task ends."""
    means = []
    for s, (row, reference) in enumerate(zip(b, isolated_accuracy, strict=False)):
        pairs = [(row[j], reference[j]) for j, (_, _, last) in enumerate(tasks) if last == s]
        gains = [x - y for x, y in pairs if x is not None and y is not None]
        means += [_mean(gains)] if gains else []
    return means


def _numbers(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


TRANSFER_METRICS: dict[str, Callable[[ClientTasks, Rows], float]] = {
    "client_task_final": final_accuracy,
    "client_task_accuracy": stage_accuracy,
    "client_task_forgetting": stage_forgetting,
    "client_task_backward": backward_transfer,
}
REFERENCE_METRICS: dict[str, Callable[[ClientTasks, Rows, Rows], float]] = {
    "client_task_forward": forward_transfer,
    "client_task_total": total_transfer,
}
"""Metrics that compare with a run of the method ``local``."""
