"""Claims of papers from their tables and about their own methods."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

from fczoo.core.errors import FczooError
from fczoo.core.files import read_toml, through_json
from fczoo.core.options import spaces
from fczoo.core.registry import METHODS, create_method
from fczoo.functional.heads import PromptedHead
from fczoo.papers.claims_between_settings import TwoSettingClaim
from fczoo.papers.pair_claims import Claim, ClaimSide, Verdict, default_method, has_options, regime
from fczoo.papers.printed_numbers import Paper, PrintedNumber, find_named, get_paper, papers
from fczoo.papers.reproduce import Target, card_name, cards
from fczoo.papers.variants import readings
from fczoo.reports.runs import Experiment, Line, experiments_below, is_rate
from fczoo.reports.suites import experiments_of_suites
from fczoo.reports.tables import COLUMNS, Column
from fczoo.reports.text_format import option_word, word_table

TUNE_OPTION = "tune"
"""Option that selects the trained part of the network, in every method that has it."""
COMMAND_PROTOCOL = "hgp"
"""Protocol of the commands of plain claims; its paper has most of their methods."""
DIGITS_PARTITIONS = {
    "alpha=6": "quantity:2",
    "alpha=2": "quantity:1",
    "beta=0.05": "dirichlet:0.05",
    "GLFC-60%": "overlap:0.6",
}
"""Partition on digits, whose tasks have two classes, by printed split; others use the default."""


@dataclass(frozen=True)
class PlainClaim(Claim):
    """Claim of a paper about its method and a simpler one, without a printed table."""

    by: str  # the paper
    figure: str
    better: Mapping[str, Any]  # method, and options
    worse: Mapping[str, Any]
    partition: str | None = None

    @property
    def citation(self) -> str:
        return self.by

    @property
    def sides(self) -> tuple[ClaimSide, ClaimSide]:
        first, second = (
            ClaimSide(s["method"], s.get("options", {})) for s in (self.better, self.worse)
        )
        return first, second

    @property
    def column(self) -> Column:
        return COLUMNS[self.figure]

    @property
    def digits_partition(self) -> str | None:
        return self.partition

    @property
    def regime(self) -> str:
        return regime(self._split)

    @property
    def full_scale_commands(self) -> list[str]:
        commands = []
        for side, folder in zip(self.sides, ("better", "worse"), strict=True):
            words = [f"--protocol {COMMAND_PROTOCOL} --methods {side.method}"]
            words += [f"--dataset cifar100 --partition {self._split}"]
            words += [
                f"--set {side.method}.{name}={option_word(v)}" for name, v in side.options.items()
            ]
            words += [f"--seeds 0-2 --out results/claims/{self.name}/{folder}"]
            commands.append("  fczoo bench " + " ".join(words))
        return [f"At the scale of {get_paper(COMMAND_PROTOCOL).name}'s tables:", *commands]

    @property
    def _split(self) -> str:
        return self.partition or "dirichlet:0.5"

    def matches(self, line: Line, side: ClaimSide) -> bool:
        """Return whether a row is the side and not an ablation.

        Except for tuned options, the row must have the method's values for the data set. Options
        that did not exist at the time of the run are ignored.

        Args:
            line: Row of a table.
            side: Side of this claim.
        """
        result = line.results[0]
        if not super().matches(line, side):
            return False
        method = default_method(side.method, result.settings["dataset"])
        free_options = {
            *spaces(type(method)),
            *(f.name for f in fields(PromptedHead)),
            *side.options,
        }
        options = through_json(asdict(method)).items()
        defaults = {k: v for k, v in options if k not in free_options and k in result.options}
        return has_options(result.options, {k: v for k, v in defaults.items() if not is_rate(k)})


@dataclass(frozen=True)
class PrintedClaim(Claim):
    """Claim from a paper's table: its row ``better`` has the better number than ``worse``."""

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
    def citation(self) -> str:
        return f"{self.source.name} {self.table}"

    @property
    def numbers(self) -> tuple[PrintedNumber, PrintedNumber]:
        """Return both printed numbers."""
        return self._number(self.better), self._number(self.worse)

    @cached_property
    def sides(self) -> tuple[ClaimSide, ClaimSide]:
        """Return the better and the worse row, each with its distinguishing options."""
        (a, ours), (b, theirs) = (self._method(n) for n in self.numbers)
        first, second = self.numbers
        better = self._side(first, a, ours, theirs if a == b else {})
        return better, self._side(second, b, theirs, ours if a == b else {})

    @property
    def is_runnable(self) -> bool:
        return all(self._method(number)[0] in METHODS.names() for number in self.numbers)

    @property
    def column(self) -> Column:
        name = self.numbers[0].our_metric or self.numbers[0].our_cost
        assert name is not None
        return COLUMNS[name]

    @property
    def gain(self) -> float:
        """Return the printed advantage of the first row, in points or in the unit of a cost."""
        first, second = (number.value for number in self.numbers)
        return self.gain_of(first - second)

    @property
    def digits_partition(self) -> str | None:
        return DIGITS_PARTITIONS.get(self.partition)

    @property
    def regime(self) -> str:
        return regime(self.numbers[0].spec)

    @property
    def full_scale_commands(self) -> list[str]:
        cards_by_name, commands, note = cards(), [], ""
        for number in self.numbers:
            row = self.source.row(number)
            card = Target(card_name(self.source, row, number), self.source, (number,))
            command = (
                f"reproduce {card.name}" if card.name in cards_by_name else " ".join(card.command())
            )
            commands.append(f"  fczoo {command}")
            if row.why:
                note = f" (these runs differ from the paper's: {row.why})"
        return [f"At the paper's scale{note}:", *commands]

    def _number(self, row: str) -> PrintedNumber:
        key = (self.table, self.dataset, self.partition, self.metric, row)
        for n in self.source.numbers:
            if (n.table, n.dataset, n.partition, n.metric, n.method) == key:
                return n
        raise FczooError(f"claim {self.name}: no table of the paper has {', '.join(key)}")

    def _side(
        self,
        number: PrintedNumber,
        method: str,
        own_options: Mapping[str, Any],
        other_options: Mapping[str, Any],
    ) -> ClaimSide:
        """Return a row's side, with the options that it or the other row states."""
        defaults = self._default_options(method, own_options.keys() | other_options.keys())
        row = self.source.row(number)
        reading_options = {} if row.why else readings(self.source, number)[0].options
        print_values = {
            k: reading_options[k] for k in defaults if k in reading_options and k not in own_options
        }
        return ClaimSide(
            method,
            {**defaults, **own_options},
            print_values,
            frozenset(defaults.keys() - own_options.keys() - other_options.keys()),
        )

    def _default_options(self, method: str, stated_names: Collection[str]) -> dict[str, Any]:
        """Return the method's default values of options that ablations change.

        Ablations are rows of the claim's paper and of the method's own paper. Training less of the
        network counts as an ablation of any method. Learning rates are left out.
        """
        sources = [self.source, *(paper for paper in papers().values() if paper.key == method)]
        rows = [r for paper in sources for r in paper.methods.values() if r.method == method]
        ablation_options = {
            TUNE_OPTION,
            *stated_names,
            *(name for row in rows for name in row.options),
        }
        method_values = sorted(vars(create_method(method)).items())
        return {k: v for k, v in method_values if k in ablation_options and not is_rate(k)}

    def _method(self, number: PrintedNumber) -> tuple[str, dict[str, Any]]:
        row = self.source.methods.get(number.method)
        if row is None or row.method is None:
            raise FczooError(f"claim {self.name} names a row without a method: {number.method}")
        return row.method, row.options


