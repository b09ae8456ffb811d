"""The papers' tables and comparison with them."""

import pytest

from fczoo import create_method
from fczoo.core.metrics import METRICS
from fczoo.core.registry import DATASETS, METHODS
from fczoo.papers.printed import get_paper, papers
from helpers_papers import B16, printed, recorded


def test_every_number_is_there_once():
    every = [n for p in papers().values() for n in p.numbers]
    assert (
        len(every) == 1250
        and len({(n.paper, n.table, n.dataset, n.tasks, n.partition, n.method, n.metric) for n in every})
        == 1250
    )
    assert {p.key: len(p.numbers) for p in papers().values()} == {
        "pilora": 246,
        "hgp": 277,
        "fcilpt": 619,
        "fppl": 108,
    }


@pytest.mark.parametrize(
    ("key", "table", "dataset", "spec", "method", "metric", "value", "std"),
    [
        ("hgp", "T1", "CIFAR-100", "dirichlet:0.05", "HGP", "FAA", 90.16, 0.24),
        ("hgp", "T2", "CUB-200", "dirichlet:0.2", "HGP", "FAA", 78.58, 0.60),
        ("pilora", "T1", "CIFAR-100", "quantity:6", "PILoRA", "A_N", 69.5, None),
        (
            "fcilpt",
            "T7",
            "CIFAR-100",
            "overlap:0.6",
            "ablation: sorted+relevant+irrelevant (full)",
            "acc@100classes",
            85.9,
            None,
        ),
        ("fppl", "T1", "ImageNet-R", "dirichlet:0.5", "FPPL", "Abar", 74.33, 0.37),
    ],
)
def test_numbers_keep_their_place(key, table, dataset, spec, method, metric, value, std):
    wanted = (table, dataset, spec, method, metric)
    (found,) = [
        n for n in get_paper(key).numbers if (n.table, n.dataset, n.spec, n.method, n.metric_here) == wanted
    ]
    assert (found.value, found.std) == (value, std)


def test_what_the_protocols_name_exists():
    """Methods take the options of a paper's reading; every metric and caveat has its place."""
    methods, datasets = METHODS.names(), DATASETS.names()
    for paper in papers().values():
        assert set(paper.caveats) - {""} <= {n.table for n in paper.numbers}
        metrics = {n.metric_here for n in paper.numbers if n.classes is None}
        assert metrics - {None} <= set(METRICS)
        assert set(paper.methods) == {n.method for n in paper.numbers}
        words = {n.partition for n in paper.numbers} | {n.dataset for n in paper.numbers}
        assert set(paper.conditions) <= words
        for number in paper.numbers:
            row = paper.row(number)
            if row.method in methods and row.dataset in datasets:
                create_method(row.method, row.dataset, **row.options)


def test_missing_systems_are_named_and_implemented_ones_are_not():
    page = printed("papers", "--missing")
    absent, beyond = page.split("Rows that no run can follow:")
    methods = METHODS.names()
    for paper in papers().values():
        for number in paper.numbers:
            row = paper.row(number)
            here = row.method in methods
            assert row.why or here or f"{number.method} " in absent, number
    names = {line.split()[-1] for line in absent.splitlines() if line}
    assert not names & set(METHODS.names()) and "ResNet-18" in beyond and "COMM" in beyond
    assert "leave hgp out" in printed("papers", "hgp", "--missing", code=1)


def test_papers_prints_lists_and_tables():
    assert "1903" not in printed("papers") and "AppE" in printed("papers") and "T7" in printed("papers")
    page = printed("papers", "HGP", "t1")
    assert (
        "90.39 ± 0.08" in page
        and "ImageNet-A, 10 tasks" in page
        and "EuroSAT, 5 tasks" not in page
        and "16 bit" in page
    )
    assert "656.5" in printed("papers", "pilora", "T1") and "656.5" not in printed("papers", "pilora", "T3")
    assert "did you mean hgp" in printed("papers", "hpg", code=1) and "it has T1, T2" in printed(
        "papers", "hgp", "T9", code=1
    )


def test_the_published_reduced_run_is_compared_and_never_called_comparable(tmp_path):
    page = printed(
        "compare", str(recorded(tmp_path, *(f"cifar100-reduced-{part}" for part in "abc"))), "--paper", "hgp"
    )
    row = next(line for line in page.splitlines() if line.startswith("hgp "))
    assert "66.8" in row and "90.4 ± 0.1" in row and "-23.6" in row and "no: 13 settings differ" in row
    for word in (
        "rounds 2 (paper: 5)",
        f"(paper: {B16})",
        "train_per_class 20 (paper: all)",
        "precision bf16",
        "hgp.logit_norm 0.1 (paper: none)",
        "seeds 1 (paper: 3)",
    ):
        assert word in page
    assert "fedncm, fppl, fcilpt." in page and "16 bit" in page


def test_a_paper_without_such_data_is_said_to_have_none(make_run, tmp_path):
    folder = make_run(tmp_path / "run", {"hgp": {0: 70.0}})
    assert "has no number for the methods and data sets of these runs" in printed(
        "compare", str(folder), "--paper", "hgp", code=1
    )


def test_heads_of_all_printed_rows_start_as_in_released_code() -> None:
    """A row whose head starts at zero, which may be much the better, would not be the paper's."""
    seen = set()
    for paper in papers().values():
        for row in map(paper.row, paper.numbers):
            if row.method in METHODS.names() and "head_init" in METHODS.options(row.method) and not row.why:
                stated = paper.protocol.methods.get(row.method, {}).get("head_init")
                start = row.options.get("head_init", stated and stated.value)
                assert start == ("means" if row.card == "fedncm" else "default"), (paper.key, row.method)
                seen.add((paper.key, row.method))
    assert len(seen) > 30
