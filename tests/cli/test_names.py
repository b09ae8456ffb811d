"""The command line matches names without regard to case, ``-`` and ``_``."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from fczoo import FczooError
from fczoo.cli.app import main
from fczoo.cli.arguments import parse_changes, parse_executor, parse_methods
from fczoo.papers.claims import claims, get_claim
from fczoo.papers.printed_numbers import get_paper
from fczoo.papers.reproduce import get_card
from helpers_cli import TINY, run


def about_run(tmp_path: Path, *words: str) -> dict:
    """Return the content of ``bench.json`` of a tiny run."""
    run("bench", *TINY, "--out", str(tmp_path / "run"), *words)
    return json.loads((tmp_path / "run" / "bench.json").read_text())


def test_run_stores_registered_spelling(tmp_path: Path) -> None:
    words = (
        "--methods FedNCM,Fed-Ridge --dataset DIGITS --partition Dirichlet:Beta=0.5 --aggregator "
        "FedAvg"
    )
    about = about_run(tmp_path, *words.split(), "--set", "FedNCM.Distance=cosine")
    assert list(about["methods"]) == ["fedncm", "fedridge"]
    assert about["methods"]["fedncm"]["distance"] == "cosine"
    assert (about["settings"]["dataset"], about["settings"]["aggregator"]) == ("digits", "fedavg")
    assert about["settings"]["partition"].startswith("dirichlet:")
    assert sorted(p.name for p in (tmp_path / "run").iterdir() if p.is_dir()) == [
        "fedncm",
        "fedridge",
    ]


def test_settings_file_accepts_any_spelling(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        'Methods = "FedNCM"\ndataset = "Digits"\nTrain-Per-Class = 8\n[set.FEDNCM]\nDistance = '
        '"cosine"\n'
    )
    about = about_run(tmp_path, "--config", str(file))
    assert about["methods"]["fedncm"]["distance"] == "cosine"


def test_options_and_commands_accept_other_spellings(tmp_path: Path) -> None:
    assert run("List", "Data-Sets") == run("list", "datasets")
    about = about_run(tmp_path, "--METHODS", "fedncm", "--batch_size", "4")
    assert about["settings"]["batch_size"] == 4


@pytest.mark.parametrize(
    ("words", "others"),
    [
        (["show", "DIRICHLET"], ["show", "dirichlet"]),
        (["show", "Tiny-ImageNet"], ["show", "tinyimagenet"]),
        (["show", "Settings"], ["show", "settings"]),
        (["show", "Protocol", "HGP"], ["show", "protocol", "hgp"]),
        (["papers", "HGP", "t1"], ["papers", "hgp", "T1"]),
        (["data", "check", "Digits"], ["data", "check", "digits"]),
    ],
)
def test_pages_accept_any_spelling(words: list[str], others: list[str]) -> None:
    assert run(*words) == run(*others)


def test_method_in_two_spellings_is_rejected_as_duplicate() -> None:
    assert parse_methods("HGP, PILoRA") == ["hgp", "pilora"]
    assert parse_methods("ALL") == parse_methods("all")
    with pytest.raises(FczooError, match="--methods names 'hgp' twice"):
        parse_methods("hgp,HGP")


def test_set_options_get_registered_spelling() -> None:
    assert parse_changes(["PILoRA.LR-LoRA=1", "Backbone.image_size=64", "no.such=2"]) == {
        "pilora": {"lr_lora": "1"},
        "backbone": {"image_size": "64"},
        "no": {"such": "2"},
    }
    with pytest.raises(FczooError, match="--set hgp has 'lr' and 'LR', the same option"):
        parse_changes(["hgp.lr=1", "hgp.LR=2"])


def test_executors_cards_papers_and_claims_accept_any_spelling() -> None:
    assert parse_executor("Slurm") == "slurm"
    assert get_card("HGP/CIFAR-100/Dirichlet:0.05").name == "hgp/cifar100/dirichlet:0.05"
    assert get_paper("PILoRA").key == "pilora"
    name = next(iter(claims()))
    assert get_claim(name.upper().replace("-", "_")).name == name


def test_new_rejects_name_of_existing_method(tmp_path: Path) -> None:
    outcome = CliRunner().invoke(main, ["new", "method", "h_gp", "--out", str(tmp_path / "x")])
    assert outcome.exit_code == 1
    assert outcome.stderr == "Error: there is a method called hgp already; choose another name\n"
