"""Robust centres of class statistics: by hand, and against one client with false ones."""

import pytest
import torch

from fczoo import FczooError
from fczoo.core.payload import Payload, per_class, rows
from fczoo.core.types import Task
from fczoo.security.outliers import CENTRES, replace_by_centres

TASK = Task(1, 2, 4, 6, 3)  # classes 2 and 3
ROWS = {"gauss.": rows("count", "mean", "var")}
SUMS = {"class.": per_class("count", "sum")}


def gauss(client: int, label: int, mean: float, var: float = 1.0) -> Payload:
    one = torch.ones(1)
    parts = {
        "label": torch.tensor([label]),
        "count": 2 * one,
        "mean": mean * one[None],
        "var": var * one[None],
    }
    return Payload({"x": torch.zeros(1), **{f"gauss.{k}": v for k, v in parts.items()}}, client, 5)


@pytest.mark.parametrize(
    ("centre", "expected"), [("median", 2.5), ("trimmed_mean", 2.5), ("geometric_median", 2.5)]
)
def test_centres_of_rows_by_hand(centre, expected):
    """Compare centres of rows with values worked out by hand.

    Class 2 has the means 1, 2, 3 and 1e6; class 3 two clients, who may both be right.
    """
    payloads = [
        gauss(k, 2, m, v)
        for k, (m, v) in enumerate([(1.0, 1.0), (2.0, 2.0), (3.0, 3.0), (1e6, 1e9)])
    ]
    out = replace_by_centres([*payloads, gauss(4, 3, 10.0), gauss(5, 3, 20.0)], ROWS, centre, TASK)
    means = [float(p["gauss.mean"]) for p in out]
    assert means[:4] == pytest.approx([means[0]] * 4)
    assert 2 <= means[0] <= 3
    assert means[4:] == [15, 15]
    assert 2 <= float(out[0]["gauss.var"]) <= 3
    if centre != "geometric_median":  # every point between the middle two is one
        assert means[0] == expected
    assert all(float(p["gauss.count"]) == 2 and "x" in p for p in out)
    assert float(payloads[3]["gauss.mean"]) == 1e6  # the upload itself is not changed


@pytest.mark.parametrize("centre", CENTRES)
def test_sums_equal_counts_times_centre(centre):
    """Replace sums by counts times the centre.

    Class 2 has the means 1, 1, 1 and 50; only client 0 has an image of class 3.
    """
    counts, sums = [[2, 4], [1, 0], [3, 0], [5, 0]], [[2, 8], [1, 0], [3, 0], [250, 0]]
    payloads = [
        Payload(
            {"class.count": torch.tensor(c).float(), "class.sum": torch.tensor(s).float()[:, None]},
            k,
            9,
        )
        for k, (c, s) in enumerate(zip(counts, sums, strict=True))
    ]
    out = [
        p["class.sum"].flatten().tolist() for p in replace_by_centres(payloads, SUMS, centre, TASK)
    ]
    assert out == [pytest.approx(row, abs=1e-4) for row in ([2, 8], [1, 0], [3, 0], [5, 0])]


@pytest.mark.parametrize("name", ["hgp", "fppl", "ccvr", "fedproto", "fedncm", "pilora"])
def test_run_merges_centres(make_bench, small_method, name):
    hostile = {"attack": "sign-flip:1", "attackers": 0.34, "epochs": 1, "rounds": 1}
    options = {"calibrate": "each_round"} if name == "ccvr" else {}
    bench = make_bench(merge_statistics="geometric_median", **hostile)
    result = bench.run(small_method(name, **options))
    assert len(result.accuracy) == 3
    if name == "fedncm":  # no other defence applies
        assert result.metrics["A_N"] > make_bench(**hostile).run(small_method(name)).metrics["A_N"]


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("fedavg", {}, "merges class means, but fedavg does not upload any"),
        ("fedridge", {}, "fedridge also uploads second moments over all classes"),
        ("fcilpt", {}, "merges class means, but fcilpt does not upload any"),
        (
            "ccvr",
            {"calibrate": "each_round"},
            "median may turn the covariances that ccvr uploads .* use geometric_median",
        ),
    ],
)
def test_unsupported_methods_are_rejected(make_bench, small_method, name, options, says):
    with pytest.raises(FczooError, match=says):
        make_bench(merge_statistics="median").check(small_method(name, **options))
