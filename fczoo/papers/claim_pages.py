"""What ``fczoo claims`` prints."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fczoo.papers.claims import PrintedClaim, claims
from fczoo.papers.judging import Claim, Verdict
from fczoo.papers.printed import get_paper
from fczoo.reports.runs import Experiment, experiments_below
from fczoo.reports.words import word_table


def listing(results: Path, paper: str | None = None) -> str:
    """A line a claim: what is said, what is printed, and how often it holds in runs below ``results``."""
    experiments = experiments_below(results)
    tuned = [replace(e, lines=tuple(line for line in e.lines if line.tuned)) for e in experiments]
    key = paper and get_paper(paper).key
    chosen = [c for c in claims().values() if key is None or _of(c, key)]
    known = [c for c in chosen if c.runnable]
    fair, every = ([_verdicts(c, runs) for c in known] for runs in (tuned, experiments))
    rows = [
        (c.name, c.cited, _printed(c), _counted(some), _counted(found), c.says)
        for c, some, found in zip(known, fair, every, strict=True)
    ]
    text = word_table(rows, ["claim", "source", "printed gain", "both tuned", "all runs", "what it says"])
    left = [c.name for c in chosen if not c.runnable]
    lines = [
        f"Where both sides were tuned: {_summed(fair)}.",
        f"In all runs: {_summed(every)}.",
        "A verdict is that of two rows of one table, one of each side; 2x: two such pairs say so.",
        *([f"Of systems that are not implemented: {', '.join(left)}."] if left else []),
    ]
    return "\n".join([text, "", *lines])


def page(claim: Claim, results: Path) -> str:
    """A claim with its numbers, the commands behind it, and what every run says."""
    verdicts = claim.verdicts(experiments_below(results))
    lines = [
        f"{claim.name}: {claim.says}.",
        _source(claim),
        *claim.at_scale,
        f"In minutes: fczoo claims --run {claim.name}",
        *(f"{verdict}: {said}" for verdict, said in verdicts),
    ]
    return "\n".join(lines if verdicts else [*lines, "never run"])


def _source(claim: Claim) -> str:
    if not isinstance(claim, PrintedClaim):
        return f"{claim.cited}; {claim.column.name}."
    first, second = claim.numbers
    return (
        f"{claim.cited}, {claim.dataset}, {claim.partition}: {claim.metric} {first.value:g} "
        f"({first.method}) and {second.value:g} ({second.method})."
    )


def _of(claim: Claim, key: str) -> bool:
    return isinstance(claim, PrintedClaim) and claim.paper == key


def _printed(claim: Claim) -> str:
    if not isinstance(claim, PrintedClaim):
        return ""
    first, second = (number.value for number in claim.numbers)
    return f"{claim.gain:+.1f}" if claim.column.better else f"{first / second:.2g}x"


def _verdicts(claim: Claim, experiments: Sequence[Experiment]) -> list[Verdict]:
    return [verdict for verdict, _ in claim.verdicts(experiments)]


def _counted(found: Sequence[Verdict]) -> str:
    words = [f"{v} {found.count(v)}x" if found.count(v) > 1 else v for v in dict.fromkeys(found)]
    return ", ".join(words) or "never run"


def _summed(verdicts: Sequence[Sequence[Verdict]]) -> str:
    """Count the claims that hold: runs with a significant difference count first, untested ones last."""
    counts = Counter(_kind(set(found)) for found in verdicts)
    order = [
        "hold",
        "do not hold",
        "hold in some runs and not in others",
        "show no significant difference",
        "were not tested",
        "were never run",
    ]
    return (
        f"of {len(verdicts)} claims {', '.join(f'{counts[kind]} {kind}' for kind in order if counts[kind])}"
    )


def _kind(verdicts: set[Verdict]) -> str:
    if {"holds", "does not hold"} <= verdicts:
        return "hold in some runs and not in others"
    if "holds" in verdicts:
        return "hold"
    if "does not hold" in verdicts:
        return "do not hold"
    if "no significant difference" in verdicts:
        return "show no significant difference"
    return "were not tested" if verdicts else "were never run"
