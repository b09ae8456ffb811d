"""Reproduction of printed numbers: cards, verdicts on runs, and the status of all cards."""

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from tabulate import tabulate

from fczoo.core.errors import FczooError
from fczoo.core.names import fold, match
from fczoo.core.options import flag, plural
from fczoo.core.registry import DATASETS, METHODS
from fczoo.federation.settings import Settings
from fczoo.papers.compare import Comparison, compare_numbers, describe_missing_rows, plus_minus
from fczoo.papers.printed_numbers import (
    Paper,
    PrintedNumber,
    PrintedRow,
    choose_numbers,
    get_paper,
    papers,
    plain_split,
)
from fczoo.papers.variants import PRINT, Reading, readings
from fczoo.reports.runs import Experiment, Line
from fczoo.reports.suites import all_experiments
from fczoo.reports.text_format import nearest_or_advice, option_word

Cell = dict[str, str | list[str]]  # options of ``fczoo bench`` by name
MAX_LISTED = 8  # most cards in a message
READINGS = ("print", "released")


@dataclass(frozen=True)
class Target:
    """Card: a printed row, that is, a method on a data set, a split and a number of tasks."""

    name: str
    paper: Paper
    numbers: tuple[PrintedNumber, ...]

    @cached_property
    def row(self) -> PrintedRow:
        return self.paper.row(self.numbers[0])

    @cached_property
    def readings(self) -> list[Reading]:
        """Return the reading of the print and, if released code has the method, of the code."""
        return readings(self.paper, self.numbers[0])

    def cell(self, reading: str = "print") -> Cell:
        """Return the options of ``fczoo bench`` as text, by name.

        Args:
            reading: Reading of the number: ``print`` or ``released``.

        Raises:
            FczooError: The reading is ``released`` and no released code has the method.
        """
        if READINGS.index(reading) >= len(self.readings):
            raise FczooError(
                f"{self.name} has no reading 'released': no released code of {self.paper.name} has "
                "this row"
            )
        variant = self.readings[READINGS.index(reading)]
        method, settings = variant.config.method, variant.config.settings
        cell: Cell = {"protocol": self.paper.key, "methods": method}
        cell |= {"dataset": settings.dataset, "partition": settings.partition}
        if settings.tasks != _default_settings(self.paper.key, settings.dataset).tasks:
            cell["tasks"] = option_word(settings.tasks)
        cell |= {name: option_word(value) for name, value in variant.changed_settings.items()}
        cell["set"] = [f"{method}.{k}={option_word(v)}" for k, v in variant.changed_options.items()]
        return cell

    def folder(self, reading: str = "print") -> str:
        """Return the name of the run folder.

        Args:
            reading: Reading of the number: ``print`` or ``released``.
        """
        folder = self.name.replace("/", "-").replace(":", "_")
        return folder if reading == "print" else f"{folder}-released"

    def command(self, extra_arguments: Sequence[str] = (), reading: str = "print") -> list[str]:
        """Return the arguments of ``fczoo``.

        Args:
            extra_arguments: Arguments to append.
            reading: Reading of the number: ``print`` or ``released``.

        Raises:
            FczooError: The reading is ``released`` and no released code has the method.
        """
        arguments = ["bench", *cell_arguments(self.cell(reading))]
        return [*arguments, "--out", f"results/{self.folder(reading)}", *extra_arguments]


def cell_arguments(cell: Cell) -> list[str]:
    """Return the options of a cell as arguments of a command.

    Args:
        cell: Values by option; a list repeats the option.
    """
    return [
        argument
        for name, value in cell.items()
        for text in ([value] if isinstance(value, str) else value)
        for argument in (flag(name), text)
    ]


def cards() -> dict[str, Target]:
    """Return all cards by name: printed rows of registered methods that a run can follow.

    A row that a paper prints twice, such as the last one of an ablation, is one card.
    """
    return _cards(implemented=True)


def not_implemented() -> dict[str, Target]:
    """Return rows that no run can follow, by the name that a card would have."""
    return _cards(implemented=False)


def _cards(implemented: bool) -> dict[str, Target]:
    names = (frozenset(registry.names()) for registry in (METHODS, DATASETS))
    return dict(_cards_of_names(implemented, *names))


