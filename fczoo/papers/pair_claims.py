"""Claims that one of two methods or rows is better, and their verdicts from runs."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fczoo.core.files import through_json
from fczoo.core.method import Method
from fczoo.core.registry import DATASETS, METHODS, create_method
from fczoo.papers.printed_numbers import plain_split
from fczoo.reports.run_config import count_changes
from fczoo.reports.runs import Experiment, Line, is_rate
from fczoo.reports.significance import SeedValues, differ_significantly, interval
from fczoo.reports.tables import Column, entry_of

Verdict = Literal["holds", "does not hold", "no significant difference", "not tested"]
STRONG_SKEW = 0.2
"""Dirichlet's beta below which skew counts as strong; the papers print 0.1 and 0.05."""


@dataclass(frozen=True)
class ClaimSide:
    """A method with the options that distinguish it."""

    method: str
    options: Mapping[str, Any]
    # values of these options in the paper's text
    printed_options: Mapping[str, Any] = field(default_factory=dict)
    # options with the method's default values, which depend on the data set
    default_names: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Claim(ABC):
    """Claim that the first of two sides is better in one metric."""

    name: str
    says: str

    @property
    @abstractmethod
    def citation(self) -> str:
        """Return the source of the claim."""

    @property
    @abstractmethod
    def sides(self) -> tuple[ClaimSide, ...]:
        """Return the better and the worse side; a claim over two settings may lack the worse."""

    @property
    @abstractmethod
    def column(self) -> Column:
        """Return the column of the claimed metric."""

    @property
    @abstractmethod
    def digits_partition(self) -> str | None:
        """Return the partition of the short run on digits; None: the data set's default."""

    @property
    @abstractmethod
    def full_scale_commands(self) -> list[str]:
        """Return the commands for both sides at the scale of a paper's tables."""

    @property
    @abstractmethod
    def regime(self) -> str:
        """Return the kind of partition to which the claim applies.

        ``any``: a rare kind, such as overlap; runs on every split count.
        """

    @property
    def digits_runs(self) -> dict[str, tuple[ClaimSide, Mapping[str, Any]]]:
        """Return side and settings of the short runs on digits, by name of the folder."""
        settings = {"partition": self.digits_partition}
        return {n: (s, settings) for n, s in zip(("better", "worse"), self.sides, strict=True)}

    @property
    def is_runnable(self) -> bool:
        """Return whether the methods of all sides are implemented."""
        return all(side.method in METHODS.names() for side in self.sides)

    def verdicts(self, experiments: Sequence[Experiment]) -> list[tuple[Verdict, str]]:
        """Judge the claim in every experiment with both rows, by paired differences over seeds.

        If the sides are two methods, each has its rows with the fewest changed options, as in
        rankings; other variants count as controls.

        Args:
            experiments: Experiments to search; those of another regime are skipped.

        Returns:
            A verdict with its explanation for each pair of rows.
        """
        judgements = []
        for experiment in experiments:
            if self.regime not in ("any", regime(experiment.bench_file.partition["spec"])):
                continue
            ours, theirs = (
                [x for x in experiment.lines if self.matches(x, side)] for side in self.sides
            )
            if self.sides[0].method != self.sides[1].method:
                ours, theirs = map(least_changed_lines, (ours, theirs), self.sides)
            pairs = [
                (a, b) for a in ours for b in theirs if a is not b and self._is_comparable(a, b)
            ]
            judgements += [self._verdict(experiment, a, b) for a, b in pairs]
        return judgements

    def matches(self, line: Line, side: ClaimSide) -> bool:
        """Return whether a row has the method of a side, with its options or those of the paper.

        Learning rates are tuned and may differ, but a rate of 0, which turns a part off, must be
        among the side's options.

        Args:
            line: Row of a table.
            side: Side of this claim.
        """
        result = line.results[0]
        zero_rates = {
            name for name, value in result.options.items() if is_rate(name) and value == 0
        }
        if result.method != side.method or not zero_rates <= side.options.keys():
            return False
        method = default_method(side.method, result.settings["dataset"])
        side_options = {
            **side.options,
            **{name: getattr(method, name) for name in side.default_names},
        }
        alternatives = side_options, {**side_options, **side.printed_options}
        # a run from before an option existed counts as one with its default
        defaults = through_json({k: v.default for k, v in METHODS.options(side.method).items()})
        recorded_options = {**defaults, **result.options}
        return any(has_options(recorded_options, options) for options in alternatives)

    def _verdict(self, experiment: Experiment, ours: Line, theirs: Line) -> tuple[Verdict, str]:
        values_by_side = [
            entry.by_seed if (entry := entry_of(x, self.column)) else {} for x in (ours, theirs)
        ]
        seeds = sorted(values_by_side[0].keys() & values_by_side[1].keys())
        first, second = (SeedValues({s: values[s] for s in seeds}) for values in values_by_side)
        gain = SeedValues({s: self.gain_of(first.by_seed[s] - second.by_seed[s]) for s in seeds})
        dataset, split = experiment.settings["dataset"], experiment.bench_file.partition["spec"]
        origin = f"{dataset} {split}, {ours.records[0].place}"
        if not self.column.better and seeds:
            seeds_text = "one seed" if len(seeds) == 1 else f"mean over {len(seeds)} seeds"
            sizes = " and ".join(self.column.show(entry.mean) for entry in (first, second))
            return _cost_verdict(gain), f"{sizes} {self.column.name}, {seeds_text}; {origin}"
        return verdict_of_gain(gain, first, second, origin)

    def _is_comparable(self, ours: Line, theirs: Line) -> bool:
        """Return whether rows of one method have equal options outside the claim.

        Learning rates may differ if ``fczoo tune`` found them separately for both rows.
        """
        first, second = ours.results[0], theirs.results[0]
        if first.method != second.method:
            return True
        better, worse = (side.options for side in self.sides)
        free_options = {k for k in better.keys() | worse.keys() if better.get(k) != worse.get(k)}
        if ours.is_tuned and theirs.is_tuned:
            free_options |= set(filter(is_rate, first.options))
        return all(
            second.options.get(k) == v for k, v in first.options.items() if k not in free_options
        )

    def gain_of(self, difference: float) -> float:
        """Return the advantage of the first of two values in this claim's metric.

        Args:
            difference: First value minus the second.
        """
        return difference if self.column.better == "high" else -difference


