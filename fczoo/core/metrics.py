"""Metrics that are functions of the accuracy matrix, each with its formula.

``a[t][i]`` is the accuracy, in percent, on the test images of task i after training task t (i <= t,
counted from 0), with the prediction taken over all classes seen so far; ``n[i]`` is the number of
test images of task i; T tasks. A task without test images has no accuracy and is left out of
the means over i. Metrics of classes and clients are in ``class_metrics``, those of single images
in ``fczoo.federation.evaluate``.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Literal

from fczoo.core.discovery import load_plugins
from fczoo.core.errors import FczooError, first_line
from fczoo.core.registry import Registry

Matrix = Sequence[Sequence[float]]
Counts = Sequence[int]
Metric = Callable[[Matrix, Counts], float]


def pooled_accuracy(row: Sequence[float], n: Counts) -> float:
    """Compute sum_i n_i a_i / sum_i n_i: accuracy over all test images of the first tasks.

    Args:
        row: Accuracy a_i on each of the first tasks in percent.
        n: Test images per task.

    Returns:
        The accuracy in percent; NaN without test images.
    """
    image_count = sum(n[: len(row)])
    return (
        sum(c * x for c, x in zip(n, row, strict=False) if c) / image_count
        if image_count
        else float("nan")
    )


def seen_accuracy(a: Matrix, n: Counts, t: int) -> float:
    """Compute A_t = sum_i n_i a[t][i] / sum_i n_i over i <= t, in percent.

    It is the accuracy over all test images seen so far.

    Args:
        a: Accuracies [T][i] in percent; row t has t + 1 entries.
        n: Test images per task.
        t: Number of the training task, from 0.

    Returns:
        The accuracy in percent; NaN without test images.
    """
    return pooled_accuracy(a[t], n)


def final(a: Matrix, n: Counts) -> float:
    """Compute A_N = A_{T-1}: ``seen_accuracy`` after the last task (PILoRA, GLFC).

    Args:
        a: Accuracies [T][i] in percent.
        n: Test images per task.
    """
    return seen_accuracy(a, n, len(a) - 1)


def average(a: Matrix, n: Counts) -> float:
    """Compute Avg = 1/T sum_t A_t: mean of ``seen_accuracy`` after each task (PILoRA).

    Args:
        a: Accuracies [T][i] in percent.
        n: Test images per task.
    """
    return sum(seen_accuracy(a, n, t) for t in range(len(a))) / len(a)


def faa(a: Matrix, n: Counts) -> float:
    """Compute FAA = 1/T sum_i a[T-1][i]: mean of the tasks' accuracies after the last task.

    Used by HGP, and by FCILPT and FPPL under the name A_N.

    Args:
        a: Accuracies [T][i] in percent.
        n: Test images per task.
    """
    return _mean([a[-1][i] for i in _tasks_with_images(n, len(a))])


def abar(a: Matrix, n: Counts) -> float:
    """Compute Abar = 1/T sum_t 1/(t+1) sum_{i<=t} a[t][i]: mean over time of task means.

    Used by FPPL and FCILPT.

    Args:
        a: Accuracies [T][i] in percent.
        n: Test images per task.
    """
    rows = [_mean([row[i] for i in _tasks_with_images(n, len(row))]) for row in a]
    return sum(rows) / len(rows)


def forgetting(a: Matrix, n: Counts) -> float:
    """Compute F = 1/(T-1) sum_{i<T-1} (max_{i<=t<T-1} a[t][i] - a[T-1][i]).

    Source: Chaudhry et al.; used by PILoRA and FPPL.

    Args:
        a: Accuracies [T][i] in percent.
        n: Test images per task.

    Returns:
        F in percentage points: 0 when T = 1; may be negative.
    """
    terms = [drop for drop, images in zip(drops(a), n, strict=False) if images]
    return sum(terms) / len(terms) if terms else 0.0


def drops(a: Matrix) -> list[float]:
    """Compute the terms of ``forgetting`` per earlier task.

    A term is the best accuracy before the last task minus the final one.

    Args:
        a: Accuracies [T][i] in percent.

    Returns:
        T - 1 terms in percentage points; NaN for a task without test images.
    """
    last = len(a) - 1
    return [max(a[t][i] for t in range(i, last)) - a[last][i] for i in range(last)]


def forgetting_first(a: Matrix, n: Counts) -> float:
    """Compute 1/T sum_i (a[i][i] - a[T-1][i]): drop since the task was learned (fed-mammoth).

    The last task counts as a term of 0.

    Args:
        a: Accuracies [T][i] in percent.
        n: Test images per task.
    """
    return _mean([a[i][i] - a[-1][i] for i in _tasks_with_images(n, len(a))])


def forgetting_best(a: Matrix, n: Counts) -> float:
    """Compute 1/T sum_i (max_{i<=t<=T-1} a[t][i] - a[T-1][i]).

    It is the drop from the best accuracy (FPPL's script).

    Args:
        a: Accuracies [T][i] in percent.
        n: Test images per task.

    Returns:
        The drop in percentage points; never negative, since the final row takes part in the
        maximum.
    """
    return _mean(
        [max(a[t][i] for t in range(i, len(a))) - a[-1][i] for i in _tasks_with_images(n, len(a))]
    )


def backward_transfer(a: Matrix, n: Counts) -> float:
    """Compute BWT = 1/(T-1) sum_{i<T-1} (a[T-1][i] - a[i][i]) (Lopez-Paz and Ranzato).

    Args:
        a: Accuracies [T][i] in percent.
        n: Test images per task.

    Returns:
        BWT in percentage points; 0 when T = 1.
    """
    changes = [a[-1][i] - a[i][i] for i in _tasks_with_images(n, len(a) - 1)]
    return _mean(changes) if changes else 0.0


def plasticity(a: Matrix, n: Counts) -> float:
    """Compute 1/T sum_i a[i][i]: mean accuracy on a task right after it was learned.

    It is the ability to learn: LA of Riemer et al. (MER, ICLR 2019).

    Args:
        a: Accuracies [T][i] in percent.
        n: Test images per task.
    """
    return _mean([a[i][i] for i in _tasks_with_images(n, len(a))])


def anytime(a: Matrix, n: Counts) -> float:
    """Compute AUC = 1/(T-1) sum_{t<T-1} (A_t + A_{t+1}) / 2: area under the curve of A_t.

    It is the area under the polygon through the T values of ``seen_accuracy``, divided by its
    width: the anytime accuracy A_AUC of Koh et al. (CLIB, ICLR 2022) at the ends of tasks.

    Args:
        a: Accuracies [T][i] in percent.
        n: Test images per task.

    Returns:
        The mean height in percent; A_0 when T = 1.
    """
    heights = [seen_accuracy(a, n, t) for t in range(len(a))]
    if len(heights) == 1:
        return heights[0]
    return _mean([(x + y) / 2 for x, y in pairwise(heights)])


def forward_transfer(before: Sequence[float | None], classes: int) -> float:
    """Compute FWT = 1/(T-1) sum_{1<=i<T} (a[i-1][i] - 100 / C) (Lopez-Paz and Ranzato).

    a[i-1][i] is the accuracy on task i before it is learned. 100 / C is the accuracy of random
    guessing among C classes; mammoth and Avalanche measure the accuracy of the randomly initialised
    network instead, which has this expectation. A task with new classes has no a[i-1][i], because
    no method predicts a class that it has not seen: FWT exists only for domain-incremental runs.

    Args:
        before: Accuracies a[i-1][i] in percent for i = 1, ..., T - 1; None for a task without.
        classes: Number C of classes.

    Returns:
        FWT in percentage points over the tasks with an accuracy; NaN if no task has one.
    """
    return _mean([value - 100 / classes for value in before if value is not None])


def base_accuracy(a: Matrix, n: Counts, base: int = 1) -> float:
    """Compute sum_{i<b} n_i a[T-1][i] / sum_{i<b} n_i: final accuracy on the first tasks.

    Args:
        a: Accuracies [T][i] in percent.
        n: Test images per task.
        base: Number b of first tasks: 1, the base session of few-shot streams, or the number of
            tasks that the start model had learned.
    """
    return pooled_accuracy(a[-1][:base], n)


def novel_accuracy(a: Matrix, n: Counts, base: int = 1) -> float:
    """Compute sum_{i>=b} n_i a[T-1][i] / sum_{i>=b} n_i: final accuracy on the later tasks.

    Args:
        a: Accuracies [T][i] in percent.
        n: Test images per task.
        base: Number b of first tasks, which are left out.
    """
    return pooled_accuracy(a[-1][base:], n[base:])


def harmonic_mean(a: Matrix, n: Counts) -> float:
    """Compute 2 b v / (b + v) of base accuracy b and novel accuracy v (Peng et al., ECCV 2022).

    Args:
        a: Accuracies [T][i] in percent.
        n: Test images per task.

    Returns:
        The mean in percent; 0 if both are 0.
    """
    base, novel = base_accuracy(a, n), novel_accuracy(a, n)
    return 2 * base * novel / (base + novel) if base + novel else 0.0


def base_novel_mean(a: Matrix, n: Counts) -> float:
    """Compute (b + v) / 2 of base accuracy b and novel accuracy v, UOPP's code's "harmonic" mean.

    Args:
        a: Accuracies [T][i] in percent.
        n: Test images per task.
    """
    return (base_accuracy(a, n) + novel_accuracy(a, n)) / 2


def intransigence(a: Matrix, reference: Matrix, n: Counts) -> float:
    """Compute I = 1/T sum_i (a*[i][i] - a[i][i]): inability to learn (Chaudhry et al., 2018).

    Args:
        a: Accuracies [T][i] in percent.
        reference: Accuracies a* [T][i] of a run that trains on all images of the tasks so far.
        n: Test images per task.

    Returns:
        I in percentage points; negative if the run learns new tasks better than the reference.
    """
    return _mean([reference[i][i] - a[i][i] for i in _tasks_with_images(n, len(a))])


def _tasks_with_images(n: Counts, tasks: int) -> list[int]:
    """Return which of the first tasks have test images."""
    return [i for i in range(tasks) if n[i]]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


METRICS: dict[str, Metric] = {  # columns of every report
    "A_N": final,
    "Avg": average,
    "FAA": faa,
    "Abar": abar,
    "forgetting": forgetting,
    "forgetting_first": forgetting_first,
    "forgetting_best": forgetting_best,
    "BWT": backward_transfer,
}
MORE_METRICS: dict[str, Metric] = {  # columns on request
    "plasticity": plasticity,
    "AUC": anytime,
}
BASE_METRICS: dict[str, Metric] = {  # of streams with a base task
    "base": base_accuracy,
    "novel": novel_accuracy,
    "harmonic": harmonic_mean,
    "base_novel_mean": base_novel_mean,
}


USER_METRICS: Registry[Any] = Registry("metric", "register_metric")
"""Metrics of plug-ins: columns on request."""


def register_metric(
    name: str, better: Literal["high", "low", ""] = "high"
) -> Callable[[Metric], Metric]:
    """Return a decorator that registers a function of accuracies [T][i] and test images per task.

    Args:
        name: Name of the column.
        better: Whether high or low values are better; empty: the column is not ranked.
    """

    def add(metric: Any) -> Any:
        metric.better = better
        return USER_METRICS.register(name)(metric)

    return add


def user_metrics() -> dict[str, Metric]:
    """Return the metrics that plug-ins register, by name; without plug-ins that fail."""
    if not USER_METRICS.names():
        return {}
    load_plugins()
    return {name: partial(_call_metric, USER_METRICS.get(name)) for name in USER_METRICS.names()}


def _call_metric(metric: Any, a: Matrix, n: Counts) -> float:
    """Return the value of a plug-in's metric; raise a one-line FczooError if it fails."""
    place = f"metric {metric.name} in {metric.__module__}"
    if metric.name in {**METRICS, **MORE_METRICS, **BASE_METRICS}:
        raise FczooError(f"{place} has the name of a metric of fczoo; rename it")
    try:
        return float(metric(a, n))
    except Exception as error:  # of the plug-in's code
        problem = f"{place} fails: {type(error).__name__}: {first_line(error)}"
        advice = "return a number for every run, or nan if the metric is undefined"
        raise FczooError(f"{problem}; {advice}") from error


def has_base_task(sizes: Sequence[int]) -> bool:
    """Return whether the first task has at least twice as many classes as each later one.

    Args:
        sizes: Classes per task.
    """
    return len(sizes) > 1 and sizes[0] >= 2 * max(sizes[1:])


def all_metrics(a: Matrix, n: Counts) -> dict[str, float]:
    """Compute every metric of the accuracy matrix by name, those of plug-ins included.

    Args:
        a: Accuracies [T][i] in percent.
        n: Test images per task.
    """
    return {
        name: metric(a, n) for name, metric in {**METRICS, **MORE_METRICS, **user_metrics()}.items()
    }
