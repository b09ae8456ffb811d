"""Rules for the runs in one table, and for two records of the same run."""

import json

import pytest

from fczoo.board.benchmark import heading
from fczoo.reports.runs import read_experiments
from helpers_runs import tune


@pytest.mark.parametrize("first", ["searched", "by hand"])
def test_of_two_records_of_a_run_that_with_a_search_counts_whichever_comes_first(
    first, make_run, tmp_path
):
    """Count the record with a search if a run has two records.

    A search may find the very values that a method was run with before.

    A search may find the very values that a method was run with before.
    """
    for name in ("searched", "by hand"):
        folder = make_run(tmp_path / ("a" if name == first else "b"), {"fedavg": {0: 70.0}})
        if name == "searched":
            tune(folder, 8, ["fedavg"])
    (experiment,) = read_experiments([tmp_path])
    (line,) = experiment.lines
    assert [record.trials for record in line.records] == [8] and line.is_tuned


@pytest.mark.parametrize(
    ("vary", "tables"), [("training,class-order", 2), ("training,partition", 1)]
)
def test_splits_by_other_seeds_share_a_table_only_where_seeds_move_them(
    vary, tables, make_run, tmp_path
):
    for seed in (0, 1):
        settings = {"vary": vary.split(","), "partition_seed": seed}
        make_run(tmp_path / str(seed), {"fedavg": {seed: 70.0}}, **settings)
    assert len(read_experiments([tmp_path])) == tables


@pytest.mark.parametrize("vary", ["training", "training,class-order"])
def test_runs_on_other_images_have_a_table_of_their_own(vary, make_run, tmp_path):
    """Runs on other images have another table.

    This holds also where each seed has its own order: seeds 0 of two folders have other images
    then.

    A folder of an older version, which does not say what its images were, joins the first.
    """
    for name, seed, images in [("a", 0, "1"), ("b", 1, "1"), ("c", 0, "2"), ("d", 2, "")]:
        folder = make_run(tmp_path / name, {"fedavg": {seed: 70.0}}, vary=vary.split(","))
        about = json.loads((folder / "bench.json").read_text())
        data = {"data": {"sha256": images * 64}} if images else {}
        (folder / "bench.json").write_text(json.dumps(about | data))
    experiments = read_experiments([tmp_path])
    assert [experiment.seeds for experiment in experiments] == [[0, 1, 2], [0]]
    assert len({heading(experiment).file for experiment in experiments}) == 2
