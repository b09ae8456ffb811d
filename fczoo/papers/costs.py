"""Printed costs: counts of numbers, which follow from shapes without a run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tabulate import tabulate

from fczoo.core.method import Method
from fczoo.core.registry import METHODS
from fczoo.core.tree import Tree, select
from fczoo.federation.settings import Settings
from fczoo.papers.printed_numbers import Paper, PrintedNumber
from fczoo.papers.variants import readings

Measure = Callable[[Method, Settings], Mapping[str, Tree]]
"""Function that returns tensors of a client: trained ones, uploads by phase, and the state."""
HEAD = "head."


@dataclass(frozen=True)
class CostComparison:
    """A printed cost, and our count with the same settings."""

    number: PrintedNumber
    ours: int
    head: int  # part of ours that belongs to the classifier
    boundary: int  # numbers sent once per task in addition; 0 for costs that are not sent

    @property
    def agreement(self) -> str:
        """Return whether our count rounds to the printed one, in millions with two decimals."""
        printed = f"{self.number.value / 1e6:.2f}"
        if f"{self.ours / 1e6:.2f}" == printed:
            return "yes"
        total = self.ours + self.boundary
        is_equal = f"{total / 1e6:.2f}" == printed
        return "yes, if uploads sent once per task are counted, too" if is_equal else "no"


def count_costs(
    paper: Paper, numbers: Sequence[PrintedNumber], measure: Measure
) -> list[CostComparison]:
    """Count the printed costs among some numbers, with the settings of their rows.

    Args:
        paper: Paper that printed the numbers.
        numbers: Numbers to choose from; those of methods without an implementation are left out.
        measure: Function that returns a client's tensors.
    """
    counts, tensors_by_config = [], dict[tuple[str, str], Mapping[str, Tree]]()
    for number in numbers:
        cost, row = paper.costs.get(number.metric), paper.row(number)
        if cost is None or row.method not in METHODS.names():
            continue
        config = readings(paper, number)[0].config
        key = config.method, row.dataset
        if key not in tensors_by_config:
            tensors_by_config[key] = measure(config.create_method(), config.settings)
        tensors, prefixes = tensors_by_config[key], cost.tensors.get(config.method)
        counted_tensors = tensors[cost.of]
        counted_tensors = select(counted_tensors, *prefixes) if prefixes else counted_tensors
        head = _size({name: t for name, t in counted_tensors.items() if HEAD in name})
        boundary = cost.of == "round" and _size(tensors.get("task_end", {}))
        ours = _size(counted_tensors) - (0 if cost.head else head)
        counts.append(CostComparison(number, ours, head if cost.head else 0, int(boundary)))
    return counts


def _size(tree: Tree) -> int:
    """Count floating-point numbers; integers, such as labels and indices, do not count."""
    return sum(tensor.numel() for tensor in tree.values() if tensor.is_floating_point())


def cost_table(counts: Sequence[CostComparison]) -> str:
    """Format counts next to the printed costs, with and without the classifier.

    Args:
        counts: Costs in the order of the table.
    """
    rows = [
        (
            count.number.method,
            count.number.dataset,
            count.number.metric,
            f"{count.number.value / 1e6:.2f}e6",
            f"{count.ours:,}",
            f"{count.ours - count.head:,}",
            f"{count.boundary:,}" if count.boundary else "",
            count.agreement,
        )
        for count in counts
    ]
    names = ["row", "data set", "cost", "paper's", "ours", "without classifier"]
    names += ["once per task", "agrees"]
    sides = ("left", "left", "left", "right", "right", "right", "right", "left")
    return tabulate(rows, names, disable_numparse=True, colalign=sides)