class _ClaimsFile(msgspec.Struct, forbid_unknown_fields=True):
    """Content of ``claims.toml``."""

    printed: list[PrintedClaim]
    plain: list[PlainClaim]
    across: list[TwoSettingClaim]


@cache
def claims() -> dict[str, Claim]:
    """Return all claims by name."""
    content = read_toml(files("fczoo.assets") / "claims.toml", "list of claims", _ClaimsFile)
    return {claim.name: claim for claim in (*content.printed, *content.across, *content.plain)}


def get_claim(name: str) -> Claim:
    """Return the claim of a name.

    Args:
        name: Name in any spelling that ``match`` accepts.

    Raises:
        FczooError: The name is unknown; the message gives the nearest names.
    """
    return find_named("claim", name, claims())


def listing(results: Path, paper: str | None = None) -> str:
    """Format one line per claim: source, printed advantage, verdicts of runs, and statement.

    Args:
        results: Folder with suites, or one with run folders and archives, or an archive.
        paper: Key of a paper, for only its claims; None: all claims.

    Returns:
        Table with a summary below it.

    Raises:
        FczooError: The paper is unknown.
    """
    experiments = _experiments(results)
    tuned_experiments = [
        replace(e, lines=tuple(line for line in e.lines if line.is_tuned)) for e in experiments
    ]
    key = paper and get_paper(paper).key
    chosen_claims = [c for c in claims().values() if key is None or _is_of_paper(c, key)]
    runnable_claims = [c for c in chosen_claims if c.is_runnable]
    verdicts_of_tuned, verdicts_of_all = (
        [_verdicts(c, runs) for c in runnable_claims] for runs in (tuned_experiments, experiments)
    )
    rows = [
        (
            c.name,
            c.citation,
            _gain_text(c),
            _count_text(tuned_verdicts),
            _count_text(all_verdicts),
            c.says,
        )
        for c, tuned_verdicts, all_verdicts in zip(
            runnable_claims, verdicts_of_tuned, verdicts_of_all, strict=True
        )
    ]
    text = word_table(
        rows, ["claim", "source", "printed gain", "both tuned", "all runs", "what it says"]
    )
    missing_names = [c.name for c in chosen_claims if not c.is_runnable]
    lines = [
        f"Where both sides were tuned: {_summary(verdicts_of_tuned)}.",
        f"In all runs: {_summary(verdicts_of_all)}.",
        "A verdict compares two rows of one table, one per side; 2x means two such pairs.",
    ]
    if missing_names:
        names = ", ".join(missing_names)
        lines.append(f"Claims about systems that are not implemented: {names}.")
    return "\n".join([text, "", *lines])


