"""Places of runs that tests read: the results of this repository, and those behind ``quick``."""

from pathlib import Path

RESULTS = Path(__file__).parents[1] / "results"
QUICK = Path(__file__).parent / "papers" / "quick.csv"  # the runs whose values protocol quick has
