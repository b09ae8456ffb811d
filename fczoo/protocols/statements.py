"""Statements of a paper or of released code: a value, its source, and how it depends on the run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ByBeta:
    """Values by concentration of the Dirichlet split, as in the columns of a paper's table."""

    values: Mapping[float, Any]

    def at(self, beta: float | None) -> Any:
        """Return the value for ``beta``; that of the first column for other partitions.

        Args:
            beta: Concentration of the Dirichlet split; None: another partition.
        """
        return self.values.get(beta, next(iter(self.values.values())))  # type: ignore[arg-type]

    def covers(self, beta: float | None) -> bool:
        """Return whether the paper's columns are equal or include ``beta``.

        Args:
            beta: Concentration of the Dirichlet split; None: another partition.
        """
        return beta in self.values or len(set(self.values.values())) == 1

    def __str__(self) -> str:
        return (
            f"{' | '.join(map(str, self.values.values()))} at beta "
            f"{' | '.join(map(str, self.values))}"
        )


@dataclass(frozen=True)
class ByTasks:
    """Values by the largest number of tasks to which each applies; more tasks have the last one."""

    values: Mapping[int, Any]

    def at(self, tasks: int) -> Any:
        """Return the value for a number of tasks.

        Args:
            tasks: Number of tasks.
        """
        limit = next((n for n in self.values if tasks <= n), [*self.values][-1])
        return self.values[limit]


@dataclass(frozen=True)
class SharedOut:
    """A total that all tasks share evenly, rounded down."""

    total: int
    least: int = 0

    def at(self, tasks: int) -> int:
        """Return the share of each task.

        Args:
            tasks: Number of tasks.
        """
        return max(self.total // tasks, self.least)


@dataclass(frozen=True)
class Statement:
    """A value and its source."""

    value: Any  # plain, by the number of tasks, or by the partition
    source: str
    printed: Any = ...  # what the paper prints, where the value follows something else
    open: bool = False  # the paper does not state it: any value of a run agrees with it
    # settings for which the value was chosen, where they are not the source's own
    chosen_for: Mapping[str, Any] | None = None

    @property
    def depends_on_tasks(self) -> bool:
        """Return whether the value is a rule of the number of tasks."""
        return isinstance(self.value, ByTasks | SharedOut)

    @property
    def columns(self) -> tuple[Any, ...]:
        """Return the value, or the values of several concentrations."""
        return (
            tuple(self.value.values.values()) if isinstance(self.value, ByBeta) else (self.value,)
        )

    def value_for(self, tasks: int) -> Any:
        """Return the value, or what its rule gives for a number of tasks.

        Args:
            tasks: Number of tasks.
        """
        return self.value.at(tasks) if isinstance(self.value, ByTasks | SharedOut) else self.value
