"""Which runs stand in one table, and which of two records of the same run counts."""

import pytest

from fczoo.reports.runs import read_experiments
from helpers_runs import tune


@pytest.mark.parametrize("first", ["searched", "by hand"])
def test_of_two_records_of_a_run_that_with_a_search_counts_whichever_comes_first(first, make_run, tmp_path):
    """A search may find the very values that a method was run with before."""
    for name in ("searched", "by hand"):
        folder = make_run(tmp_path / ("a" if name == first else "b"), {"fedavg": {0: 70.0}})
        if name == "searched":
            tune(folder, 8, ["fedavg"])
    (experiment,) = read_experiments([tmp_path])
    (line,) = experiment.lines
    assert [cell.trials for cell in line.cells] == [8] and line.tuned


@pytest.mark.parametrize(("vary", "tables"), [("training,class-order", 2), ("training,partition", 1)])
def test_splits_by_other_seeds_share_a_table_only_where_seeds_move_them(vary, tables, make_run, tmp_path):
    for seed in (0, 1):
        moved = {"vary": vary.split(","), "partition_seed": seed}
        make_run(tmp_path / str(seed), {"fedavg": {seed: 70.0}}, **moved)
    assert len(read_experiments([tmp_path])) == tables
