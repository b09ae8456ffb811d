"""Reproduction cards: command, verdict and list."""

import json
import shutil
import tomllib

import numpy as np
import pytest

from fczoo.cli.bench import bench
from fczoo.core.registry import DATASETS as REGISTERED
from fczoo.core.registry import METHODS
from fczoo.data.dataset import ImageData, Images
from fczoo.papers.compare import compare_numbers
from fczoo.papers.printed_numbers import PrintedMethod, get_paper, papers
from fczoo.papers.reproduce import cards, get_card, status, tolerance, verdict
from fczoo.reports.runs import read_experiments
from helpers_papers import B16, CARD, output_of, paper_options, paper_settings, write_archive
from helpers_results import QUICK, RESULTS


def test_card_prints_exact_command():
    split = "dirichlet:0.05,draw=sample,max_tries=10000"
    start = f"fczoo bench --protocol hgp --methods hgp --dataset cifar100 --partition {split} "
    as_printed = (
        "--mean 0,0,0 --std 1,1,1 --augment randomcrop --test-crop 1 --set hgp.prefix_len=200 "
        "--set hgp.support=all --set hgp.clip=none --set hgp.logit_norm=none "
        "--set hgp.class_weights=counts --set hgp.draw=round "
    )
    folder = "results/hgp-cifar100-dirichlet_0.05"
    out = output_of("reproduce", CARD, "--dry-run", "--data-root", "DIR")
    assert out == f"{start}{as_printed}--out {folder} --data-root DIR\n"
    out = output_of("reproduce", CARD, "--reading", "released", "--dry-run")
    assert out == f"{start}--as-released fed-mammoth --out {folder}-released\n"
    assert "--set pilora.head_tune=false" in output_of(
        "reproduce", "pilora/cifar100/quantity:6", "--dry-run"
    )
    assert "did you mean hgp/cifar100/dirichlet:0.05" in output_of(
        "reproduce", "hgp/cifar100/dirichlet:0.06", code=1
    )
    assert "no released code of FCILPT has this row" in output_of(
        "reproduce", "fcilpt/cifar100/overlap:0.6", "--reading", "released", "--dry-run", code=1
    )


@pytest.mark.parametrize(
    ("name", "words", "metric", "value"),
    [
        ("fcilpt/cifar100/overlap:0.6/5-tasks", "--tasks 5", "acc@40classes", 92.8),
        ("fcilpt/cifar100/overlap:0.6/20-tasks", "--tasks 20", "acc@15classes", 94.6),
        ("fcilpt/cifar100/overlap:0.6/no-sort", "--set fcilpt.sort=false", "acc@100classes", 85.3),
        ("hgp/cifar100/dirichlet:0.05/rebalance-old", "--set hgp.rebalance=old", "FAA", 81.91),
        (
            "hgp/cifar100/dirichlet:0.05/100-clients-10-drawn",
            "--clients 100 --participation 10",
            "FAA",
            80.82,
        ),
        ("hgp/cub200/any-split/joint", "--methods joint", "FAA", 86.04),
        ("hgp/cub200/dirichlet:0.2/codap", "--methods codap", "FAA", 29.19),
        ("pilora/cifar100/quantity:2/head-tune", "--set pilora.head_tune=true", "A_N", 56.5),
        ("pilora/cifar100/quantity:2/fedncm", "--set fedavg.head_init=means", "A_N", 49.6),
        ("pilora/cifar100/quantity:6/frozen", "--set pilora.lr_lora=0", "A_N", 68.6),
        ("fppl/imagenet_r/dirichlet:0.5/unify-fusion", "--set fppl.debias=false", "A_T", 52.78),
        ("fppl/imagenet_r/dirichlet:0.5/40-clients", "--clients 40", "A_T", 68.18),
        (
            "fppl/cifar100/iid/40-rounds",
            "--rounds 40 --set fppl.support=all --set fppl.lr=0.0001",
            "Abar",
            89.1,
        ),
    ],
)
def test_card_has_command_options_and_printed_value(name, words, metric, value):
    card = get_card(name)
    assert words in output_of("reproduce", name, "--dry-run")
    assert [n.value for n in card.numbers if n.metric == metric] == [value]


