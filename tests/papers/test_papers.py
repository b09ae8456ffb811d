"""The papers' tables and comparison with them."""

from dataclasses import asdict

import pytest

from fczoo import create_method
from fczoo.core.metrics import METRICS
from fczoo.core.registry import METHODS
from fczoo.papers.compare import differences
from fczoo.papers.printed import DATASETS, get_paper, papers, plain_split
from fczoo.papers.reproduce import cards, get_card
from fczoo.reports.runs import read_experiments
from helpers_papers import B16, CARD, as_json, followed, printed, reading, recorded


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
            "A_N",
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
    """Methods take the options of a paper's reading; every metric, caveat and card has its place."""
    for paper in papers().values():
        assert set(paper.caveats) - {""} <= {n.table for n in paper.numbers}
        assert {n.metric_here for n in paper.numbers} - {None} <= set(METRICS)
        assert set(paper.methods) <= {n.method for n in paper.numbers}
        for number in paper.numbers:
            name, changes = paper.method_here(number)
            if name in METHODS.names():
                create_method(name, DATASETS.get(number.dataset), **changes)
    for card in cards().values():
        settings = card.paper.settings(card.numbers[0])
        assert (
            settings.task_count == card.numbers[0].tasks
            and plain_split(settings.partition) == card.numbers[0].spec
        )


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
    assert "66.8" in row and "90.4 ± 0.1" in row and "-23.6" in row and "no: 11 settings differ" in row
    for word in (
        "rounds 2 (paper: 5)",
        f"(paper: {B16})",
        "train_per_class 20 (paper: all)",
        "precision bf16 (paper: not stated)",
        "seeds 1 (paper: 3)",
    ):
        assert word in page
    assert "fedncm, fppl, fcilpt, fedavg" in page and "16 bit" in page


def test_a_paper_without_such_data_is_said_to_have_none(make_run, tmp_path):
    folder = make_run(tmp_path / "run", {"hgp": {0: 70.0}})
    assert "has no number for the methods and data sets of these runs" in printed(
        "compare", str(folder), "--paper", "hgp", code=1
    )


def test_every_difference_counts(make_run, tmp_path):
    """A run under the protocol's settings has none; each single change is found and named."""
    paper, number = get_paper("hgp"), get_card(CARD).numbers[0]

    def found(
        name: str, backbone: str = B16, seeds: int = 3, options: dict | None = None, **changes: object
    ) -> list[str]:
        runs = {"hgp": dict.fromkeys(range(seeds), 90.0)}
        folder = make_run(tmp_path / name, runs, options or reading(), backbone, **followed(**changes))
        (experiment,) = read_experiments([folder])
        return differences(experiment, experiment.lines[0], paper, number)

    assert (
        found("same") == []
        and found("spelled", partition="dirichlet:beta=0.050,max_tries=10000,draw=sample") == []
    )
    changes = {
        "rounds": 4,
        "epochs": 1,
        "batch_size": 8,
        "augment": "none",
        "clients": 5,
        "participation": 0.5,
        "tasks": 5,
        "train_per_class": 9,
    }
    changes |= {
        "test_per_class": 9,
        "partition": "dirichlet:0.05",
        "precision": "bf16",
        "aggregator": "uniform",
        "test_crop": 1.0,
        "joining": 1,
    }
    for name, value in changes.items():
        (only,) = found(name, **{name: value})
        assert only.startswith(f"{name} ") and "(paper: " in only
    assert found("other", backbone="vit_tiny") == [f"backbone vit_tiny (paper: {B16})"]
    assert found("few", seeds=1) == ["seeds 1 (paper: 3)"]
    assert found("options", options=reading(init="zeros")) == ["hgp.init zeros (paper: normal)"]


def test_what_a_paper_leaves_open_is_a_difference(make_run, tmp_path):
    """FCILPT does not name its weights, so no run can be said to follow it."""
    paper, number = get_paper("fcilpt"), get_card("fcilpt/cifar100/overlap:0.6").numbers[0]
    settings = paper.settings(number)
    options = as_json(asdict(create_method("fcilpt", "cifar100", **settings.method_options("fcilpt"))))
    folder = make_run(
        tmp_path / "run",
        {"fcilpt": {0: 90.0}},
        options,
        settings.backbone,
        **{k: v for k, v in as_json(settings.portable()).items() if k != "backbone"},
    )
    (experiment,) = read_experiments([folder])
    assert differences(experiment, experiment.lines[0], paper, number) == paper.open != []
