"""A claim: of two methods or rows the first is better, and what runs say of that."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fczoo.core.method import Method
from fczoo.core.registry import DATASETS, METHODS, create_method
from fczoo.papers.printed import plain_split
from fczoo.reports.chosen import changes
from fczoo.reports.columns import Column
from fczoo.reports.runs import Experiment, Line, is_rate
from fczoo.reports.tables import Entry, entry_of, interval, significant

Verdict = Literal["holds", "does not hold", "no significant difference", "not tested"]
STRONG = 0.2  # Dirichlet's beta below which the papers speak of strong skew (they print 0.1 and 0.05)


@dataclass(frozen=True)
class Side:
    """A method, with the options that set it apart."""

    method: str
    options: Mapping[str, Any]
    printed: Mapping[str, Any] = field(default_factory=dict)  # values of these in the paper's own text
    usual: frozenset[str] = frozenset()  # those that are the method's own, which depend on the data set


@dataclass(frozen=True)
class Claim(ABC):
    """Of two sides, the first is above the second in one figure, or below it where less is better."""

    name: str
    says: str

    @property
    @abstractmethod
    def cited(self) -> str:
        """Who says it, and where."""

    @property
    @abstractmethod
    def sides(self) -> tuple[Side, Side]:
        """The better and the worse side."""

    @property
    @abstractmethod
    def column(self) -> Column:
        """The figure."""

    @property
    @abstractmethod
    def small(self) -> str | None:
        """Partition of the run in minutes, on digits; None: the data set's own."""

    @property
    @abstractmethod
    def at_scale(self) -> list[str]:
        """Lines for a reader: a command for either side at the scale of a paper's tables."""

    @property
    @abstractmethod
    def regime(self) -> str:
        """The kind of split about which the claim is; a run on another kind says nothing of it.

        ``any``: a kind that no other paper has, such as overlap; a run on any split is taken for it.
        """

    @property
    def runnable(self) -> bool:
        """Whether both systems are implemented."""
        return all(side.method in METHODS.names() for side in self.sides)

    def verdicts(self, experiments: Sequence[Experiment]) -> list[tuple[Verdict, str]]:
        """What every experiment with both rows says, and by how much: differences paired over seeds.

        Of two methods each enters with the rows that have fewest options other than its own, as it does in
        ranks: a variant of it beside these is a control.
        """
        found = []
        for experiment in experiments:
            if self.regime not in ("any", regime(experiment.about.partition["spec"])):
                continue
            ours, theirs = ([x for x in experiment.lines if self.matches(x, side)] for side in self.sides)
            if self.sides[0].method != self.sides[1].method:
                ours, theirs = map(plainest, (ours, theirs), self.sides)
            pairs = [(a, b) for a in ours for b in theirs if a is not b and self._comparable(a, b)]
            found += [self._verdict(experiment, a, b) for a, b in pairs]
        return found

    def matches(self, line: Line, side: Side) -> bool:
        """Whether a row is the side: its method, with its options or as the paper prints them.

        Rates are tuned and may differ; one of 0 switches something off, which a side has to say.
        """
        result = line.results[0]
        off = {name for name, value in result.options.items() if is_rate(name) and value == 0}
        if result.method != side.method or not off <= side.options.keys():
            return False
        made = usual_method(side.method, result.settings["dataset"])
        own = {**side.options, **{name: getattr(made, name) for name in side.usual}}
        wanted = own, {**own, **side.printed}
        return any(has(result.options, options) for options in wanted)

    def _verdict(self, experiment: Experiment, ours: Line, theirs: Line) -> tuple[Verdict, str]:
        known = [entry.by_seed if (entry := entry_of(x, self.column)) else {} for x in (ours, theirs)]
        seeds = sorted(known[0].keys() & known[1].keys())
        first, second = (Entry({s: values[s] for s in seeds}) for values in known)
        gain = Entry({s: self._signed(first.by_seed[s] - second.by_seed[s]) for s in seeds})
        about = experiment.about
        where = f"{about.settings['dataset']} {about.partition['spec']}, {ours.cells[0].place}"
        often = "one seed" if len(seeds) == 1 else f"each of {len(seeds)} seeds"
        if not self.column.better and seeds:
            sizes = " and ".join(self.column.show(entry.mean) for entry in (first, second))
            return _counted(gain), f"{sizes} {self.column.name} with {often}; {where}"
        bounds = interval([*gain.by_seed.values()])
        if bounds is None:
            said = f"{gain.mean:+.1f} with {often}, which is no test" if seeds else "no seed in common"
            return "not tested", f"{said}; {where}"
        verdict: Verdict = "no significant difference"
        if significant(first, second):
            verdict = "holds" if gain.mean > 0 else "does not hold"
        between = f"[{bounds[0]:+.1f}, {bounds[1]:+.1f}]"
        return verdict, f"{gain.mean:+.1f} {between} over {len(seeds)} seeds; {where}"

    def _comparable(self, ours: Line, theirs: Line) -> bool:
        """Of one method, all options but those that the claim is about must be the same.

        Rates may differ where ``fczoo tune`` found the values of both: either has those of its own search.
        """
        first, second = ours.results[0], theirs.results[0]
        if first.method != second.method:
            return True
        better, worse = (side.options for side in self.sides)
        free = {k for k in better.keys() | worse.keys() if better.get(k) != worse.get(k)}
        if ours.tuned and theirs.tuned:
            free |= set(filter(is_rate, first.options))
        return all(second.options.get(k) == v for k, v in first.options.items() if k not in free)

    def _signed(self, difference: float) -> float:
        return difference if self.column.better == "high" else -difference


def _counted(gain: Entry) -> Verdict:
    """Of a cost, which is counted and not sampled: what it is with every seed."""
    if all(less > 0 for less in gain.by_seed.values()):
        return "holds"
    worse = all(less < 0 for less in gain.by_seed.values())
    return "does not hold" if worse else "no significant difference"


def usual_method(name: str, dataset: str) -> Method:
    """Create a method with its values for a data set, or its defaults for an unknown one."""
    return create_method(name, dataset if dataset in DATASETS.names() else None)


def plainest(lines: Sequence[Line], side: Side) -> list[Line]:
    """The rows of a side that have fewest options other than its own and its method's: see ``changes``."""
    counts = [changes(line, side.options.keys() | side.printed.keys()) for line in lines]
    return [line for line, count in zip(lines, counts, strict=True) if count == min(counts)]


def regime(spec: str) -> str:
    """``few classes`` a client, ``strong skew``, ``mild`` skew or none; ``any``: a split of another kind."""
    name, _, value = plain_split(spec).partition(":")
    if name == "dirichlet":
        return "strong skew" if float(value) < STRONG else "mild"
    return {"quantity": "few classes", "shards": "few classes", "iid": "mild"}.get(name, "any")


def has(options: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether the options of a run have all values that are wanted."""
    return all(options.get(k) == v for k, v in wanted.items())
