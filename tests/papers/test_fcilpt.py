"""FCILPT's protocol against the paper."""

from fczoo.core.registry import METHODS
from fczoo.papers.tables import get_paper
from fczoo.protocols.registry import PROTOCOLS


def test_fcilpt_gives_every_method_with_exemplars_the_papers_memory() -> None:
    """Every method with exemplars has the paper's memory.

    Its tables have methods that keep images; the paper: 2,000 exemplars per client.
    """
    rows = {row.method for row in get_paper("fcilpt").methods.values() if row.method}
    keeping = {name for name in rows if "memory" in METHODS.get(name).__dataclass_fields__}
    assert {"podnet", "dde", "geodl", "ssil", "afc", "dytox", "glfc"} <= keeping
    for name in sorted(keeping):
        assert PROTOCOLS.get("fcilpt").options(name, "cifar100", None)["memory"] == 2000, name