def test_every_implemented_accuracy_has_card():
    """Find every accuracy on exactly one card.

    An ablation's last row and the table's main row share a card.
    """
    numbers = [number for card in cards().values() for number in card.numbers]
    assert len(numbers) == len(set(numbers))
    values = {}
    for name, card in cards().items():
        for number in card.numbers:
            values.setdefault((number.paper, number.metric, number.value), set()).add(
                name.split("/")[1]
            )
    methods = METHODS.names()
    for paper in papers().values():
        for n in paper.numbers:
            row = paper.row(n)
            if row.method in methods and not row.why and n.our_metric:
                assert row.dataset in values[n.paper, n.metric, n.value], n


def test_registered_method_adds_card(monkeypatch):
    """Add a card when the method of a printed row is registered."""
    assert "no card is called" in output_of(
        "reproduce", "fppl/cub200/dirichlet:0.5/toy", "--dry-run", code=1
    )
    monkeypatch.setitem(get_paper("fppl").methods, "FedSLCA", PrintedMethod("toy"))
    toy = type("Toy", (METHODS.get("fedavg"),), {"name": "toy"})
    monkeypatch.setitem(METHODS._entries, "toy", toy)
    assert "--methods toy" in output_of("reproduce", "fppl/cub200/dirichlet:0.5/toy", "--dry-run")
    assert "FedSLCA" not in output_of("papers", "--missing")


@pytest.mark.parametrize(
    ("faa", "changes", "says"),
    [
        (
            (90.1, 90.15, 90.2),
            {},
            "reproduced with the paper's settings within 0.0 points (FAA)",
        ),  # printed 90.16 +- 0.24
        (
            (88.5, 88.55, 88.6),
            {},
            "not reproduced with the paper's settings: FAA 88.5 ± 0.0, paper 90.2 ± 0.2, allowed ±1.0",
        ),
        # the standard deviation 1 of the run allows 2 sqrt(1 + 0.24^2)
        ((88.5, 89.5, 87.5), {}, "reproduced with the paper's settings within 1.7 points"),
        (
            (90.0, 90.0, 90.0),
            {"rounds": 1},
            "not reproduced: differs from the paper's settings in rounds 1 (paper: 5); differs from the "
            "released code",
        ),
    ],
)
def test_verdicts(make_run, tmp_path, faa, changes, says):
    card, runs = get_card(CARD), {"hgp": dict.fromkeys(range(3), 0.0)}
    folder = make_run(tmp_path / "run", runs, paper_options(), B16, **paper_settings(**changes))
    for seed, value in enumerate(faa):
        path = folder / "hgp" / f"seed{seed}" / "result.json"
        content = {
            **json.loads(path.read_text()),
            "accuracy": [[90.0], [value, value]],
            "metrics": {},
        }
        path.write_text(json.dumps(content))
    (experiment,) = read_experiments([folder])
    assert verdict(card, experiment, experiment.lines[0]).startswith(says)
    (line,) = status(card, [experiment])
    assert says in line and str(tmp_path / "run" / "hgp") in line
    assert status(get_card("hgp/cifar100/dirichlet:0.5"), [experiment]) == ["never run"]
    assert (
        tolerance(
            card.paper,
            compare_numbers(experiment, experiment.lines[0], card.paper, card.numbers)[0],
        )
        >= 1
    )


def test_verdict_names_released_code(make_run, tmp_path):
    card, runs = get_card(CARD), {"hgp": dict.fromkeys(range(3), 100.0)}
    folder = make_run(tmp_path / "run", runs, paper_options(1), B16, **paper_settings(1))
    (experiment,) = read_experiments([folder])
    text = verdict(card, experiment, experiment.lines[0])
    assert text.startswith("reproduced with the released code (fed-mammoth) within ")
    assert "differs from the paper's settings in" in text and "hgp.clip 1 (paper: none)" in text