def verdict_of_gain(
    gain: SeedValues, first: SeedValues, second: SeedValues, origin: str
) -> tuple[Verdict, str]:
    """Return the verdict of a paired test over seeds, with its explanation.

    Args:
        gain: Advantage of the first entry, by seed.
        first: Entry that is claimed to be better.
        second: Entry that is claimed to be worse.
        origin: Source of the runs, for the explanation.
    """
    seeds = [*gain.by_seed]
    bounds = interval([*gain.by_seed.values()])
    if bounds is None:
        reason = (
            f"{gain.mean:+.1f} {_seed_words(seeds)}, so it cannot be tested"
            if seeds
            else "no shared seed"
        )
        return "not tested", f"{reason}; {origin}"
    verdict: Verdict = "no significant difference"
    if differ_significantly(first, second):
        verdict = "holds" if gain.mean > 0 else "does not hold"
    interval_text = f"[{bounds[0]:+.1f}, {bounds[1]:+.1f}]"
    return verdict, f"{gain.mean:+.1f} {interval_text} over {len(seeds)} seeds; {origin}"


def _seed_words(seeds: Sequence[int]) -> str:
    if len(seeds) == 1:
        return "with one seed"
    return f"is the difference with each of {len(seeds)} seeds"


def _cost_verdict(gain: SeedValues) -> Verdict:
    """Return the verdict of a cost, which is counted instead of tested."""
    if all(value > 0 for value in gain.by_seed.values()):
        return "holds"
    worse = all(value < 0 for value in gain.by_seed.values())
    return "does not hold" if worse else "no significant difference"


def default_method(name: str, dataset: str) -> Method:
    """Create a method with its values for a data set; for an unknown one, with its defaults.

    Args:
        name: Name of the method.
        dataset: Name of the data set.
    """
    return create_method(name, dataset if dataset in DATASETS.names() else None)


def least_changed_lines(lines: Sequence[Line], side: ClaimSide) -> list[Line]:
    """Return the rows of a side with the fewest changed options: see ``count_changes``.

    Args:
        lines: Rows that match the side.
        side: The side; its options do not count as changes.
    """
    counts = [
        count_changes(line, side.options.keys() | side.printed_options.keys()) for line in lines
    ]
    return [line for line, count in zip(lines, counts, strict=True) if count == min(counts)]


def regime(spec: str) -> str:
    """Return the kind of a partition: ``few classes``, ``strong skew``, ``mild`` or ``any``.

    Args:
        spec: Partition as ``--partition`` takes it.
    """
    name, _, value = plain_split(spec).partition(":")
    if name == "dirichlet":
        return "strong skew" if float(value) < STRONG_SKEW else "mild"
    return {"quantity": "few classes", "shards": "few classes", "iid": "mild"}.get(name, "any")


def has_options(options: Mapping[str, Any], required_options: Mapping[str, Any]) -> bool:
    """Return whether the options of a run have all required values.

    Args:
        options: Options of the run.
        required_options: Required values.
    """
    return all(options.get(k) == v for k, v in required_options.items())
