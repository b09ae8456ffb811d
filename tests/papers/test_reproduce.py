"""Reproduction cards: the command, the verdict and the list of all."""

import json

import numpy as np
import pytest

from fczoo.core.registry import DATASETS as REGISTERED
from fczoo.data.dataset import ImageData, Images
from fczoo.papers.compare import comparisons
from fczoo.papers.printed import get_paper
from fczoo.papers.reproduce import cards, get_card, status, tolerance, verdict
from fczoo.reports.runs import read_experiments
from helpers_papers import B16, CARD, followed, printed, reading, recorded


def test_a_card_is_the_exact_command():
    out = printed("reproduce", CARD, "--dry-run", "--data-root", "DIR")
    split = "dirichlet:0.05,draw=sample,max_tries=10000"
    folder = "results/hgp-cifar100-dirichlet_0.05"
    assert (
        out == f"fczoo bench --protocol hgp --methods hgp --dataset cifar100 --partition {split} "
        f"--out {folder} --data-root DIR\n"
    )
    assert "--set pilora.head_tune=false" in printed("reproduce", "pilora/cifar100/quantity:6", "--dry-run")
    assert "did you mean hgp/cifar100/dirichlet:0.05" in printed(
        "reproduce", "hgp/cifar100/dirichlet:0.06", code=1
    )


@pytest.mark.parametrize(
    ("faa", "changes", "says"),
    [
        ((90.1, 90.15, 90.2), {}, "reproduced within 0.0 points (FAA)"),  # printed 90.16 +- 0.24
        ((88.5, 88.55, 88.6), {}, "not reproduced: FAA 88.5 ± 0.0, paper 90.2 ± 0.2, allowed ±1.0"),
        # our own spread of 1 allows twice sqrt(1 + 0.24^2)
        ((88.5, 89.5, 87.5), {}, "reproduced within 1.7 points"),
        (
            (90.0, 90.0, 90.0),
            {"rounds": 1},
            "not reproduced: the run differs from the paper's in rounds 1 (paper: 5)",
        ),
    ],
)
def test_verdicts(make_run, tmp_path, faa, changes, says):
    card, runs = get_card(CARD), {"hgp": dict.fromkeys(range(3), 0.0)}
    folder = make_run(tmp_path / "run", runs, reading(), B16, **followed(**changes))
    for seed, value in enumerate(faa):
        path = folder / "hgp" / f"seed{seed}" / "result.json"
        content = {**json.loads(path.read_text()), "accuracy": [[90.0], [value, value]], "metrics": {}}
        path.write_text(json.dumps(content))
    (experiment,) = read_experiments([folder])
    assert verdict(card, experiment, experiment.lines[0]).startswith(says)
    (line,) = status(card, [experiment])
    assert says in line and str(tmp_path / "run" / "hgp") in line
    assert status(get_card("hgp/cifar100/dirichlet:0.5"), [experiment]) == ["never run"]
    assert tolerance(comparisons(experiment, experiment.lines[0], get_paper("hgp"))[0]) >= 1


def test_the_list_claims_only_what_result_files_show(tmp_path):
    listed = printed("reproduce", "--results", str(tmp_path / "nowhere"))
    assert listed.count("never run") == len(cards()) == 35 and "reproduced" not in listed
    recorded(tmp_path, "cifar100-reduced-a")
    real = printed("reproduce", "--results", str(tmp_path))
    assert real.count("not reproduced") == 2 and real.replace("not reproduced", "").count("reproduced") == 0
    words = "".join(real.split())
    assert "results.csv:cifar100-reduced-a/hgp]" in words and "cifar100-reduced-a/pilora]" in words


def test_a_card_runs_and_is_judged(monkeypatch, tmp_path):
    """The command of a card, cut down and on noise, ends in a verdict that names every change."""
    rng = np.random.default_rng(0)
    parts = [
        Images(rng.integers(0, 255, (100 * n, 8, 8, 3), np.uint8), np.repeat(np.arange(100), n))
        for n in (8, 1)
    ]
    monkeypatch.setattr(
        REGISTERED.get("cifar100"), "load", lambda self, root: ImageData(*parts, tuple(map(str, range(100))))
    )
    cut = [
        "--backbone",
        "vit_nano_32",
        "--clients",
        "2",
        "--rounds",
        "1",
        "--epochs",
        "1",
        "--seeds",
        "0",
        "--set",
        "hgp.prefix_len=2",
    ]
    (tmp_path / "cifar-100-python").mkdir()
    cut += ["--set", "hgp.server_epochs=1", "--data-root", str(tmp_path), "--out", str(tmp_path / "run")]
    out = printed("reproduce", "hgp/cifar100/dirichlet:0.5", *cut)
    last = out.splitlines()[-1]
    assert last.startswith(
        "hgp/cifar100/dirichlet:0.5: not reproduced: the run differs from the paper's in "
        f"backbone vit_nano_32 (paper: {B16})"
    )
    for words in (
        "clients 2 (paper: 10)",
        "rounds 1 (paper: 5)",
        "epochs 1 (paper: 5)",
        "seeds 1 (paper: 3)",
        "hgp.prefix_len 2 (paper: 100)",
    ):
        assert words in last
    assert last.count("(paper: ") == 7