@cache
def _cards_of_names(
    implemented: bool, methods: frozenset[str], datasets: frozenset[str]
) -> Mapping[str, Target]:
    """Return the cards of registered methods and data sets; ``fczoo claims`` needs them often."""
    numbers_by_card: dict[str, tuple[Paper, list[PrintedNumber]]] = {}
    for paper in papers().values():
        for n in paper.numbers:
            row = paper.row(n)
            if row.method not in methods or row.dataset not in datasets:
                continue
            if bool(row.why) == implemented or n.our_metric is None:
                continue
            numbers = numbers_by_card.setdefault(card_name(paper, row, n), (paper, []))[1]
            if all((n.metric, n.value) != (k.metric, k.value) for k in numbers):
                numbers.append(n)
    return {
        name: Target(name, paper, tuple(numbers))
        for name, (paper, numbers) in numbers_by_card.items()
    }


def get_card(name: str) -> Target:
    """Return the card of a name.

    Args:
        name: Name in any spelling that ``match`` accepts.

    Raises:
        FczooError: The name is unknown, names a row that is not implemented, or is the prefix of
            several cards; the message gives the reason or the nearest names.
    """
    all_cards = cards()
    full_name = match(name, all_cards)
    if full_name is None:
        missing_cards = not_implemented()
        if row := match(name, missing_cards):
            raise FczooError(f"{row} is not implemented: {missing_cards[row].row.why}")
        if cards_below := [card for card in all_cards if fold(card).startswith(f"{fold(name)}/")]:
            first_names = ", ".join(
                sorted(cards_below, key=lambda card: card.count("/"))[:MAX_LISTED]
            )
            remainder = (
                f", ... ({len(cards_below) - MAX_LISTED} more; see fczoo reproduce)"
                if len(cards_below) > MAX_LISTED
                else ""
            )
            raise FczooError(
                f"{name} has {len(cards_below)} cards; give one: {first_names}{remainder}"
            )
        paper = name.partition("/")[0].casefold()
        advice = f"see fczoo reproduce{f' {paper}' if paper in papers() else ''}"
        raise FczooError(
            f"no card is called {name!r}; {nearest_or_advice(name, all_cards, advice)}"
        )
    return all_cards[full_name]


def card_name(paper: Paper, row: PrintedRow, number: PrintedNumber) -> str:
    """Return the name of a card: ``PAPER/DATASET/SPLIT``, with unusual tasks and systems.

    Args:
        paper: Paper of the row.
        row: Conditions of the number.
        number: Printed number.
    """
    defaults = _default_settings(paper.key, row.dataset)
    tasks = "" if number.tasks == defaults.task_count else f"{number.tasks}-tasks"
    split = row.split or "any-split"
    return "/".join(filter(None, [paper.key, row.dataset, split, tasks, row.card]))


@cache
def _default_settings(protocol: str, dataset: str) -> Settings:
    return Settings.for_dataset(dataset, protocol=protocol)


TOLERANCE = 1.0  # points of difference that versions and machines may cause


def verdict(card: Target, experiment: Experiment, line: Line) -> str:
    """Return the verdict on a row: ``reproduced with ...`` or ``not reproduced ...``.

    Args:
        card: Card with its printed numbers.
        experiment: Experiment of the line.
        line: Row of a table.
    """
    comparisons = compare_numbers(experiment, line, card.paper, card.numbers)
    if not comparisons or not matches_card(card, experiment, line):
        return (
            "not reproduced: the run has another data set, method, option, partition or number of "
            "tasks"
        )
    first = comparisons[0]
    if not first.matching_reading:
        pairs = zip(first.readings, map(", ".join, first.differences), strict=True)
        return (
            "not reproduced: "
            f"{'; '.join(f'differs from {name} in {words}' for name, words in pairs)}"
        )
    failures = [c for c in comparisons if abs(c.gap) > tolerance(card.paper, c)]
    if failures:
        deviations = "; ".join(
            (
                f"{c.number.metric} {plus_minus(c.ours.mean, c.ours.std)}, paper "
                f"{plus_minus(c.number.value, c.number.std)}, allowed "
                f"±{tolerance(card.paper, c):.1f}"
            )
            for c in failures
        )
        return f"not reproduced with {first.matching_reading}: {deviations}"
    gap, metrics = (
        max(abs(c.gap) for c in comparisons),
        ", ".join(c.number.metric for c in comparisons),
    )
    metrics_text = metrics if len(comparisons) <= 4 else plural(len(comparisons), "metric")
    print_note = (
        f"; differs from {PRINT} in {', '.join(first.print_differences)}"
        if first.print_differences
        else ""
    )
    reading = first.matching_reading
    return f"reproduced with {reading} within {gap:.1f} points ({metrics_text}){print_note}"


