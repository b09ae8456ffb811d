"""The rules that every method keeps."""

from fczoo.testing import check_method


def test_fedprox_keeps_the_rules():
    check_method("fedprox")
