"""Statistics that no honest client can have, if features have at most norm 5."""

import math
from types import SimpleNamespace

import pytest
import torch

from fczoo.core.backbone import Backbone
from fczoo.core.errors import FczooError
from fczoo.core.payload import Payload, per_class, rows, whole_tensors
from fczoo.core.training import Optim, Training
from fczoo.security.value_bounds import StatisticsCheck, largest_value, matrix_fault
from fczoo.testing.toy_benchmark import CONFIG, random_weights

BACKBONE = SimpleNamespace(largest_norm=5.0, dim=2)
BACKBONE_WIDTH = 32  # of the toy benchmark
UPLOADS = {
    "class.": per_class("count", "sum", "squares"),
    "lifted.": per_class("count", "sum", projected=True),
    "gauss.": rows("count", "mean", "var", "cov"),
    "gram": whole_tensors("second moments"),
    "usage": whole_tensors("counts"),
    "momentum": whole_tensors("class means"),
}


def find_fault(tensors, images=4, trained="head."):
    payload = Payload({k: torch.as_tensor(v) for k, v in tensors.items()}, 0, images)
    training = Training({trained: Optim()}, uploads=UPLOADS)
    return StatisticsCheck(training, BACKBONE).find_fault(payload)


HONEST = {  # class 0: (3, 4) and (0, 0); class 1: none
    "class.count": [2.0, 0.0],
    "class.sum": [[3.0, 4.0], [0.0, 0.0]],
    "class.squares": [[9.0, 16.0], [0.0, 0.0]],
    "gauss.label": [0],
    "gauss.count": [2.0],
    "gauss.mean": [[1.5, 2.0]],
    "gauss.var": [[2.25, 4.0]],
    "gauss.cov": [[[2.25, 3.0], [3.0, 4.0]]],
    "gram": [[9.0, 12.0], [12.0, 16.0]],
    "usage": [4.0, 0.0],
    "momentum": [1.5, 2.0],
}


def test_honest_statistics_are_valid_up_to_largest_norm():
    assert find_fault(HONEST) == ""
    assert find_fault({"class.count": [1.0], "class.sum": [[3.0, 4.0]]}) == ""
    no_row = torch.empty(0, 2)
    assert find_fault({"gauss.label": [], "gauss.mean": no_row, "gauss.var": no_row}) == ""


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ({"class.sum": [[6.0, 8.5], [0.0, 0.0]]}, "class.sum implies features of norm 5.2, but"),
        ({"class.sum": [[0.0, 0.0], [1e30, 0.0]]}, "class.sum implies features of norm 1e+30"),
        (
            {"class.squares": [[60.0, 0.0], [0.0, 0.0]]},
            "class.squares implies features of norm 5.48",
        ),
        ({"class.squares": [[4.0, 16.0], [0.0, 0.0]]}, "class.squares is too small for class.sum"),
        (
            {"gauss.mean": [[-1e38, 0.0]]},
            "gauss.mean implies features of norm 1e+38, but the limit is 5.1",
        ),
        ({"gauss.var": [[30.0, 0.0]]}, "gauss.var implies features of norm 5.48"),
        (
            {"gauss.cov": [[[2.0, 3.0], [3.0, 4.0]]]},
            "gauss.cov has off-diagonal entries that are too large",
        ),
        ({"gauss.cov": [[[2.25, 3.0], [1.0, 4.0]]]}, "gauss.cov is not symmetric"),
        ({"gauss.cov": [[[-1.0, 0.0], [0.0, 4.0]]]}, "gauss.cov has a negative diagonal entry"),
        ({"gram": [[9.0, 13.0], [13.0, 16.0]]}, "gram has off-diagonal entries that are too large"),
        (
            {"gram": [[1e9, 0.0], [0.0, 1.0]]},
            "gram implies inputs of size 1.58e+04, but the limit is 5e+03",
        ),
        ({"usage": [4e6, 1.0]}, "usage adds up to 4e+06, but the limit is 4e+06 for 4 images"),
        ({"momentum": [6e3, 0.0]}, "momentum has norm 6e+03, but the limit is 5e+03"),
    ],
)
def test_impossible_statistics_are_rejected(bad, reason):
    assert find_fault({**HONEST, **bad}).startswith(reason)


