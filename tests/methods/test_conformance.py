"""Rules that every registered method must keep; a new file in the right folder is covered as well."""

from collections.abc import Callable

import pytest

from fczoo.core.registry import METHODS
from fczoo.testing.method_under_test import MethodUnderTest
from fczoo.testing.methods import METHOD_RULES


@pytest.mark.parametrize("name", METHODS.names())
def test_every_method_keeps_the_rules(name: str, subject: Callable[[str], MethodUnderTest]) -> None:
    """Check all rules on the same runs of a method, and name each rule that it breaks."""
    faults = []
    for rule in METHOD_RULES:
        try:
            rule(subject(name))
        except AssertionError as error:
            faults.append(f"{rule.__name__}: {error}")
    assert not faults, "\n".join(faults)