def test_list_reports_only_stored_results(tmp_path):
    page = output_of("reproduce", "--results", str(tmp_path))
    assert page.count("never run") == len(cards()) > 300 and "reproduced" not in page
    rows = [f"cifar100-112px-tuned/{name}/seed0" for name in ("hgp", "pilora")]
    write_archive(tmp_path, QUICK, *rows)
    real = output_of("reproduce", "--results", str(tmp_path))
    assert real.count("not reproduced") == 2
    assert real.replace("not reproduced", "").count("reproduced") == 0
    words = "".join(real.split())
    assert "results.csv:cifar100-112px-tuned/hgp/seed0/hgp]" in words
    assert "cifar100-112px-tuned/pilora/seed0/pilora]" in words


def test_list_covers_suites_and_run_folders(make_run, tmp_path):
    """Count a suite's archive and a run folder, but not the run folders of the suite."""
    (tmp_path / "suites").mkdir()
    for name in ("suites/cifar100.toml", "cifar100.csv"):
        shutil.copy(RESULTS / name, tmp_path / name)
    make_run(tmp_path / "suite-runs/cifar100/runs/hgp-1", {"hgp": {0: 50.0}})
    page_of_suite = output_of("reproduce", "--paper", "hgp", "--results", str(tmp_path))
    assert "cifar100.csv:hgp/seed0/hgp]" in "".join(page_of_suite.split())
    write_archive(tmp_path, QUICK, "cifar100-112px-tuned/hgp/seed0")
    page_of_both = output_of("reproduce", "--paper", "hgp", "--results", str(tmp_path))
    assert page_of_both.count("not reproduced") == page_of_suite.count("not reproduced") + 1


