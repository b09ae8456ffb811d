"""What every registered method must do; a new file in the right folder is covered as it is."""

from collections.abc import Callable

import pytest

from fczoo.core.registry import METHODS
from fczoo.testing.methods import METHOD_RULES
from fczoo.testing.subject import Subject

Rule = Callable[[Subject], None]


@pytest.mark.parametrize("rule", METHOD_RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("name", METHODS.names())  # below the rules: a process keeps to one method for long
def test_every_method_keeps(rule: Rule, name: str, subject: Callable[[str], Subject]) -> None:
    rule(subject(name))
