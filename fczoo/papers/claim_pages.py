"""What ``fczoo claims`` prints."""

from collections.abc import Sequence
from pathlib import Path

from fczoo.papers.claims import Claim, PrintedClaim, claims
from fczoo.papers.printed import get_paper
from fczoo.reports.runs import Experiment, experiments_below
from fczoo.reports.words import word_table


def listing(results: Path, paper: str | None = None) -> str:
    """A line a claim: what is said, what is printed, and how often it holds in runs below ``results``."""
    experiments = experiments_below(results)
    if paper is not None:
        get_paper(paper)
    chosen = [c for c in claims().values() if paper is None or _of(c, paper)]
    rows = [(c.name, c.cited, _printed(c), _counted(c, experiments), c.says) for c in chosen if c.runnable]
    left = [c.name for c in chosen if not c.runnable]
    text = word_table(rows, ["claim", "source", "printed gain", "here", "what it says"])
    return f"{text}\n\nOf systems that are not implemented: {', '.join(left)}." if left else text


def page(claim: Claim, results: Path) -> str:
    """A claim with its numbers, the commands behind it, and what every run says."""
    verdicts = claim.verdicts(experiments_below(results))
    lines = [
        f"{claim.name}: {claim.says}.",
        *(_print(claim) if isinstance(claim, PrintedClaim) else [f"{claim.cited}; {claim.column.name}."]),
        f"In minutes: fczoo claims --run {claim.name}",
        *(f"{verdict}: {said}" for verdict, said in verdicts),
    ]
    return "\n".join(lines if verdicts else [*lines, "never run"])


def _print(claim: PrintedClaim) -> list[str]:
    first, second = claim.numbers
    commands = dict.fromkeys(f"  fczoo reproduce {card.name}" for card in claim.cards())
    return [
        f"{claim.cited}, {claim.dataset}, {claim.partition}: {claim.metric} {first.value:g} "
        f"({first.method}) and {second.value:g} ({second.method}).",
        "At the paper's scale:",
        *commands,
    ]


def _of(claim: Claim, paper: str) -> bool:
    return isinstance(claim, PrintedClaim) and claim.paper == paper


def _printed(claim: Claim) -> str:
    return f"{claim.gain:+.1f}" if isinstance(claim, PrintedClaim) else ""


def _counted(claim: Claim, experiments: Sequence[Experiment]) -> str:
    found = [verdict for verdict, _ in claim.verdicts(experiments)]
    words = [f"{v} {found.count(v)}x" if found.count(v) > 1 else v for v in dict.fromkeys(found)]
    return ", ".join(words) or "never run"
