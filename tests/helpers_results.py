"""The results of this repository, which tests read."""

from pathlib import Path

RESULTS = Path(__file__).parents[1] / "results"
QUICK = RESULTS / "quick.csv"  # the runs whose values protocol quick has
