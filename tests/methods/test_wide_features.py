"""Features of twice the width: those of the class token and of the patches.

The conformance kit checks that every method runs on other families of vision transformers.
"""

from dataclasses import replace

import pytest

from fczoo import FczooError
from fczoo.testing import toy_benchmark
from fczoo.testing.toy_benchmark import small_method, toy_bench


def test_prefix_methods_accept_features_of_double_width(monkeypatch) -> None:
    wide = {"wide": replace(toy_benchmark.CONFIG, pool="cls+mean")}
    monkeypatch.setattr(toy_benchmark, "FAMILIES", wide)
    bench = toy_bench(family="wide", rounds=1, epochs=1)
    for method in ("hgp", "dualprompt"):
        assert len(bench.run(small_method(method), 0).accuracy) == 3
    for method in ("l2p", "fcilpt"):
        with pytest.raises(FczooError, match=r"prompts cannot be pooled with pool cls\+mean"):
            bench.check(small_method(method))  # before the run starts
        pooled = replace(small_method(method), pooled="cls")
        assert len(bench.run(pooled, 0).accuracy) == 3
