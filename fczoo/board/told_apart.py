"""Which methods of a benchmark the runs tell apart."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

from fczoo.board.download import as_csv
from fczoo.board.ranks import BLOCKS, Pair, critical, pairs, shortage
from fczoo.reports.columns import COLUMNS
from fczoo.reports.runs import Line
from fczoo.reports.tables import LEVEL, entry_of


def told_apart(lines: Sequence[Line]) -> dict[str, Any]:
    """Pairs of methods that are tested against each other, and mean ranks over seeds."""
    competing = [(line, entry_of(line, COLUMNS["A_N"])) for line in lines if line.competes]
    entries = [(line.label, entry) for line, entry in competing if entry]
    tested = pairs([entry for _, entry in entries])
    rows = [
        (label, [_pair(tested.get((i, j)), label, entries[j][0]) for j in range(i + 1, len(entries))])
        for i, (label, _) in enumerate(entries)
    ]
    often = {label: entry for label, entry in entries if len(entry.by_seed) >= BLOCKS} or dict(entries)
    first, *others = (entry.by_seed for entry in often.values()) if often else ({},)
    seeds = [seed for seed in first if all(seed in own for own in others)]
    blocks = [{label: entry.by_seed[seed] for label, entry in often.items()} for seed in seeds]
    return {
        "pairs": rows if tested else [],
        "pair_count": len(tested),
        "pairs_csv": _pairs_csv([label for label, _ in entries], tested),
        "level": LEVEL,
        "ranks": critical(blocks),
        "shortage": shortage(blocks, "seeds"),
    }


def _pairs_csv(labels: Sequence[str], tested: Mapping[tuple[int, int], Pair]) -> str:
    rows = [(labels[i], labels[j], *astuple(pair)) for (i, j), pair in tested.items()]
    return as_csv(["method", "other", "difference", "seeds", "p", "p corrected"], rows)


def _pair(pair: Pair | None, better: str, worse: str) -> dict[str, str]:
    """A cell of the table of pairs."""
    if pair is None:
        return {"sign": "", "kind": "untested", "says": f"{better} and {worse}: not tested", "worse": worse}
    kind = "sure" if pair.corrected < LEVEL else "alone" if pair.p < LEVEL else "open"
    return {
        "sign": {"sure": "●", "alone": "○", "open": "≈"}[kind],
        "kind": kind,
        "worse": worse,
        "says": (
            f"{better} − {worse}: {pair.difference:.2f} points over {pair.seeds} seeds, "
            f"p {pair.p:.2g}, corrected {pair.corrected:.2g}"
        ),
    }
