"""The rules that every method keeps."""

from fczoo.testing import check_method


def test_fedprox_follows_the_rules():
    check_method("fedprox")
