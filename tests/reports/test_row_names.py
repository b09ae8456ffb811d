"""Grouping of runs into tables, and names of rows."""

import pytest

from fczoo.reports.captions import describe
from fczoo.reports.runs import read_experiments

THREE = {"one": {0: 70.0, 1: 71.0}, "two": {0: 60.0, 1: 61.0}}


def test_runs_share_table_only_with_equal_settings(make_run, tmp_path):
    make_run(tmp_path / "a", {"one": THREE["one"]})
    make_run(tmp_path / "b", {"two": THREE["two"]}, device="cpu")
    make_run(tmp_path / "c", {"one": THREE["one"]}, rounds=9)
    make_run(tmp_path / "d", {"one": THREE["one"]}, {"lr": 0.5, "blocks": [0, 1]})
    experiments = read_experiments([tmp_path])
    assert [[line.label for line in e.lines] for e in experiments] == [
        ["one", "two", "one (blocks=0,1)"],
        ["one"],
    ]


def test_heading_names_pool(make_run, tmp_path):
    make_run(tmp_path / "a", {"one": THREE["one"]}, pool="cls+mean")
    make_run(tmp_path / "b", {"one": THREE["one"]})
    headings = [describe(experiment) for experiment in read_experiments([tmp_path])]
    assert [", pool cls+mean (" in heading for heading in headings] == [True, False]


@pytest.mark.parametrize(
    ("options", "labels"),
    [
        (
            [
                {"start": "zeros", "lr": 0.012345678, "head_lr": 1.0},
                {"start": "means", "lr": 0.3, "head_lr": 2.0},
            ],
            ["one (start=zeros)", "one (start=means)"],
        ),
        (
            [
                {"start": "zeros", "lr": 0.012345678},
                {"start": "zeros", "lr": 0.3},
                {"start": "means", "lr": 0.3},
            ],
            [
                "one (start=zeros, lr=0.0123)",
                "one (start=zeros, lr=0.3)",
                "one (start=means, lr=0.3)",
            ],
        ),
        (
            [{"lr": 0.012345678, "rank": 4}, {"lr": 0.01234, "rank": 4}, {"lr": 0.5, "rank": 8}],
            ["one (lr=0.012345678, rank=4)", "one (lr=0.01234, rank=4)", "one (lr=0.5, rank=8)"],
        ),
    ],
)
def test_row_labels_use_rates_only_if_needed(make_run, tmp_path, options, labels):
    for number, values in enumerate(options):
        make_run(tmp_path / f"{number}", {"one": THREE["one"]}, values)
    (experiment,) = read_experiments([tmp_path])
    assert [line.label for line in experiment.lines] == labels