def _experiments(results: Path) -> list[Experiment]:
    """Return the experiments of a folder's suites; without suites, all experiments below it."""
    suite_experiments = experiments_of_suites(results)
    return experiments_below(results) if suite_experiments is None else suite_experiments


def page(claim: Claim, results: Path) -> str:
    """Describe a claim with its numbers, its commands, and the verdict of every run.

    Args:
        claim: Claim to describe.
        results: Folder with suites, else with run folders and archives, or an archive.
    """
    verdicts = claim.verdicts(_experiments(results))
    lines = [
        f"{claim.name}: {claim.says}.",
        _source(claim),
        *claim.full_scale_commands,
        f"Short test on digits: fczoo claims --run {claim.name}",
        *(f"{verdict}: {explanation}" for verdict, explanation in verdicts),
    ]
    return "\n".join(lines if verdicts else [*lines, "not run here"])


def _source(claim: Claim) -> str:
    if isinstance(claim, TwoSettingClaim):
        return claim.printed_losses
    if not isinstance(claim, PrintedClaim):
        return f"{claim.citation}; {claim.column.name}."
    first, second = claim.numbers
    return (
        f"{claim.citation}, {claim.dataset}, {claim.partition}: {claim.metric} {first.value:g} "
        f"({first.method}) and {second.value:g} ({second.method})."
    )


def _is_of_paper(claim: Claim, key: str) -> bool:
    return isinstance(claim, PrintedClaim | TwoSettingClaim) and claim.paper == key


def _gain_text(claim: Claim) -> str:
    if isinstance(claim, TwoSettingClaim):
        return f"{claim.gain:+.1f}"
    if not isinstance(claim, PrintedClaim):
        return ""
    first, second = (number.value for number in claim.numbers)
    return f"{claim.gain:+.1f}" if claim.column.better else f"{first / second:.2g}x"


def _verdicts(claim: Claim, experiments: Sequence[Experiment]) -> list[Verdict]:
    return [verdict for verdict, _ in claim.verdicts(experiments)]


def _count_text(verdicts: Sequence[Verdict]) -> str:
    counts = Counter(verdicts)
    texts = [f"{verdict} {count}x" if count > 1 else verdict for verdict, count in counts.items()]
    return ", ".join(texts) or "not run here"


def _summary(verdicts: Sequence[Sequence[Verdict]]) -> str:
    """Count claims by their combined verdict; significant differences outweigh other verdicts."""
    counts = Counter(_combined_verdict(set(claim_verdicts)) for claim_verdicts in verdicts)
    order = [
        "hold",
        "do not hold",
        "hold in some runs and not in others",
        "show no significant difference",
        "were not tested",
        "were not run here",
    ]
    return (
        f"of {len(verdicts)} claims "
        f"{', '.join(f'{counts[kind]} {kind}' for kind in order if counts[kind])}"
    )


def _combined_verdict(verdicts: set[Verdict]) -> str:
    if {"holds", "does not hold"} <= verdicts:
        return "hold in some runs and not in others"
    if "holds" in verdicts:
        return "hold"
    if "does not hold" in verdicts:
        return "do not hold"
    if "no significant difference" in verdicts:
        return "show no significant difference"
    return "were not tested" if verdicts else "were not run here"
