"""Reproduction cards: one for each row of a paper's tables, with the command behind it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from fczoo.core.errors import FczooError
from fczoo.core.names import fold, match
from fczoo.core.options import nearest
from fczoo.core.registry import DATASETS, METHODS
from fczoo.federation.settings import Settings
from fczoo.papers.printed import Number, Paper, Row, papers
from fczoo.papers.readings import Reading, readings
from fczoo.reports.words import option_word

FEW = 8  # cards of a paper that a message names
READINGS = ("print", "released")


@dataclass(frozen=True)
class Card:
    """One printed row: a method on a data set, a split and a number of tasks."""

    name: str
    paper: Paper
    numbers: tuple[Number, ...]

    @property
    def row(self) -> Row:
        return self.paper.row(self.numbers[0])

    @cached_property
    def readings(self) -> list[Reading]:
        """The print's and, where it is public and has the method, the released code's."""
        return readings(self.paper, self.numbers[0])

    def command(self, extra: Sequence[str] = (), reading: str = "print") -> list[str]:
        """Words after ``fczoo``. Raises FczooError where no code is released for a ``released`` reading."""
        if READINGS.index(reading) >= len(self.readings):
            raise FczooError(f"{self.name} has no released reading: no code of {self.paper.name} runs it")
        chosen = self.readings[READINGS.index(reading)]
        settings = chosen.settings
        words = ["bench", "--protocol", self.paper.key, "--methods", chosen.method]
        words += ["--dataset", settings.dataset, "--partition", settings.partition]
        if settings.tasks != _usual(self.paper.key, settings.dataset).tasks:
            words += ["--tasks", option_word(settings.tasks)]
        folder = self.name.replace("/", "-").replace(":", "_")
        suffix = "" if reading == "print" else "-released"
        return [*words, *chosen.words, "--out", f"results/{folder}{suffix}", *extra]


def cards() -> dict[str, Card]:
    """All cards by name: every printed row whose method is registered and that a run can follow.

    A row that a table prints again, such as an ablation's last one, adds its figures to the same card.
    """
    return _cards(implemented=True)


def not_implemented() -> dict[str, Card]:
    """The rows that no run can follow, by the name that a card would have."""
    return _cards(implemented=False)


def _cards(implemented: bool) -> dict[str, Card]:
    found: dict[str, tuple[Paper, list[Number]]] = {}
    methods, datasets = set(METHODS.names()), set(DATASETS.names())
    for paper in papers().values():
        for n in paper.numbers:
            row = paper.row(n)
            if row.method not in methods or row.dataset not in datasets:
                continue
            if bool(row.why) == implemented or n.metric_here is None:
                continue
            numbers = found.setdefault(card_name(paper, row, n), (paper, []))[1]
            if all((n.metric, n.value) != (k.metric, k.value) for k in numbers):
                numbers.append(n)
    return {name: Card(name, paper, tuple(numbers)) for name, (paper, numbers) in found.items()}


def get_card(name: str) -> Card:
    """Return the card of a name.

    Raises FczooError with the nearest cards for an unknown name, and for a row that is not implemented.
    """
    known, absent = cards(), not_implemented()
    spelled = match(name, known)
    if spelled is None:
        if row := match(name, absent):
            raise FczooError(f"{row} is not implemented: {absent[row].row.why}")
        if own := [card for card in known if fold(card).startswith(f"{fold(name)}/")]:
            few = ", ".join(sorted(own, key=lambda card: card.count("/"))[:FEW])
            more = f", ... ({len(own) - FEW} more; see fczoo reproduce)" if len(own) > FEW else ""
            raise FczooError(f"{name} has {len(own)} cards; name one of them: {few}{more}")
        raise FczooError(f"no card is called {name!r}; {nearest(name, list(known))}")
    return known[spelled]


def card_name(paper: Paper, row: Row, number: Number) -> str:
    """``PAPER/DATASET/SPLIT``, with tasks and system where they are not the paper's usual ones."""
    usual = _usual(paper.key, row.dataset)
    tasks = "" if number.tasks == usual.task_count else f"{number.tasks}-tasks"
    split = row.split or "any-split"
    return "/".join(filter(None, [paper.key, row.dataset, split, tasks, row.card]))


@cache
def _usual(protocol: str, dataset: str) -> Settings:
    return Settings.for_dataset(dataset, protocol=protocol)
