"""FCILPT's protocol against the paper."""

from fczoo.core.registry import METHODS
from fczoo.papers.printed_numbers import get_paper
from fczoo.protocols.registry import PROTOCOLS


def test_fcilpt_protocol_sets_exemplar_memory() -> None:
    """Give every method with exemplars the paper's memory of 2,000 exemplars per client."""
    rows = {row.method for row in get_paper("fcilpt").methods.values() if row.method}
    keeping = {name for name in rows if "memory" in METHODS.get(name).__dataclass_fields__}
    assert {"podnet", "dde", "geodl", "ssil", "afc", "dytox", "glfc"} <= keeping
    for name in sorted(keeping):
        assert PROTOCOLS.get("fcilpt").options(name, "cifar100", None)["memory"] == 2000, name
