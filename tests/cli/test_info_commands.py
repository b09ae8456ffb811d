"""Test ``fczoo list``, ``show`` and ``doctor``."""

import re
from importlib.metadata import version

import pytest
import torch
from click.testing import CliRunner

from fczoo.cli.app import main


def output_of(*arguments: str) -> str:
    """Run a command in this process; return what it prints."""
    outcome = CliRunner().invoke(main, arguments)
    assert outcome.exit_code == 0, outcome.output
    return outcome.stdout


@pytest.mark.parametrize(
    "kind", ["methods", "baselines", "datasets", "partitioners", "aggregators", "backbones"]
)
def test_list_shows_registered_names(kind):
    examples = {
        "methods": "pilora",
        "baselines": "fedncm",
        "datasets": "cifar100",
        "partitioners": "quantity",
        "aggregators": "fedavg",
        "backbones": "vit_nano_32",
    }
    output = output_of("list", kind)
    assert any(line.split()[0] == examples[kind] for line in output.splitlines())


@pytest.mark.parametrize(
    "kind", ["methods", "baselines", "partitioners", "aggregators", "attacks", "local"]
)
def test_list_descriptions_end_with_full_stop(kind):
    lines = output_of("list", kind).splitlines()
    assert all(
        line.endswith(".") for line in lines[kind == "methods" :]
    )  # without the column heads


def test_show_describes_registered_names():
    page = output_of("show", "hgp")
    assert "imagenet_r: lr=0.03, from protocol hgp (paper, appendix H)" in page
    for phrase in (
        "Salami",
        "prefix_len",
        "zeros",
        "Trained",
        "Uploaded in a round",
        "gauss.mean",
        "prefix.0.k",
    ):
        assert phrase in page
    assert "rounds" in output_of("show", "digits")
    assert "beta" in output_of("show", "dirichlet")
    assert "largest and smallest" in output_of("show", "trimmed_mean")
    assert "did you mean" in CliRunner().invoke(main, ["show", "hpg"]).stderr


@pytest.mark.parametrize(
    ("kind", "name", "about"),
    [
        ("method", "fedavg", "Sequential federated training"),
        ("aggregator", "fedavg", "Average weighted by sample counts"),
        ("Augmentation", "hgp", "Crop of"),
        ("server-optimizer", "fedadam", "FedAdam"),
        ("dataset", "digits", "1,797"),
    ],
)
def test_kind_selects_entry_of_shared_name(kind: str, name: str, about: str) -> None:
    assert about in output_of("show", kind, name).split("\n\n")[0]


def test_unknown_name_of_kind_is_an_error() -> None:
    outcome = CliRunner().invoke(main, ["show", "aggregator", "hgp"])
    assert outcome.exit_code == 1
    assert "no aggregator is called 'hgp'; " in outcome.stderr
    outcome = CliRunner().invoke(main, ["show", "kind", "hgp"])
    assert "KIND one of protocol, release, backbone, method, dataset" in outcome.stderr


BALANCED_ROUND = "Uploaded in an extra round on exemplars only, from the second task on"
MEMORY_UPLOAD = "Uploaded after the rounds, when clients update their memory"
AFTER_ROUNDS = f"{MEMORY_UPLOAD}, from the second task on"


@pytest.mark.parametrize(
    ("method", "heading", "tensors"),
    [
        ("podnet", BALANCED_ROUND, {"proxy.old": "2x10x128", "proxy.new": "2x10x128"}),
        ("afc", BALANCED_ROUND, {"proxy.old": "2x10x128", "proxy.new": "2x10x128"}),
        ("dytox", BALANCED_ROUND, {"old.token": "1x128", "new.token": "1x128"}),
        (
            "dytox",
            "Also uploaded in a round, from the second task on",
            {"new.divergence_weight": "3x128"},
        ),
        ("bic", AFTER_ROUNDS, {"bias": "2", "validated": "scalar"}),
    ],
)
def test_show_lists_uploads_from_second_task_on(method, heading, tensors):
    """Show the uploads that start with the second task.

    Digits in tasks of two classes, features of 128 numbers.
    """
    page = output_of("show", method)
    section = page.partition(f"{heading}, ")[2].partition("\n\n")[0]
    rows = {line.split()[0]: line.split()[1] for line in section.splitlines()[1:]}
    assert tensors.items() <= rows.items()
    assert min(tensors) in page.partition("What a server could learn from an upload:")[2]


def test_show_lists_upload_size_of_each_phase():
    """Show the size of the uploads in every phase of a task.

    PODNet's statistics: count, sum and squares of two classes, 2 (1 + 128 + 128) numbers of eight
    bytes; its balanced round: 2 x 2 x 10 x 128 of four. Exemplars are chosen without an upload.
    """
    page = output_of("show", "podnet")
    table = page.partition("Its uploads, MB:\n")[2].partition("\n\n")[0].splitlines()[2:]
    rows = [tuple(re.split(r" {2,}", line)) for line in table]
    assert rows == [
        ("as statistics at the start of a task", "0.004", "0.004"),
        ("in a round", "4.829", "4.829"),
        ("after the rounds, when clients update their memory", "nothing", "nothing"),
        ("in an extra round on exemplars only", "0.020"),
    ]
    assert "Memory of a client after the first task: exemplar.index." in page
    assert "as statistics at the end of a task" in output_of("show", "afc")


def test_doctor_reports_packages_and_data(tmp_path):
    (tmp_path / "cifar-100-python").mkdir()
    health = dict(
        line.split("  ", 1)
        for line in output_of("doctor", "--data-root", str(tmp_path)).splitlines()
    )
    lines = {name: value.strip() for name, value in health.items()}
    assert lines["torch"] == torch.__version__ and "FCZOO_HOME" in lines
    assert lines["data cifar100"] == f"found: {tmp_path / 'cifar-100-python'}"
    assert lines["data cifar10"].startswith("no folder cifar-10-batches-py")
    assert f"hypothesis {version('hypothesis')}" in lines["extra test"]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("lander", "the released code, not the paper's text; it does not name its text encoder"),
        ("mfcl", "the released code, not the paper's text"),
        ("affcl", "the released code and the paper's abstract, not its text"),
        ("uopp", "the released code and the supplement, not the paper's text"),
        ("uopp", "The released main program never trains its rectifier"),
        ("powder", "the released code, not the paper's text"),
        ("fedcbdr", "the paper's section on the method; no code is released"),
    ],
)
def test_show_reports_unread_sources(name: str, says: str) -> None:
    assert says in " ".join(output_of("show", name).split())
