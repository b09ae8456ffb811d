"""Reproduction cards: the command behind a paper's row, and whether its number came out."""

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate

from fczoo.core.errors import FczooError
from fczoo.core.options import nearest
from fczoo.federation.settings import Settings
from fczoo.papers.compare import Comparison, comparisons, plus_minus
from fczoo.papers.printed import DATASETS, Number, Paper, papers, plain_split
from fczoo.reports.runs import Experiment, Line, places_below, read_experiments
from fczoo.reports.words import option_word

ALLOWED = 1.0  # points that are put down to versions and machines


@dataclass(frozen=True)
class Card:
    """One row of a paper's own method: a data set and a split."""

    paper: Paper
    numbers: tuple[Number, ...]

    @property
    def name(self) -> str:
        return f"{self.paper.key}/{DATASETS[self.numbers[0].dataset]}/{self.numbers[0].spec}"

    def command(self, extra: Sequence[str] = ()) -> list[str]:
        """Words after ``fczoo``. Raises FczooError where the protocol has no such split."""
        settings, method = self.paper.settings(self.numbers[0]), self.paper.key
        words = [
            "bench",
            "--protocol",
            method,
            "--methods",
            method,
            "--dataset",
            settings.dataset,
            "--partition",
            settings.partition,
        ]
        if settings.tasks != Settings.for_dataset(settings.dataset, protocol=method).tasks:
            words += ["--tasks", option_word(settings.tasks)]
        for field, value in self.paper.method_here(self.numbers[0])[1].items():
            words += ["--set", f"{method}.{field}={option_word(value)}"]
        return [*words, "--out", f"results/{self.name.replace('/', '-').replace(':', '_')}", *extra]


def cards() -> dict[str, Card]:
    """All cards by name: every data set and split for which a paper prints its own method."""
    found: dict[tuple[Any, ...], list[Number]] = {}
    for paper in papers().values():
        own = next(printed for printed, (name, *_) in paper.methods.items() if name == paper.key)
        for n in paper.numbers:
            if n.method == own and n.dataset in DATASETS and n.metric_here and not {";", "("} & set(n.spec):
                known = found.setdefault((paper.key, n.dataset, n.spec, n.tasks), [])
                if all(
                    (n.metric, n.value) != (k.metric, k.value) for k in known
                ):  # an ablation prints it again
                    known.append(n)
    every = [Card(papers()[key[0]], tuple(numbers)) for key, numbers in found.items()]
    return {
        c.name: c for c in reversed(every)
    }  # of two numbers of tasks, the one that the paper prints first


def get_card(name: str) -> Card:
    """Raises FczooError with the nearest cards for an unknown one."""
    known = cards()
    if name not in known:
        raise FczooError(f"no card is called {name!r}; {nearest(name, list(known))}")
    return known[name]


def verdict(card: Card, experiment: Experiment, line: Line) -> str:
    """``reproduced within ...`` or ``not reproduced: ...`` for a line of a run that belongs to a card."""
    found = [c for c in comparisons(experiment, line, card.paper) if c.number in card.numbers]
    if not found:
        return "not reproduced: the run has another data set, split or number of tasks"
    if found[0].differences:
        return f"not reproduced: the run differs from the paper's in {', '.join(found[0].differences)}"
    missed = [c for c in found if abs(c.gap) > tolerance(c)]
    if missed:
        far = "; ".join(
            (
                f"{c.number.metric} {plus_minus(c.ours.mean, c.ours.std)}, paper "
                f"{plus_minus(c.number.value, c.number.std)}, allowed ±{tolerance(c):.1f}"
            )
            for c in missed
        )
        return f"not reproduced: {far}"
    gap, metrics = max(abs(c.gap) for c in found), ", ".join(c.number.metric for c in found)
    return f"reproduced within {gap:.1f} points ({metrics})"


def tolerance(comparison: Comparison) -> float:
    """Points by which a reproduced number may be off.

    One, or twice the standard deviation of the difference if that is more.
    """
    spread = math.hypot(comparison.ours.std or 0.0, comparison.number.std or 0.0)
    return max(ALLOWED, 2 * spread)


def status(card: Card, experiments: Sequence[Experiment]) -> list[str]:
    """One line for each run of the card that result files show; ``never run`` without one."""
    lines = []
    for experiment in experiments:
        number, about = card.numbers[0], experiment.about
        ran = (about.settings["dataset"], experiment.task_count, plain_split(about.partition["spec"]))
        if ran == (DATASETS[number.dataset], number.tasks, number.spec):
            lines += [
                f"run on {_when_and_where(line)}: {verdict(card, experiment, line)} [{_place(line)}]"
                for line in experiment.lines
                if line.results[0].method == card.paper.key
            ]
    return lines or ["never run"]


def _when_and_where(line: Line) -> str:
    """Day and machine of a line's first run."""
    about = line.cells[0].about
    day, machine = about.started[:10] or "an unrecorded day", about.hardware
    if not machine:
        return f"{day}, an unrecorded {about.device}"
    return f"{day}, {', '.join(map(str, machine.get('gpus') or [machine.get('cpu')]))}"


def _place(line: Line) -> Path:
    """Where the runs of a line stand."""
    return Path(line.cells[0].place).parent


def listing(results: Path) -> str:
    """Every card with what the run folders and archives below a folder say about it."""
    experiments = read_experiments([results]) if results.exists() and places_below(results) else []
    rows = []
    for card in reversed(cards().values()):
        printed = ", ".join(f"{n.metric} {plus_minus(n.value, n.std)}" for n in card.numbers)
        rows.append((card.name, printed, "\n".join(status(card, experiments))))
    return tabulate(rows, ["card", "paper", "status"], maxcolwidths=[None, 34, 80])


def spelled(words: Sequence[str]) -> str:
    """A command as a shell takes it."""
    return shlex.join(["fczoo", *words])
