"""All metrics, each a function of the accuracy matrix, with its formula.

``a[t][i]`` is the accuracy, in percent, on the test images of task i after training task t (i <= t,
counted from 0), with the prediction taken over all classes seen so far; ``n[i]`` is the number of test
images of task i; T tasks. A task without test images has no accuracy: it is no task of the means over i.
"""

from collections.abc import Callable, Sequence

Matrix = Sequence[Sequence[float]]
Counts = Sequence[int]


def seen_accuracy(a: Matrix, n: Counts, t: int) -> float:
    """A_t = sum_i n_i a[t][i] / sum_i n_i over i <= t: accuracy over all test images seen so far, percent."""
    seen = sum(n[: t + 1])
    return sum(c * x for c, x in zip(n, a[t], strict=False) if c) / seen if seen else float("nan")


def final(a: Matrix, n: Counts) -> float:
    """A_N = A_{T-1}: ``seen_accuracy`` after the last task (PILoRA, GLFC)."""
    return seen_accuracy(a, n, len(a) - 1)


def average(a: Matrix, n: Counts) -> float:
    """Avg = 1/T sum_t A_t: mean of ``seen_accuracy`` after each task (PILoRA)."""
    return sum(seen_accuracy(a, n, t) for t in range(len(a))) / len(a)


def faa(a: Matrix, n: Counts) -> float:
    """FAA = 1/T sum_i a[T-1][i]: mean of the tasks' accuracies after the last task.

    Used by HGP, and by FCILPT and FPPL under the name A_N.
    """
    return _mean([a[-1][i] for i in _tested(n, len(a))])


def abar(a: Matrix, n: Counts) -> float:
    """Abar = 1/T sum_t 1/(t+1) sum_{i<=t} a[t][i]: mean over time of the task means (FPPL, FCILPT)."""
    rows = [_mean([row[i] for i in _tested(n, len(row))]) for row in a]
    return sum(rows) / len(rows)


def forgetting(a: Matrix, n: Counts) -> float:
    """F = 1/(T-1) sum_{i<T-1} (max_{i<=t<T-1} a[t][i] - a[T-1][i]). 0 when T = 1; may be negative.

    Source: Chaudhry et al.; used by PILoRA and FPPL.
    """
    terms = [drop for drop, images in zip(drops(a), n, strict=False) if images]
    return sum(terms) / len(terms) if terms else 0.0


def drops(a: Matrix) -> list[float]:
    """Terms of ``forgetting``: each earlier task's best accuracy before the last task minus its final one.

    NaN of a task without test images.
    """
    last = len(a) - 1
    return [max(a[t][i] for t in range(i, last)) - a[last][i] for i in range(last)]


def forgetting_first(a: Matrix, n: Counts) -> float:
    """1/T sum_i (a[i][i] - a[T-1][i]): drop since the task was learned (fed-mammoth).

    The last task counts as a term of 0.
    """
    return _mean([a[i][i] - a[-1][i] for i in _tested(n, len(a))])


def forgetting_best(a: Matrix, n: Counts) -> float:
    """1/T sum_i (max_{i<=t<=T-1} a[t][i] - a[T-1][i]): drop from the best accuracy (FPPL's script).

    Never negative, since the final row takes part in the maximum.
    """
    return _mean([max(a[t][i] for t in range(i, len(a))) - a[-1][i] for i in _tested(n, len(a))])


def backward_transfer(a: Matrix, n: Counts) -> float:
    """BWT = 1/(T-1) sum_{i<T-1} (a[T-1][i] - a[i][i]) (Lopez-Paz and Ranzato). 0 when T = 1."""
    changes = [a[-1][i] - a[i][i] for i in _tested(n, len(a) - 1)]
    return _mean(changes) if changes else 0.0


def _tested(n: Counts, tasks: int) -> list[int]:
    """Which of the first so many tasks have test images."""
    return [i for i in range(tasks) if n[i]]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


METRICS: dict[str, Callable[[Matrix, Counts], float]] = {
    "A_N": final,
    "Avg": average,
    "FAA": faa,
    "Abar": abar,
    "forgetting": forgetting,
    "forgetting_first": forgetting_first,
    "forgetting_best": forgetting_best,
    "BWT": backward_transfer,
}


def all_metrics(a: Matrix, n: Counts) -> dict[str, float]:
    """Every metric by name, percent."""
    return {name: metric(a, n) for name, metric in METRICS.items()}
