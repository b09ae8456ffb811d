"""What papers claim: of two methods or rows the first is better. Our runs say whether it holds here."""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache, cached_property
from importlib.resources import files
from typing import Any, Literal

from scipy.stats import t as student

from fczoo.core.errors import FczooError
from fczoo.core.files import through_json
from fczoo.core.options import nearest, spaces
from fczoo.core.registry import METHODS, create_method
from fczoo.functional.heads import PromptedHead
from fczoo.papers.cards import Card, card_name, cards
from fczoo.papers.printed import Number, Paper, get_paper, papers, plain_split
from fczoo.papers.readings import readings
from fczoo.reports.columns import COLUMNS, Column
from fczoo.reports.runs import Experiment, Line
from fczoo.reports.tables import LEVEL, Entry, entry_of, significant

Verdict = Literal["holds", "does not hold", "not told apart"]
STRONG = 0.2  # Dirichlet's beta below which the papers speak of strong skew (they print 0.1 and 0.05)
SMALL = {
    "alpha=6": "quantity:2",
    "alpha=2": "quantity:1",
    "beta=0.05": "dirichlet:0.05",
    "GLFC-60%": "overlap:0.6",
}
"""Printed split -> that of the run on digits, whose tasks have two classes; else the data set's own."""


@dataclass(frozen=True)
class Side:
    """A method, with the options that set it apart."""

    method: str
    options: Mapping[str, Any]
    printed: Mapping[str, Any] = field(default_factory=dict)  # values of these in the paper's own text
    unlike: Mapping[str, Any] = field(default_factory=dict)  # rates of the other side, which it must not have


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
    def regime(self) -> str:
        """The kind of split about which the claim is; a run on another kind says nothing of it."""

    @property
    def runnable(self) -> bool:
        """Whether both systems are implemented."""
        return all(side.method in METHODS.names() for side in self.sides)

    def verdicts(self, experiments: Sequence[Experiment]) -> list[tuple[Verdict, str]]:
        """What every experiment with both rows says, and by how much: differences paired over seeds."""
        found = []
        for experiment in experiments:
            if self.regime not in ("any", regime(experiment.about.partition["spec"])):
                continue
            ours, theirs = ([x for x in experiment.lines if self.matches(x, side)] for side in self.sides)
            pairs = [(a, b) for a in ours for b in theirs if a is not b and self._comparable(a, b)]
            found += [self._verdict(experiment, a, b) for a, b in pairs]
        return found

    def matches(self, line: Line, side: Side) -> bool:
        """Whether a row is the side: its method, with its options or as the paper prints them."""
        result = line.results[0]
        wanted = side.options, {**side.options, **side.printed}
        if result.method != side.method or any(result.options.get(k) == v for k, v in side.unlike.items()):
            return False
        return any(_has(result.options, options) for options in wanted)

    def _verdict(self, experiment: Experiment, ours: Line, theirs: Line) -> tuple[Verdict, str]:
        first, second = (entry_of(line, self.column) or Entry({}) for line in (ours, theirs))
        seeds = sorted(first.by_seed.keys() & second.by_seed.keys())
        gain = Entry({s: self._signed(first.by_seed[s] - second.by_seed[s]) for s in seeds})
        about = experiment.about
        where = f"{about.settings['dataset']} {about.partition['spec']}, {ours.cells[0].place}"
        if gain.std is None:
            said = f"{gain.mean:+.1f} with one seed" if seeds else "no seed in common"
            return "not told apart", f"{said}; {where}"
        margin = gain.std / math.sqrt(len(seeds)) * float(student.ppf(1 - LEVEL / 2, len(seeds) - 1))
        verdict: Verdict = "not told apart"
        if significant(first, second):
            verdict = "holds" if gain.mean > 0 else "does not hold"
        interval = f"[{gain.mean - margin:+.1f}, {gain.mean + margin:+.1f}]"
        return verdict, f"{gain.mean:+.1f} {interval} over {len(seeds)} seeds; {where}"

    def _comparable(self, ours: Line, theirs: Line) -> bool:
        """Of one method, all options but those that the claim is about must be the same."""
        first, second = ours.results[0], theirs.results[0]
        if first.method != second.method:
            return True
        better, worse = (side.options for side in self.sides)
        about = {k for k in better.keys() | worse.keys() if better.get(k) != worse.get(k)}
        return all(second.options.get(k) == v for k, v in first.options.items() if k not in about)

    def _signed(self, difference: float) -> float:
        return difference if self.column.better == "high" else -difference


@dataclass(frozen=True)
class PlainClaim(Claim):
    """What a paper says of its method beside a plainer one, which none of the printed tables holds."""

    by: str  # the paper
    figure: str
    better: Mapping[str, Any]  # method, and options
    worse: Mapping[str, Any]
    partition: str | None = None

    @property
    def cited(self) -> str:
        return self.by

    @property
    def sides(self) -> tuple[Side, Side]:
        first, second = (Side(s["method"], s.get("options", {})) for s in (self.better, self.worse))
        return first, second

    @property
    def column(self) -> Column:
        return COLUMNS[self.figure]

    @property
    def small(self) -> str | None:
        return self.partition

    @property
    def regime(self) -> str:
        return regime(self.partition or "dirichlet:0.5")

    def matches(self, line: Line, side: Side) -> bool:
        """As ever, and no ablation: but for what is tuned, the method as it comes on the data set.

        An option that the run does not know came later, as another name or for something new.
        """
        result = line.results[0]
        if not super().matches(line, side):
            return False
        made = create_method(side.method, result.settings["dataset"])
        tuned = {*spaces(type(made)), *(f.name for f in fields(PromptedHead)), *side.options}
        options = through_json(asdict(made)).items()
        usual = {k: v for k, v in options if k not in tuned and k in result.options}
        return _has(result.options, {k: v for k, v in usual.items() if not k.startswith("lr")})


