"""All metrics, each a function of the accuracy matrix, with its formula.

``a[t][i]`` is the accuracy, in percent, on the test images of task i after training task t (i <= t,
counted from 0), with the prediction taken over all classes seen so far; ``n[i]`` is the number of test
images of task i; T tasks.
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
    return sum(a[-1]) / len(a)


def abar(a: Matrix, n: Counts) -> float:
    """Abar = 1/T sum_t 1/(t+1) sum_{i<=t} a[t][i]: mean over time of the task means (FPPL, FCILPT)."""
    return sum(sum(row) / len(row) for row in a) / len(a)


def forgetting(a: Matrix, n: Counts) -> float:
    """F = 1/(T-1) sum_{i<T-1} (max_{i<=t<T-1} a[t][i] - a[T-1][i]). 0 when T = 1; may be negative.

    Source: Chaudhry et al.; used by PILoRA and FPPL.
    """
    terms = drops(a)
    return sum(terms) / len(terms) if terms else 0.0


def drops(a: Matrix) -> list[float]:
    """Terms of ``forgetting``: each earlier task's best accuracy before the last task minus its final one."""
    last = len(a) - 1
    return [max(a[t][i] for t in range(i, last)) - a[last][i] for i in range(last)]


def forgetting_first(a: Matrix, n: Counts) -> float:
    """1/T sum_i (a[i][i] - a[T-1][i]): drop since the task was learned (fed-mammoth).

    The last task counts as a term of 0.
    """
    return sum(a[i][i] - a[-1][i] for i in range(len(a))) / len(a)


def forgetting_best(a: Matrix, n: Counts) -> float:
    """1/T sum_i (max_{i<=t<=T-1} a[t][i] - a[T-1][i]): drop from the best accuracy (FPPL's script).

    Never negative, since the final row takes part in the maximum.
    """
    return sum(max(a[t][i] for t in range(i, len(a))) - a[-1][i] for i in range(len(a))) / len(a)


def backward_transfer(a: Matrix, n: Counts) -> float:
    """BWT = 1/(T-1) sum_{i<T-1} (a[T-1][i] - a[i][i]) (Lopez-Paz and Ranzato). 0 when T = 1."""
    last = len(a) - 1
    return sum(a[last][i] - a[i][i] for i in range(last)) / last if last else 0.0


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
