"""Outliers among class statistics: cases by hand, and limits on a minority of clients."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fczoo import FczooError, create_method
from fczoo.core.files import write_json
from fczoo.core.payload import Payload, per_class, rows
from fczoo.core.types import Task
from fczoo.reports.archive import write_archive
from fczoo.reports.captions import notes
from fczoo.reports.runs import read_experiments, read_runs
from fczoo.security.outliers import extreme_clients, geometric_median, leave_out

some = settings(max_examples=40, deadline=None)
SECOND = Task(1, 2, 4, 6, 3)  # classes 2 and 3
ROWS = {"local.": rows("mean")}
SUMS = {"class.": per_class("count", "sum")}


def pool(client: int, **means: list[float]):
    """Return an upload with labelled means: ``pool(0, c2=[1, 0])``."""
    labels = torch.tensor([int(name[1:]) for name in means])
    means = torch.tensor(list(means.values()))
    return Payload({"local.label": labels, "local.mean": means, "x": torch.zeros(1)}, client)


def test_geometric_medians_by_hand():
    square = torch.tensor([[0.0, 0], [2, 0], [0, 2], [2, 2]], dtype=torch.float64)
    assert torch.allclose(geometric_median(square), torch.ones(2, dtype=torch.float64))
    line = torch.tensor([[0.0], [1], [50]], dtype=torch.float64)
    assert torch.allclose(geometric_median(line), torch.ones(1, dtype=torch.float64))
    # A triangle whose angles are all below 120 degrees: its sides are seen under 120 degrees from
    # the point.
    fermat = geometric_median(
        corners := torch.tensor([[0.0, 0], [4, 0], [1, 3]], dtype=torch.float64)
    )
    rays = torch.nn.functional.normalize(corners - fermat, dim=1)
    assert torch.allclose(
        (rays @ rays.T)[~torch.eye(3, dtype=torch.bool)],
        torch.full((6,), -0.5, dtype=torch.float64),
        atol=1e-6,
    )


def test_outliers_of_labelled_rows_by_hand():
    """Compare outliers among labelled rows with values worked out by hand.

    Class 2: distances 0, 1, 1 and 100 from the middle of the honest, so the last is left out. Class
    3 has only two clients, who may differ.
    """
    honest = [
        pool(0, c2=[0.0, 0.0]),
        pool(1, c2=[1.0, 0.0], c3=[0.0, 0.0]),
        pool(2, c2=[-1.0, 0.0]),
    ]
    remainder, outliers = leave_out(
        [*honest, pool(3, c2=[100.0, 0.0], c3=[500.0, 0.0])], ROWS, 3, SECOND
    )
    assert outliers == {3: [2]}
    assert remainder[3]["local.label"].tolist() == [3]
    assert remainder[3]["local.mean"].tolist() == [[500, 0]]
    assert "x" in remainder[3]
    assert all(
        torch.equal(k["local.mean"], h["local.mean"])
        for k, h in zip(remainder, honest, strict=False)
    )


def test_huge_mean_does_not_mask_large_mean():
    """Leave out a large mean next to a huge one.

    Distances 0, 0.1, 0.1, 500 and 1e12: the last two are outliers, although 500 is small next to
    1e12.
    """
    payloads = [pool(k, c2=[x]) for k, x in enumerate((0.0, 0.1, -0.1, 500.0, 1e12))]
    assert leave_out(payloads, ROWS, 3, SECOND)[1] == {3: [2], 4: [2]}


def test_outliers_of_sums_by_hand():
    """Compare outliers among sums with values worked out by hand.

    Means 1, 1, 3 and -50 of class 2 are in sums of different counts. Class 3, which only client 3
    has, is not an outlier. Sums of 0 images are ignored.
    """
    counts, sums = (
        [[2, 0], [4, 0], [1, 0], [2, 5], [0, 0]],
        [[2, 0], [4, 0], [3, 0], [-100, 900], [0, 0]],
    )
    payloads = [
        Payload(
            {"class.count": torch.tensor(c).float(), "class.sum": torch.tensor(s).float()[:, None]},
            k,
        )
        for k, (c, s) in enumerate(zip(counts, sums, strict=True))
    ]
    remainder, outliers = leave_out(payloads, SUMS, 1e9, SECOND)
    assert outliers == {3: [2], 2: [2]}  # the median distance is 0: any difference is an outlier
    assert remainder[3]["class.count"].tolist() == [0, 5]
    assert remainder[3]["class.sum"].flatten().tolist() == [0, 900]
    assert remainder[0]["class.sum"].tolist() == payloads[0]["class.sum"].tolist()
    assert payloads[3]["class.count"][0] == 2  # the upload itself is not changed


@some
@given(
    seed=st.integers(0, 2**31),
    count=st.integers(3, 11),
    factor=st.floats(1, 5),
    side=st.floats(1e4, 1e12),
)
def test_far_means_of_minority_are_outliers(seed, count, factor, side):
    rng = torch.Generator().manual_seed(seed)
    minority = (count - 1) // 2
    means = [
        torch.randn(4, generator=rng)
        + (10 ** (3 * k) * side * torch.randn(4, generator=rng).sign() if k < minority else 0)
        for k in range(count)
    ]
    order = torch.randperm(count, generator=rng).tolist()
    payloads = [pool(k, c2=means[k].tolist()) for k in order]
    remainder, outliers = leave_out(payloads, ROWS, factor, SECOND)
    assert set(range(minority)) <= outliers.keys()
    assert any(len(p["local.label"]) for p in remainder)
    assert (
        leave_out([payloads[i] for i in range(count)[::-1]], ROWS, factor, SECOND)[1] == outliers
    )  # in any order


@pytest.mark.parametrize("name", ["fedncm", "hgp", "fppl", "pilora", "fedproto"])
def test_run_drops_and_reports_hostile_statistics(make_bench, small_method, name):
    hostile = {"attack": "sign-flip:1", "attackers": 0.34, "epochs": 1}
    protection = make_bench(outliers=4.0, **hostile)
    result = protection.run(small_method(name))
    numbers = protection.uplink(small_method(name), 0).attackers.numbers
    outliers = [r for r in result.rejected if "statistics of classes" in r["reason"]]
    assert {r["client"] for r in outliers} >= numbers and len(numbers) == 1
    if name == "fedncm":  # no other defence applies
        assert result.metrics["A_N"] > make_bench(**hostile).run(small_method(name)).metrics["A_N"]


def test_fedavg_counts_bytes_of_head_init_means(make_bench):
    result = make_bench(outliers=5.0, epochs=1).run(
        create_method("fedavg", "digits", head_init="means", tune="head")
    )
    assert {"parameters", "counts", "class means"} == result.uploaded.keys()
    assert sum(result.uploaded.values()) == result.bytes_up


def test_method_without_class_means_is_rejected(make_bench):
    with pytest.raises(FczooError, match="outliers compares class means, but fedavg uploads none"):
        make_bench(outliers=3.0).check(create_method("fedavg", "digits"))


def test_far_statistics_are_recorded_and_used(make_bench, small_method, monkeypatch):
    """Record far statistics that are not longer than features, and use them.

    Distances 0, 1, 1 and 100 from the median: the last is recorded; 20 would not be.
    """
    similar = [pool(k, c2=[x, 0.0]) for k, x in enumerate((0.0, 1.0, -1.0))]
    assert extreme_clients([*similar, pool(3, c2=[100.0, 0.0])], ROWS, SECOND) == [3]
    assert extreme_clients([*similar, pool(3, c2=[20.0, 0.0])], ROWS, SECOND) == []
    assert (
        extreme_clients([pool(0, c2=[0.0]), pool(1, c2=[1e6])], ROWS, SECOND) == []
    )  # two clients: neither is an outlier
    assert make_bench().run(small_method("fedncm")).far == {}
    monkeypatch.setattr("fczoo.security.outliers.EXTREME_FACTOR", 4.0)
    result = make_bench(attack="sign-flip:1", attackers=0.34).run(small_method("fedncm"))
    assert result.rejected == []
    assert len(result.far) == 1 and all(number >= 1 for number in result.far.values())


def test_table_notes_far_statistics(make_run, tmp_path):
    folder = make_run(tmp_path / "run", {"one": {0: 70.0}})
    path = folder / "one" / "seed0" / "result.json"
    write_json(path, {**json.loads(path.read_text()), "far": {"3": 12}})
    sentence = (
        "more than 30 times the median distance from the clients' centre: client 3 (12 uploads)"
    )
    assert any(sentence in note for note in notes(read_experiments([folder])[0]))
    write_archive(read_runs([folder]), tmp_path / "results.csv")
    assert any(sentence in note for note in notes(read_experiments([tmp_path / "results.csv"])[0]))
