"""Compare the table of ablations in the handbook with the archives."""

import re
import statistics
from collections import defaultdict
from pathlib import Path

import pytest

from fczoo.reports.suites import archived_runs

ROOT = Path(__file__).parents[2]


def means() -> dict[str, tuple[float, float]]:
    """Return mean and standard deviation of A_N by row of all archives of ablations."""
    values = defaultdict(list)
    for archive in sorted((ROOT / "results").glob("ablations*.csv")):
        for name, record in archived_runs(archive).items():
            values[name.rpartition("/")[0]].append(record.result.metrics["A_N"])
    return {row: (statistics.mean(v), statistics.stdev(v)) for row, v in values.items()}


def test_table_numbers_match_archive() -> None:
    page = (ROOT / "docs" / "fidelity.md").read_text(encoding="utf-8")
    number = r"(-?[\d.]+) ± ([\d.]+)"
    printed = re.findall(
        rf"^\| (\w+) \| {number} \| ([\w ]+) \| {number} \|", page, flags=re.MULTILINE
    )
    archived = means()
    assert len(printed) >= 4
    for method, mean, deviation, row, other_mean, other_deviation in printed:
        for name, *said in (
            (method, mean, deviation),
            (f"{method} {row}", other_mean, other_deviation),
        ):
            assert tuple(map(float, said)) == pytest.approx(archived[name], abs=0.0501), name
    assert len(archived) == 2 * len(printed)
