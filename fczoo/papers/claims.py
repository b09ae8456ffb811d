"""What papers claim, in their tables and of their own methods: each claim with its sides."""

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache, cached_property
from importlib.resources import files
from typing import Any

from fczoo.core.errors import FczooError
from fczoo.core.files import through_json
from fczoo.core.names import match
from fczoo.core.options import nearest, spaces
from fczoo.core.registry import METHODS, create_method
from fczoo.functional.heads import PromptedHead
from fczoo.papers.cards import Card, card_name, cards
from fczoo.papers.judging import Claim, Side, has, regime, usual_method
from fczoo.papers.printed import Number, Paper, get_paper, papers
from fczoo.papers.readings import readings
from fczoo.reports.columns import COLUMNS, Column
from fczoo.reports.runs import Line, is_rate
from fczoo.reports.words import option_word

TRAINED = "tune"  # the option that says, of any method that has it, how much of the network is trained
TABLES_OF = "hgp"  # whose protocol the commands of plain claims follow: it has most of their methods
SMALL = {
    "alpha=6": "quantity:2",
    "alpha=2": "quantity:1",
    "beta=0.05": "dirichlet:0.05",
    "GLFC-60%": "overlap:0.6",
}
"""Printed split -> that of the run on digits, whose tasks have two classes; else the data set's own."""


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
        return regime(self._split)

    @property
    def at_scale(self) -> list[str]:
        commands = []
        for side, folder in zip(self.sides, ("better", "worse"), strict=True):
            words = [f"--protocol {TABLES_OF} --methods {side.method}"]
            words += [f"--dataset cifar100 --partition {self._split}"]
            words += [f"--set {side.method}.{name}={option_word(v)}" for name, v in side.options.items()]
            words += [f"--seeds 0-2 --out results/claims/{self.name}/{folder}"]
            commands.append("  fczoo bench " + " ".join(words))
        return [f"At the scale of {get_paper(TABLES_OF).name}'s tables:", *commands]

    @property
    def _split(self) -> str:
        return self.partition or "dirichlet:0.5"

    def matches(self, line: Line, side: Side) -> bool:
        """As ever, and no ablation: but for what is tuned, the method as it comes on the data set.

        An option that the run does not know came later, as another name or for something new.
        """
        result = line.results[0]
        if not super().matches(line, side):
            return False
        made = usual_method(side.method, result.settings["dataset"])
        tuned = {*spaces(type(made)), *(f.name for f in fields(PromptedHead)), *side.options}
        options = through_json(asdict(made)).items()
        usual = {k: v for k, v in options if k not in tuned and k in result.options}
        return has(result.options, {k: v for k, v in usual.items() if not is_rate(k)})


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
        name = self.numbers[0].metric_here or self.numbers[0].cost_here
        assert name is not None
        return COLUMNS[name]

    @property
    def gain(self) -> float:
        """By how much the paper prints the first row above the second, in points or, of costs, below it."""
        first, second = (number.value for number in self.numbers)
        return self._signed(first - second)

    @property
    def small(self) -> str | None:
        return SMALL.get(self.partition)

    @property
    def regime(self) -> str:
        return regime(self.numbers[0].spec)

    @property
    def at_scale(self) -> list[str]:
        listed, commands, note = cards(), [], ""
        for number in self.numbers:
            row = self.source.row(number)
            card = Card(card_name(self.source, row, number), self.source, (number,))
            command = f"reproduce {card.name}" if card.name in listed else " ".join(card.command())
            commands.append(f"  fczoo {command}")
            if row.why:
                note = f" (a row is of {row.why})"
        return [f"At the paper's scale{note}:", *commands]

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
        return Side(method, {**usual, **own}, stated, frozenset(usual.keys() - own.keys() - other.keys()))

    def _usual(self, method: str, stated: Collection[str]) -> dict[str, Any]:
        """The method's own values of what any ablation of it changes, so that none passes for the method.

        Ablations are those of the claim's paper and of the method's own, which has its name; to train less
        of the network, as a probe of its features does, is one of any method. Rates may differ.
        """
        sources = [self.source, *(paper for paper in papers().values() if paper.key == method)]
        rows = [r for paper in sources for r in paper.methods.values() if r.get("method") == method]
        changed = {TRAINED, *stated, *(k for about in rows for k in about.get("options") or {})}
        own = sorted(vars(create_method(method)).items())
        return {k: v for k, v in own if k in changed and not is_rate(k)}

    def _method(self, number: Number) -> tuple[str, dict[str, Any]]:
        about = self.source.methods.get(number.method, {})
        if not about.get("method"):
            raise FczooError(f"claim {self.name} names a row without a method: {number.method}")
        return about["method"], dict(about.get("options") or {})


@cache
def claims() -> dict[str, Claim]:
    """All claims by name."""
    content = json.loads((files("fczoo.assets") / "claims.json").read_text(encoding="utf-8"))
    kinds = [PrintedClaim(**about) if "table" in about else PlainClaim(**about) for about in content]
    return {claim.name: claim for claim in kinds}


def get_claim(name: str) -> Claim:
    """Return the claim of a name. Raises FczooError with the nearest names for an unknown one."""
    spelled = match(name, claims())
    if spelled is None:
        raise FczooError(f"no claim is called {name!r}; {nearest(name, claims())}")
    return claims()[spelled]
