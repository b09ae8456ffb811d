"""``fczoo list``, ``show`` and ``doctor``."""

import pytest
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
    health = shown("doctor")
    assert "torch" in health and "FCZOO_HOME" in health and "cifar-100-python" in health