def test_list_ignores_unfinished_run(make_run, tmp_path):
    make_run(tmp_path / "run", {"hgp": {0: 50.0}})
    (result,) = tmp_path.glob("run/**/result.json")
    result.unlink()
    assert output_of("reproduce", "--results", str(tmp_path)).count("never run") == len(cards())
    assert "not run here" in output_of("claims", "--results", str(tmp_path))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (["--dry-run"], "--dry-run and --reading need CARD"),
        (["--reading", "released"], "--dry-run and --reading need CARD"),
        (
            [CARD, "--results", "."],
            f"--results does not apply to one card; leave out --results or {CARD}",
        ),
        (
            [CARD, "--partition", "iid,dirichlet:0.5"],
            "is one setting, but --partition names several",
        ),
        ([CARD, "--dataset", "cifar100,digits"], "is one setting, but --dataset names several"),
        ([CARD, "--config", "cells.toml"], "is one setting, but cells.toml has cells"),
        ([CARD, "--methods", "l2p,ewc"], f"--methods lacks hgp, the method of {CARD}"),
    ],
)
def test_conflicting_card_options_are_rejected(wrong, says, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cells.toml").write_text("[[cells]]\nrounds = 1\n[[cells]]\nrounds = 2\n")
    text = output_of("reproduce", *wrong, code=1)
    assert says in text and text.count("\n") == 1
    assert "does not exist" in output_of("reproduce", "--results", "nowhere", code=2)


def test_card_judges_only_its_method(monkeypatch, make_run, tmp_path):
    monkeypatch.setattr(bench, "invoke", lambda context: None)
    runs = dict.fromkeys(("ewc", "hgp"), dict.fromkeys(range(3), 100.0))
    make_run(tmp_path / "run", runs, paper_options(), B16, **paper_settings())
    lines = output_of(
        "reproduce", CARD, "--methods", "ewc,hgp", "--out", str(tmp_path / "run")
    ).splitlines()
    assert len(lines) == 3
    assert lines[-1].startswith(f"{CARD}: reproduced with the paper's settings")


def test_card_run_ends_with_verdict(monkeypatch, tmp_path):
    """Run a card's command with small settings on random images.

    The verdict names every changed setting.
    """
    rng = np.random.default_rng(0)
    parts = [
        Images(rng.integers(0, 255, (100 * n, 8, 8, 3), np.uint8), np.repeat(np.arange(100), n))
        for n in (3, 1)
    ]
    monkeypatch.setattr(
        REGISTERED.get("cifar100"),
        "load",
        lambda self, root: ImageData(*parts, tuple(map(str, range(100)))),
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
    cut += [
        "--set",
        "hgp.server_epochs=1",
        "--reading",
        "print",
        "--data-root",
        str(tmp_path),
        "--out",
        str(tmp_path / "run"),
    ]
    out = output_of("reproduce", "hgp/cifar100/dirichlet:0.5", *cut)
    last = out.splitlines()[-1]
    start = "hgp/cifar100/dirichlet:0.5: not reproduced: differs from the paper's settings in "
    assert last.startswith(f"{start}backbone vit_nano_32 (paper: {B16})")
    for words in (
        "clients 2 (paper: 10)",
        "rounds 1 (paper: 5)",
        "epochs 1 (paper: 5)",
        "seeds 1 (paper: 3)",
        "hgp.prefix_len 2 (paper: 200)",
    ):
        assert words in last
    assert last.count("(paper: ") == 7 and "hgp.clip none (code: 1)" in last
    assert "does not state what a seed changes" in out.splitlines()[-2]
    # run the same cell as part of its table; this writes a settings file first
    monkeypatch.chdir(tmp_path)
    table_words = [*cut[:-1], str(tmp_path / "table")]
    out = output_of("reproduce", "hgp/t1", "--cells", "hgp/cifar100/dirichlet:0.5", *table_words)
    assert out.startswith("1 cell is in results/hgp-T1.toml.")
    assert f"{start}backbone vit_nano_32 (paper: {B16})" in out.splitlines()[-1]
    assert (tmp_path / "table/hgp-cifar100-dirichlet_0.5/bench.json").exists()


def test_table_writes_settings_file_with_cells(monkeypatch, tmp_path):
    """Write the cells of appendix E: one method with 10, 20, 50 and 100 of 100 clients."""
    monkeypatch.chdir(tmp_path)
    page = output_of("reproduce", "hgp").split("\n\n")[0]
    assert [line.split()[0] for line in page.splitlines()[2:]] == ["T1", "T2", "T3", "AppE"]
    assert "  ".join(page.splitlines()[-1].split()[:4]) == "AppE  cifar100  1  4"
    assert page.endswith("fczoo reproduce hgp/AppE")
    cells = "*10-drawn", "*20-drawn"
    words = [word for cell in cells for word in ("--cells", cell)]
    output_of("reproduce", "hgp/AppE", *words, "--methods", "nosuch", "--dry-run", code=1)
    content = tomllib.loads((tmp_path / "results/hgp-AppE.toml").read_text())
    assert [cell["participation"] for cell in content["cells"]] == ["10", "20"]
    assert {cell["clients"] for cell in content["cells"]} == {"100"}
    assert content["cells"][0]["name"] == "hgp-cifar100-dirichlet_0.05-100-clients-10-drawn"
    for wrong, message in (
        (
            ["--cells", "*quantity*"],
            "--cells *quantity* matches no cell of hgp/AppE; known: hgp/cifar100/",
        ),
        (["--row", "ewc"], "no row is called 'ewc'; known: HGP"),
        (["--table", "T1"], "--table does not apply to one card; leave out --table or hgp/AppE"),
    ):
        assert message in output_of("reproduce", "hgp/AppE", *wrong, code=1)


def test_list_filters_tables_and_rows(tmp_path):
    words = ["reproduce", "--results", str(tmp_path), "--paper", "pilora", "--table", "t3"]
    page = output_of(*words, "--row", "w/o lora")
    assert page.count("never run") == 4  # frozen and fine-tuned, on two splits
    page = output_of(*words[:3], "--paper", "fcilpt", "--table", "t1", "--row", "glfc")
    assert "FCILPT: Not implemented: GLFC[ResNet-18] (T1): it is for a ResNet-18, and" in page
    fppl_page = output_of(*words[:3], "--paper", "fppl", "--row", "ablation: u+f+d (full)")
    assert "fppl/imagenet_r/dirichlet:0.5 " in fppl_page  # the card of T1
    wrong = output_of(*words[:3], "--paper", "hgp", "--table", "T9", code=1)
    assert "no table is called 'T9'; known: T1, T2" in wrong and wrong.count("\n") == 1
    text = output_of("reproduce", "fcilpt/cifar100/overlap:0.6/glfc[resnet-18]", code=1)
    assert "no card is called" in text
    assert "--table does not apply to one card" in output_of(
        "reproduce", CARD, "--table", "T1", code=1
    )
