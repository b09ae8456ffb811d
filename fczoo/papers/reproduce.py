"""Whether the number of a card came out: the verdict on a run, and the state of all cards."""

import math
import shlex
from collections.abc import Sequence
from pathlib import Path

from tabulate import tabulate

from fczoo.core.options import plural
from fczoo.papers.cards import Card, card_name, cards
from fczoo.papers.compare import Comparison, absent_reasons, beside, plus_minus
from fczoo.papers.printed import Paper, choose_numbers, get_paper, papers, plain_split
from fczoo.reports.runs import Experiment, Line, experiments_below

ALLOWED = 1.0  # points that are put down to versions and machines


def verdict(card: Card, experiment: Experiment, line: Line) -> str:
    """``reproduced within ...`` or ``not reproduced: ...`` for a line of a run that belongs to a card."""
    found = beside(experiment, line, card.paper, card.numbers)
    if not found or not concerns(card, experiment, line):
        return "not reproduced: the run has another data set, method, split or number of tasks"
    first = found[0]
    if not first.followed:
        pairs = zip(first.readings, map(", ".join, first.differences), strict=True)
        return f"not reproduced: {'; '.join(f'differs from {name} in {what}' for name, what in pairs)}"
    missed = [c for c in found if abs(c.gap) > tolerance(card.paper, c)]
    if missed:
        far = "; ".join(
            (
                f"{c.number.metric} {plus_minus(c.ours.mean, c.ours.std)}, paper "
                f"{plus_minus(c.number.value, c.number.std)}, allowed ±{tolerance(card.paper, c):.1f}"
            )
            for c in missed
        )
        return f"not reproduced with {first.followed}: {far}"
    gap, metrics = max(abs(c.gap) for c in found), ", ".join(c.number.metric for c in found)
    shown = metrics if len(found) <= 4 else plural(len(found), "figure")
    said = f"; differs from the print in {', '.join(first.from_print)}" if first.from_print else ""
    return f"reproduced with {first.followed} within {gap:.1f} points ({shown}){said}"


def tolerance(paper: Paper, comparison: Comparison) -> float:
    """Points by which a reproduced number may be off.

    One, or twice the standard deviation of the difference if that is more, both of samples.
    """
    spread = math.hypot(comparison.ours.std or 0.0, paper.sample_std(comparison.number) or 0.0)
    return max(ALLOWED, 2 * spread)


def concerns(card: Card, experiment: Experiment, line: Line) -> bool:
    """Whether a line of a run has a card's method, options, data set, split and number of tasks."""
    about, result, row = experiment.about, line.results[0], card.row
    if (about.settings["dataset"], experiment.task_count) != (row.dataset, card.numbers[0].tasks):
        return False
    splits = {plain_split(reading.settings.partition) for reading in card.readings}
    return (
        result.method == row.method
        and (row.split is None or plain_split(about.partition["spec"]) in splits)
        and all(result.options.get(k) == v for k, v in row.options.items())
    )


def status(card: Card, experiments: Sequence[Experiment]) -> list[str]:
    """One line for each run of the card that result files show; ``never run`` without one."""
    lines = [
        f"run on {_when_and_where(line)}: {verdict(card, experiment, line)} [{_place(line)}]"
        for experiment in experiments
        for line in experiment.lines
        if concerns(card, experiment, line) and has_conditions(card, experiment)
    ]
    return lines or ["never run"]


def has_conditions(card: Card, experiment: Experiment) -> bool:
    """Whether a run has what its row has other than the paper's other rows, such as 100 clients."""
    return all(experiment.settings[k] == v for k, v in card.row.settings.items())


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


def listing(
    results: Path, paper: str | None = None, tables: Sequence[str] = (), rows: Sequence[str] = ()
) -> str:
    """List every card with what the run folders and archives below a folder say about it.

    Of one paper, and of the named tables and rows only, where any are named. Rows that are not
    implemented follow. Raises FczooError for unknown names.
    """
    used = [get_paper(paper)] if paper else [*papers().values()]
    wanted = choose_numbers([n for p in used for n in p.numbers], tables, rows)
    names, reasons = set(), []
    for p in used:
        own = [n for n in wanted if n.paper == p.name]
        names |= {card_name(p, p.row(n), n) for n in own if n.metric_here and not p.row(n).why}
        reasons += [f"{p.name}: {line}" for line in absent_reasons(p, own)]
    chosen = [card for name, card in cards().items() if name in names]
    parts = [_listed(chosen, results)] if chosen else []
    return "\n\n".join([*parts, *reasons, "\n".join(f"{p.name}: {p.spread}." for p in used)])


def _listed(chosen: Sequence[Card], results: Path) -> str:
    experiments = experiments_below(results)
    rows = []
    for card in chosen:
        shown = [f"{n.metric} {plus_minus(n.value, n.std)}" for n in card.numbers]
        if len(shown) > 4:
            shown = [*shown[:1], f"... {len(shown) - 2} more", shown[-1]]
        rows.append((card.name, ", ".join(shown), "\n".join(status(card, experiments))))
    return tabulate(rows, ["card", "paper", "status"], maxcolwidths=[None, 34, 80])


def spelled(words: Sequence[str]) -> str:
    """A command as a shell takes it."""
    return shlex.join(["fczoo", *words])
