"""Rules for every registered method, including new files in the methods folders.

The tests of a method share its runs: pytest sorts this module by method.
"""

import pytest

from fczoo.core.payload import content_of
from fczoo.core.registry import METHODS
from fczoo.security.privacy import list_disclosures
from fczoo.testing.method_under_test import MethodUnderTest
from fczoo.testing.methods import METHOD_RULES
from fczoo.testing.toy_benchmark import small_method
from helpers_methods import CONFORMANCE_OPTIONS


@pytest.fixture(scope="module", params=METHODS.names())
def subject(request: pytest.FixtureRequest) -> MethodUnderTest:
    """Return a method with its runs; make each run once."""
    return MethodUnderTest(
        small_method(request.param, **CONFORMANCE_OPTIONS.get(request.param, {}))
    )


def test_method_passes_every_rule(subject: MethodUnderTest) -> None:
    """Check all rules on the same runs of a method, and name each rule that it breaks."""
    faults = []
    for rule in METHOD_RULES:
        try:
            rule(subject)
        except AssertionError as error:
            faults.append(f"{rule.__name__}: {error}")
    assert not faults, "\n".join(faults)


def test_every_upload_is_disclosed(subject: MethodUnderTest) -> None:
    """Disclose every tensor of every upload to the server once, each with a known content."""
    training = subject.method.training()
    for call in subject.run().calls:
        for payload in call.payloads:
            tensor_names = [n for _, names, _ in list_disclosures(training, payload) for n in names]
            assert sorted(tensor_names) == sorted(payload)
            assert None not in [
                content_of(n, training.trained_prefixes, training.uploads) for n in payload
            ]
