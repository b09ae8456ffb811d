"""``fczoo list``, ``show`` and ``doctor``."""

from importlib.metadata import version

import pytest
import torch
from click.testing import CliRunner

from fczoo.cli.app import main


def shown(*arguments: str) -> str:
    """What a command prints that needs no process of its own."""
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize(
    "kind", ["methods", "baselines", "datasets", "partitioners", "aggregators", "backbones"]
)
def test_list_names_what_is_there(kind):
    known = {
        "methods": "pilora",
        "baselines": "fedncm",
        "datasets": "cifar100",
        "partitioners": "quantity",
        "aggregators": "fedavg",
        "backbones": "vit_nano_32",
    }
    printed = shown("list", kind)
    assert any(line.split()[0] == known[kind] for line in printed.splitlines())


@pytest.mark.parametrize("kind", ["methods", "baselines", "partitioners", "aggregators", "attacks", "local"])
def test_what_is_said_of_a_name_in_a_list_is_a_whole_sentence(kind):
    assert all(line.endswith(".") for line in shown("list", kind).splitlines())


def test_show_and_doctor():
    page = shown("show", "hgp")
    for word in (
        "Salami",
        "prefix_len",
        "zeros",
        "Trained",
        "Sent up in a round",
        "gauss.mean",
        "prefix.0.k",
    ):
        assert word in page
    assert (
        "rounds" in shown("show", "digits")
        and "beta" in shown("show", "dirichlet")
        and "largest and smallest" in shown("show", "trimmed_mean")
    )
    assert "did you mean" in CliRunner().invoke(main, ["show", "hpg"]).stderr


def test_doctor_says_what_is_there(tmp_path):
    (tmp_path / "cifar-100-python").mkdir()
    health = dict(line.split("  ", 1) for line in shown("doctor", "--data-root", str(tmp_path)).splitlines())
    lines = {name: value.strip() for name, value in health.items()}
    assert lines["torch"] == torch.__version__ and "FCZOO_HOME" in lines
    assert lines["data cifar100"] == f"found: {tmp_path / 'cifar-100-python'}"
    assert lines["data cifar10"].startswith("no folder cifar-10-batches-py")
    assert f"hypothesis {version('hypothesis')}" in lines["extra test"]