def tolerance(paper: Paper, comparison: Comparison) -> float:
    """Return the accepted deviation in points.

    It is 1, or twice the root of the sum of both sample variances if that is larger.

    Args:
        paper: Paper that printed the number.
        comparison: Our figure next to the number.
    """
    std = math.hypot(comparison.ours.std or 0.0, paper.sample_std(comparison.number) or 0.0)
    return max(TOLERANCE, 2 * std)


def matches_card(card: Target, experiment: Experiment, line: Line) -> bool:
    """Return whether a row has a card's method, options, data set, partition and tasks.

    Args:
        card: Card to compare with.
        experiment: Experiment of the line.
        line: Row of a table.
    """
    bench_file, result, row = experiment.bench_file, line.results[0], card.row
    if (result.method, bench_file.settings["dataset"]) != (row.method, row.dataset):
        return False
    if experiment.task_count != card.numbers[0].tasks:
        return False
    splits = {plain_split(reading.config.settings.partition) for reading in card.readings}
    return (row.split is None or plain_split(bench_file.partition["spec"]) in splits) and all(
        result.options.get(k) == v for k, v in row.options.items()
    )


def status(card: Target, experiments: Sequence[Experiment]) -> list[str]:
    """Return one line per row that runs a card; ``never run`` without one.

    Args:
        card: Card to search.
        experiments: Experiments to search.
    """
    lines = [
        f"run on {_day_and_machine(line)}: {verdict(card, experiment, line)} [{_run_folder(line)}]"
        for experiment in experiments
        for line in experiment.lines
        if matches_card(card, experiment, line) and has_conditions(card, experiment)
    ]
    return lines or ["never run"]


def has_conditions(card: Target, experiment: Experiment) -> bool:
    """Return whether a run has the special conditions of its row, such as 100 clients.

    Args:
        card: Card of the row.
        experiment: Experiment of the run.
    """
    return all(experiment.settings[k] == v for k, v in card.row.settings.items())


def _day_and_machine(line: Line) -> str:
    """Return day and machine of a line's first run."""
    bench_file = line.records[0].bench_file
    day, machine = bench_file.started[:10] or "an unknown date", bench_file.hardware
    if not machine:
        return f"{day}, an unknown {bench_file.device}"
    return f"{day}, {', '.join(map(str, machine.get('gpus') or [machine.get('cpu')]))}"


def _run_folder(line: Line) -> Path:
    """Return the folder of a row's runs."""
    return Path(line.records[0].place).parent


def listing(
    results: Path, paper: str | None = None, tables: Sequence[str] = (), rows: Sequence[str] = ()
) -> str:
    """List cards with the status of their runs, then rows that are not implemented.

    Args:
        results: Folder with suites, run folders and archives.
        paper: Key of a paper, for only its cards; None: all papers.
        tables: Tables to list; empty: all.
        rows: Rows to list; empty: all.

    Raises:
        FczooError: The paper, a table or a row is unknown.
    """
    chosen_papers = [get_paper(paper)] if paper else [*papers().values()]
    chosen_numbers = choose_numbers([n for p in chosen_papers for n in p.numbers], tables, rows)
    names, reasons = set(), []
    for p in chosen_papers:
        paper_numbers = [n for n in chosen_numbers if n.paper == p.name]
        names |= {
            card_name(p, p.row(n), n) for n in paper_numbers if n.our_metric and not p.row(n).why
        }
        reasons += [f"{p.name}: {line}" for line in describe_missing_rows(p, paper_numbers)]
    chosen_cards = [card for name, card in cards().items() if name in names]
    parts = [_card_table(chosen_cards, results)] if chosen_cards else []
    return "\n\n".join(
        [*parts, *reasons, "\n".join(f"{p.name}: {p.spread}." for p in chosen_papers)]
    )


def _card_table(chosen_cards: Sequence[Target], results: Path) -> str:
    experiments = all_experiments(results)
    rows = []
    for card in chosen_cards:
        texts = [f"{n.metric} {plus_minus(n.value, n.std)}" for n in card.numbers]
        if len(texts) > 4:
            texts = [
                *texts[:1],
                f"... {len(texts) - 2} more",
                texts[-1],
            ]
        rows.append((card.name, ", ".join(texts), "\n".join(status(card, experiments))))
    return tabulate(rows, ["card", "paper", "status"], maxcolwidths=[None, 34, 80])


def shell_command(arguments: Sequence[str]) -> str:
    """Format a command for a shell.

    Args:
        arguments: Arguments of ``fczoo``.
    """
    return shlex.join(["fczoo", *arguments])
