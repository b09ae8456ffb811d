"""Critical-difference diagrams: which methods differ significantly over all benchmarks."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

from fczoo.board.charts import as_csv
from fczoo.board.ranks import Pair, critical, pairs, shortage
from fczoo.reports.runs import Line
from fczoo.reports.significance import LEVEL
from fczoo.reports.tables import COLUMNS, entry_of


def test_differences(lines: Sequence[Line]) -> dict[str, Any]:
    """Test pairs of methods and compute mean ranks over seeds.

    Args:
        lines: Rows of one benchmark; upper bounds among them are left out.

    Returns:
        Template data: pairs, their number and CSV file, level, mean ranks and shortage.
    """
    competing = [(line, entry_of(line, COLUMNS["A_N"])) for line in lines if line.competes]
    entries = [(line.label, entry) for line, entry in competing if entry]
    pair_tests = pairs([entry for _, entry in entries])
    rows = [
        (
            label,
            [
                _pair(pair_tests.get((i, j)), label, entries[j][0])
                for j in range(i + 1, len(entries))
            ],
        )
        for i, (label, _) in enumerate(entries)
    ]
    seeds = dict.fromkeys(seed for _, entry in entries for seed in entry.by_seed)
    blocks = [
        {label: e.by_seed[seed] for label, e in entries if seed in e.by_seed} for seed in seeds
    ]
    return {
        "pairs": rows if pair_tests else [],
        "pair_count": len(pair_tests),
        "pairs_csv": _pairs_csv([label for label, _ in entries], pair_tests),
        "level": LEVEL,
        "ranks": critical(blocks),
        "shortage": shortage(blocks, "seeds"),
    }


def _pairs_csv(labels: Sequence[str], tested: Mapping[tuple[int, int], Pair]) -> str:
    rows = [(labels[i], labels[j], *astuple(pair)) for (i, j), pair in tested.items()]
    return as_csv(["method", "other", "difference", "seeds", "p", "p corrected"], rows)


def _pair(pair: Pair | None, better: str, worse: str) -> dict[str, str]:
    """Return a cell of the table of pairs."""
    if pair is None:
        return {
            "sign": "†",
            "kind": "untested",
            "says": f"{better} and {worse}: not tested",
            "worse": worse,
        }
    kind = "sure" if pair.corrected_p < LEVEL else "alone" if pair.p < LEVEL else "open"
    return {
        "sign": {"sure": "●", "alone": "○", "open": "≈"}[kind],
        "kind": kind,
        "worse": worse,
        "says": (
            f"{better} − {worse}: {pair.difference:.2f} points over {pair.seeds} seeds, "
            f"p {pair.p:.2g}, corrected {pair.corrected_p:.2g}"
        ),
    }
