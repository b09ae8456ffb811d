"""Grouping of runs into tables, and two records of the same run."""

import json

import pytest

from fczoo.board.benchmark_page import heading
from fczoo.reports.runs import read_experiments
from helpers_runs import tune


@pytest.mark.parametrize("first", ["searched", "by hand"])
def test_searched_record_of_duplicate_run_is_kept(first, make_run, tmp_path):
    """Use the record with a search if a run has two records, in any order.

    A search may find the values of an earlier run.
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
def test_partition_seeds_share_table_if_partition_varies(vary, tables, make_run, tmp_path):
    for seed in (0, 1):
        settings = {"vary": vary.split(","), "partition_seed": seed}
        make_run(tmp_path / str(seed), {"fedavg": {seed: 70.0}}, **settings)
    assert len(read_experiments([tmp_path])) == tables


@pytest.mark.parametrize("vary", ["training", "training,class-order"])
def test_runs_on_other_images_have_separate_table(vary, make_run, tmp_path):
    """Put runs on other images into another table, also if seeds vary the class order.

    A folder of an older version has no hash of its images and joins the first table.
    """
    for name, seed, images in [("a", 0, "1"), ("b", 1, "1"), ("c", 0, "2"), ("d", 2, "")]:
        folder = make_run(tmp_path / name, {"fedavg": {seed: 70.0}}, vary=vary.split(","))
        about = json.loads((folder / "bench.json").read_text())
        data = {"data": {"sha256": images * 64}} if images else {}
        (folder / "bench.json").write_text(json.dumps(about | data))
    experiments = read_experiments([tmp_path])
    assert [experiment.seeds for experiment in experiments] == [[0, 1, 2], [0]]
    assert len({heading(experiment).file for experiment in experiments}) == 2
