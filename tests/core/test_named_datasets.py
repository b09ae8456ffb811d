"""Test that every function with a data set name rejects unknown names."""

import pytest

import fczoo
from fczoo.core.errors import FczooError
from fczoo.core.registry import create_method
from fczoo.data.dataset import released_norm
from fczoo.protocols.registry import PROTOCOLS, RELEASES


@pytest.mark.parametrize("name", ["tinyimagenett", "cifar-1000", ""])
def test_create_method_rejects_unknown_data_set(name: str) -> None:
    with pytest.raises(FczooError, match=r"no data set is called|unknown data set"):
        create_method("pilora", name)


def test_error_suggests_nearest_data_set() -> None:
    with pytest.raises(FczooError, match=r"did you mean.*tinyimagenet"):
        create_method("pilora", "tinyimagenett")


@pytest.mark.parametrize(
    "source", [*map(PROTOCOLS.get, PROTOCOLS.names()), *map(RELEASES.get, RELEASES.names())]
)
def test_protocols_reject_unknown_data_set(source: type) -> None:
    for ask in (
        lambda: source.settings_on("cifar1000"),
        lambda: source.hyperparameters("pilora", "cifar1000"),
        lambda: source.options("pilora", "cifar1000", 0.5),
    ):
        with pytest.raises(FczooError, match=r"did you mean.*cifar100"):
            ask()


def test_other_functions_reject_unknown_data_set() -> None:
    with pytest.raises(FczooError, match=r"did you mean.*cifar100"):
        released_norm("cifar1000")
    with pytest.raises(FczooError, match=r"did you mean.*digits"):
        fczoo.run(create_method("fedncm"), dataset="digitz")