@dataclass(frozen=True)
class PrintedClaim(Claim):
    """A paper prints the row ``better`` of a table above ``worse``."""

    paper: str
    table: str
    dataset: str
    partition: str
    metric: str
    better: str
    worse: str

    @property
    def source(self) -> Paper:
        return get_paper(self.paper)

    @property
    def cited(self) -> str:
        return f"{self.source.name} {self.table}"

    @property
    def numbers(self) -> tuple[Number, Number]:
        """Both printed numbers."""
        return self._number(self.better), self._number(self.worse)

    @cached_property
    def sides(self) -> tuple[Side, Side]:
        """The better and the worse row, each with the options that set it apart from other rows."""
        (a, ours), (b, theirs) = (self._method(n) for n in self.numbers)
        first, second = self.numbers
        better = self._side(first, a, ours, theirs if a == b else {})
        return better, self._side(second, b, theirs, ours if a == b else {})

    @property
    def runnable(self) -> bool:
        return all(self._method(number)[0] in METHODS.names() for number in self.numbers)

    @property
    def column(self) -> Column:
        name = self.numbers[0].metric_here
        assert name is not None
        return COLUMNS[name]

    @property
    def gain(self) -> float:
        """By how much the paper prints the first row above the second, in points."""
        first, second = (number.value for number in self.numbers)
        return self._signed(first - second)

    @property
    def small(self) -> str | None:
        return SMALL.get(self.partition)

    @property
    def regime(self) -> str:
        return regime(self.numbers[0].spec)

    def cards(self) -> list[Card]:
        """The cards behind both rows, with the commands at the paper's scale; none for another network."""
        known, paper = cards(), self.source
        rows = [(paper.row(number), number) for number in self.numbers]
        names = [card_name(paper, row, number) for row, number in rows if not row.why]
        return [known[name] for name in names if name in known]

    def _number(self, row: str) -> Number:
        wanted = (self.table, self.dataset, self.partition, self.metric, row)
        for n in self.source.numbers:
            if (n.table, n.dataset, n.partition, n.metric, n.method) == wanted:
                return n
        raise FczooError(f"claim {self.name} names a number that is not printed: {', '.join(wanted)}")

    def _side(self, number: Number, method: str, own: Mapping[str, Any], other: Mapping[str, Any]) -> Side:
        """A row's side, with the options that the row itself states and those that the ``other`` one does."""
        usual, row = self._usual(method, own.keys() | other.keys()), self.source.row(number)
        printed = {} if row.why else readings(self.source, number)[0].options
        stated = {k: printed[k] for k in usual if k in printed and k not in own}
        unlike = {k: v for k, v in other.items() if k.startswith("lr") and k not in own}
        return Side(method, {**usual, **own}, stated, unlike)

    def _usual(self, method: str, stated: Collection[str]) -> dict[str, Any]:
        """The method's own values of what any ablation of it changes, so that none passes for the method.

        Ablations are those of the claim's paper and of the method's own, which has its name; a client that
        is told what the paper's has to notice is one, too. Rates may differ, as they are tuned.
        """
        sources = [self.source, *(paper for paper in papers().values() if paper.key == method)]
        rows = [r for paper in sources for r in paper.methods.values() if r.get("method") == method]
        changed = {"detector", *stated, *(k for about in rows for k in about.get("options") or {})}
        own = sorted(vars(create_method(method)).items())
        return {k: v for k, v in own if k in changed and not k.startswith("lr")}

    def _method(self, number: Number) -> tuple[str, dict[str, Any]]:
        about = self.source.methods.get(number.method, {})
        if not about.get("method"):
            raise FczooError(f"claim {self.name} names a row without a method: {number.method}")
        return about["method"], dict(about.get("options") or {})


def regime(spec: str) -> str:
    """``few classes`` a client, ``strong skew``, ``mild`` skew or none; ``any``: a split of another kind."""
    name, _, value = plain_split(spec).partition(":")
    if name == "dirichlet":
        return "strong skew" if float(value) < STRONG else "mild"
    return {"quantity": "few classes", "shards": "few classes", "iid": "mild"}.get(name, "any")


@cache
def claims() -> dict[str, Claim]:
    """All claims by name."""
    content = json.loads((files("fczoo.assets") / "claims.json").read_text())
    kinds = [PrintedClaim(**about) if "table" in about else PlainClaim(**about) for about in content]
    return {claim.name: claim for claim in kinds}


def get_claim(name: str) -> Claim:
    """Raises FczooError with the nearest names for an unknown one."""
    if name not in claims():
        raise FczooError(f"no claim is called {name!r}; {nearest(name, list(claims()))}")
    return claims()[name]


def _has(options: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    return all(options.get(k) == v for k, v in wanted.items())