def test_projected_features_and_trained_norm_have_wide_bound():
    """Bound features of width 8, four times the backbone's, by 1000 x 5 x 2 = 10,000."""
    wide = {"class.count": [1.0], "class.sum": [[9_000.0] + [0.0] * 7]}
    assert find_fault(wide) == ""
    wide["class.sum"] = [[11_000.0] + [0.0] * 7]
    assert "norm 1.1e+04, but the limit is 1e+04" in find_fault(wide)
    narrow = {"class.count": [1.0], "class.sum": [[4_000.0, 0.0]]}
    assert (
        find_fault(narrow, trained="full.") == find_fault(narrow, trained="full.norm.weight") == ""
    )
    assert "norm 4e+03, but the limit is 5.1" in find_fault(narrow, trained="full.blocks.")
    assert find_fault({"lifted.count": [1.0], "lifted.sum": [[4_000.0, 0.0]]}) == ""


@pytest.mark.parametrize("name", ["ranpac", "stsae"])
def test_random_features_of_backbone_width_are_accepted(make_bench, small_method, name):
    assert not make_bench().run(small_method(name, width=BACKBONE_WIDTH)).rejected


def test_rounding_of_large_matrices_is_accepted():
    features = torch.randn(1000, 300, generator=torch.Generator().manual_seed(0))
    assert matrix_fault(features.mT @ features) == ""
    assert matrix_fault(torch.zeros(3, 3)) == matrix_fault(torch.zeros(0, 0)) == ""


def test_largest_value_is_cube_root_of_dtype_maximum():
    assert largest_value(torch.float32) == pytest.approx(6.98e12, rel=1e-3)
    assert largest_value(torch.int64) == math.inf


def test_final_norm_bounds_features():
    """Bound features by the largest scale times the root of the width, plus the norm of the shift.

    Scales 1 and -2 of width 32 and shift (3, 4, 0, ...): 2 sqrt(32) + 5.
    """
    weights = random_weights(CONFIG)
    weights["norm.weight"] = torch.ones(32)
    weights["norm.bias"] = torch.zeros(32)
    weights["norm.weight"][3] = -2.0
    weights["norm.bias"][:2] = torch.tensor([3.0, 4.0])
    backbone = Backbone(CONFIG, weights)
    assert backbone.largest_norm == pytest.approx(2 * math.sqrt(32) + 5)
    images = torch.randn(20, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    norms = torch.linalg.vector_norm(backbone(images), dim=1)
    assert 0.3 * backbone.largest_norm < float(norms.max()) <= backbone.largest_norm


def test_error_without_valid_uploads_names_features(make_bench, small_method, monkeypatch):
    monkeypatch.setattr(Backbone, "largest_norm", 1e-3)
    with pytest.raises(FczooError, match="if the method projects features, declare its groups"):
        make_bench().run(small_method("fedncm"))


@pytest.mark.parametrize(("name", "group"), [("fppl", "local.mean"), ("pilora", "class.mean")])
def test_absurd_statistics_are_rejected_without_defence(
    make_bench, small_method, name, group, monkeypatch
):
    from fczoo.federation.client_engine import ClientEngine

    def spoil(payloads):
        first, *others = payloads
        return [first.holding({**first, group: torch.full_like(first[group], 1e38)}), *others]

    train = ClientEngine.train
    monkeypatch.setattr(ClientEngine, "train", lambda *a: spoil(train(*a)))
    result = make_bench(rounds=1, epochs=1).run(small_method(name))
    assert {r["client"] for r in result.rejected} == {0}
    assert all(f"{group} implies features of norm" in r["reason"] for r in result.rejected)
