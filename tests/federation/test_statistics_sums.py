"""Sums of client statistics: totals or rows, draws per image, and classes without images."""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fczoo import (
    Batch,
    Benchmark,
    FczooError,
    Method,
    Payload,
    Training,
    Tree,
    create_method,
    per_class,
    whole_tensors,
)
from fczoo.cli.show import part_page
from fczoo.core.payload import pack_symmetric, unpack_factors, unpack_symmetric
from fczoo.federation.batches import image_draws
from fczoo.federation.callbacks import Callback
from fczoo.federation.client_engine import ClientEngine
from fczoo.federation.evaluate import accuracy_row
from fczoo.federation.run import FederatedRun
from fczoo.federation.uplink import Uplink, sum_or_stack
from fczoo.testing.toy_benchmark import TASKS, toy_bench
from helpers_engine import DESCENT


@dataclass(frozen=True)
class CollectsDraws(Method):
    """Send the number of images and the sum of the draws for them; predict class 0."""

    name = "asking"
    separate: bool = False
    even: bool = False

    def __post_init__(self) -> None:
        """Skip the checks of options, since no user gives them."""

    def training(self) -> Training:
        uploads = {
            "images": whole_tensors("counts"),
            "drawn": whole_tensors("counts"),
            "parts": whole_tensors("counts"),
        }
        return Training(
            {},
            ["query"],
            uploads,
            draws=2,
            collect_at={"task_start"},
            stratified_draws=self.even,
            per_client_statistics=self.separate,
        )

    def begin_task(self, state, task, backbone, rng) -> Tree:
        return state or {"images": torch.zeros(1), "drawn": torch.zeros(2), "parts": torch.zeros(2)}

    def collect(self, phase, backbone, tree, batch: Batch, ctx) -> Tree:
        parts = torch.nn.functional.one_hot((2 * batch.draws[:, 0]).long(), 2)
        weights = batch.w[:, None]
        sums = {"images": batch.w.sum()[None], "drawn": (batch.draws * weights).sum(0)}
        return {**sums, "parts": (parts * weights).sum(0)}

    def update_from(self, phase, state, sums, ctx) -> Tree:
        return sums

    def predict(self, backbone, state, batch: Batch, task) -> Tensor:
        return torch.zeros(len(batch.y), task.stop)


def test_totals_are_summed_in_float64() -> None:
    """Add totals up in float64.

    1 + 2^-24 is 1 in float32, however often it is added; the counts stay whole numbers.
    """
    small = Payload({"x": torch.tensor([2.0**-24]), "n": torch.tensor([3])})
    payloads = [Payload({"x": torch.ones(1), "n": torch.tensor([1])}), small, small]
    assert sum_or_stack(payloads, separate=False) == {
        "x": torch.tensor([1 + 2.0**-23]),
        "n": torch.tensor([7]),
    }
    rows = sum_or_stack(payloads, separate=True)
    assert rows["x"].shape == (3, 1) and rows["n"].tolist() == [[1], [3], [3]]


@pytest.mark.parametrize("separate", [False, True])
def test_collect_returns_total_or_rows(watch, separate) -> None:
    run = watch(toy_bench(), CollectsDraws(separate=separate))
    counts = [[13.0], [10.0], [7.0]]
    assert run.states[0]["images"].tolist() == (counts if separate else [30.0])


def test_draws_depend_only_on_image_and_seed(watch) -> None:
    """Give an image the same draws at every owner and in every batch."""
    bench = toy_bench()
    pool = replace(
        bench.partition,
        tasks=tuple(
            tuple([np.sort(np.concatenate(p))] + [p[0][:0]] * 2) for p in bench.partition.tasks
        ),
    )
    ours = watch(bench, CollectsDraws()).states[2]
    theirs = watch(replace(bench, partition=pool), CollectsDraws()).states[2]
    torch.testing.assert_close(ours["drawn"], theirs["drawn"])
    other_seed = watch(bench, CollectsDraws(), 1).states[2]
    assert not torch.allclose(ours["drawn"], other_seed["drawn"])


def test_stratified_draws_split_client_into_equal_parts(watch) -> None:
    run = watch(toy_bench(), CollectsDraws(separate=True, even=True))
    assert [sorted(row) for row in run.states[0]["parts"].tolist()] == [
        [6.0, 7.0],
        [5.0, 5.0],
        [3.0, 4.0],
    ]
    draws = image_draws(CollectsDraws(even=True).training(), 30, torch.tensor([4, 9, 2, 7]), "key")
    assert draws[:, 0].sort().values.tolist() == [0.125, 0.375, 0.625, 0.875]


@dataclass(frozen=True)
class UploadsDraws(CollectsDraws):
    """Train with a loss that uploads the draws for it."""

    def training(self) -> Training:
        uploads = {"drawn": whole_tensors("counts")}
        return Training({"w": DESCENT}, ["query"], uploads, draws=2)

    def begin_task(self, state, task, backbone, rng) -> Tree:
        return state or {"w": torch.zeros(2, dtype=torch.float64)}

    def loss(self, backbone, train, batch: Batch, ctx) -> tuple[Tensor, Tree]:
        noise = (batch.draws * batch.w[:, None]).sum(0)
        return (train["w"] - noise).square().sum(), {"drawn": noise}


def test_loss_draws_match_with_batched_clients(watch) -> None:
    one, together = watch(toy_bench(), UploadsDraws()), watch(toy_bench(together=3), UploadsDraws())
    draws_by_round = [[p["drawn"].tolist() for p in call.payloads] for call in one.calls]
    for ours, theirs in zip(one.calls, together.calls, strict=True):
        for a, b in zip(ours.payloads, theirs.payloads, strict=True):
            torch.testing.assert_close(a["drawn"], b["drawn"])
    assert len({str(draws) for call in draws_by_round for draws in call}) == sum(
        map(len, draws_by_round)
    )  # new in every round


def test_class_without_images_is_never_predicted() -> None:
    """Never predict a class that no client held.

    All logits are equal, so the prediction is the first class that was held: 1. It is right in a
    third of the cases.
    """
    bench = toy_bench()
    labels = bench.stream.train.labels
    positions = bench.stream.train_index[labels != 0]
    without = tuple(
        tuple(np.intersect1d(part, positions) for part in parts) for parts in bench.partition.tasks
    )
    bench = replace(bench, partition=replace(bench.partition, tasks=without))
    assert bench.classes_with_images(TASKS[1]).tolist() == [False, True, True, True, True]
    assert accuracy_row(CollectsDraws(), bench, {None: {}}, TASKS[0], 10) == [
        pytest.approx(100 / 3)
    ]


def test_show_warns_of_separate_rows() -> None:
    assert "secure aggregation" not in part_page("fedncm", "digits")
    assert "so secure aggregation, which reveals only totals, cannot hide them" in part_page(
        "fedcof", "digits"
    )


# --- summed on arrival


ANALYTIC = {"fedridge": "gram", "ranpac": "judge_gram", "slca": "moment.products"}


@pytest.mark.parametrize(("name", "tensor"), ANALYTIC.items())
def test_second_moments_are_held_for_one_client_at_a_time(
    monkeypatch, small_method, name, tensor
) -> None:
    """Hold the second moments of one client at a time; the sums are the same bits."""
    survey, alive, alive_counts = ClientEngine.collect, [], []

    def record_payloads(*arguments: Any) -> Iterator[Payload]:
        for payload in survey(*arguments):
            alive.append(weakref.ref(payload[tensor]))
            alive_counts.append(sum(reference() is not None for reference in alive))
            yield payload
            del payload

    method, options = small_method(name), {"epochs": 1, "rounds": 1}
    monkeypatch.setattr(ClientEngine, "collect", record_payloads)
    folding_run = run_to_end(toy_bench(**options), method)
    assert len(alive_counts) == 8 and set(alive_counts) == {1}
    monkeypatch.setattr(Uplink, "sums_on_arrival", False)
    storing_run = run_to_end(toy_bench(**options), method)
    assert max(alive_counts) == 3  # those of all clients at once
    assert folding_run.state.keys() == storing_run.state.keys()
    assert all(
        torch.equal(value, storing_run.state[key]) for key, value in folding_run.state.items()
    )
    ours, theirs = folding_run.result, storing_run.result
    assert (ours.bytes_up, ours.uploaded, ours.far) == (
        theirs.bytes_up,
        theirs.uploaded,
        theirs.far,
    )


def run_to_end(bench: Benchmark, method: Method) -> FederatedRun:
    run = FederatedRun(bench, method, 0, Callback(), None, None)
    run.run()
    return run


INVALID_SUMS = {
    "gram is not finite": lambda sums: {**sums, "gram": sums["gram"] * float("nan")},
    "gram has shape (2, 2), expected (528,)": lambda sums: {**sums, "gram": torch.zeros(2, 2)},
    "lacks gram": lambda sums: {k: v for k, v in sums.items() if k != "gram"},
    "class.count has a count below 0": lambda sums: {**sums, "class.count": -sums["class.count"]},
    "dropped out": lambda sums: {},
}


@pytest.mark.parametrize("reason", INVALID_SUMS)
def test_invalid_upload_is_excluded_from_sum(monkeypatch, small_method, reason) -> None:
    """Exclude an invalid upload, and stop without enough valid ones.

    The second client's upload is invalid.
    """
    survey = ClientEngine.collect

    def spoil_second_client(*arguments: Any) -> Iterator[Payload]:
        for payload in survey(*arguments):
            yield (
                payload.holding(INVALID_SUMS[reason](payload.tensors))
                if payload.client == 1
                else payload
            )

    bench, method = toy_bench(), small_method("fedridge")
    parts = [(a, b[:0], *others) for a, b, *others in bench.partition.tasks]
    without = replace(bench, partition=replace(bench.partition, tasks=tuple(parts)))
    expected_state = run_to_end(without, method).state
    monkeypatch.setattr(ClientEngine, "collect", spoil_second_client)
    run = run_to_end(bench, method)
    assert [(r["client"], r["reason"]) for r in run.result.rejected] == [(1, reason)] * 3
    assert all(torch.equal(value, run.state[name]) for name, value in expected_state.items())
    with pytest.raises(FczooError, match=r"2 of 3 uploads are valid, 3 needed; client 1"):
        run_to_end(toy_bench(min_clients=3), method)


def test_low_rank_factor_is_best_approximation() -> None:
    """Keep 3 of [[2, 1], [1, 2]] = 3 (1, 1)(1, 1)^T / 2 + 1 (1, -1)(1, -1)^T / 2: 2 of 3 numbers.

    With both eigenvalues nothing is lost. A factor of another shape stays unchanged.
    """
    matrix = torch.tensor([[2.0, 1], [1, 2]], dtype=torch.float64)
    for rank, triangle in ((1, [1.5, 1.5, 1.5]), (2, [2.0, 1, 2]), (9, [2.0, 1, 2])):
        uploads = {"gram": whole_tensors("second moments", symmetric=True, rank=rank)}
        upload = Payload(pack_symmetric({"gram": matrix}, uploads), 0)
        assert upload["gram"].shape == (min(rank, 2), 2)
        torch.testing.assert_close(
            unpack_factors(upload, uploads, upload)["gram"], torch.tensor(triangle).double()
        )
        longer = upload.holding({"gram": torch.ones(3, 2)})
        assert unpack_factors(longer, uploads, upload)["gram"].shape == (3, 2)


@pytest.mark.parametrize("name", ["afcl", "fedridge", "ranpac"])
def test_gram_rank_saves_bytes_and_full_rank_is_exact(name: str) -> None:
    """Count 32 rows of 32 numbers for the whole rank, 2 for rank 2, and 528 for the triangle."""
    options = {"fedridge": {"bias": "none"}, "ranpac": {"ridge": 1.0, "width": 32}}.get(name, {})
    exact, full, low = (
        run_to_end(toy_bench(), create_method(name, **options, gram_rank=rank))
        for rank in (None, 32, 2)
    )
    for run, numbers in ((full, 32 * 32), (low, 2 * 32)):
        saved = exact.result.bytes_up - run.result.bytes_up
        assert saved == 8 * 8 * (32 * 33 // 2 - numbers)  # of 8 uploads: one client lacks a task
    weight = full.state["answer.weight"]
    torch.testing.assert_close(weight, exact.state["answer.weight"], rtol=1e-6, atol=1e-8)
    assert not torch.allclose(weight, low.state["answer.weight"], rtol=1e-2)
    assert not low.result.rejected


def test_free_bias_needs_exact_gram_matrix() -> None:
    with pytest.raises(
        FczooError, match=r"needs the exact Gram matrix, .*; add fedridge.bias=none"
    ):
        create_method("fedridge", gram_rank=4)


def test_lower_triangle_of_symmetric_matrix_is_sent() -> None:
    """Send it row by row, also for stacked sums; other tensors stay unchanged."""
    uploads = {"gram": whole_tensors("second moments", symmetric=True), "class.": per_class("sum")}
    matrix = torch.tensor([[1.0, 9, 9], [2, 3, 9], [4, 5, 6]])
    tree = {"gram": matrix, "class.sum": torch.ones(3, 3)}
    packed = pack_symmetric(tree, uploads)
    assert packed["gram"].tolist() == [1, 2, 3, 4, 5, 6]
    assert packed["class.sum"] is tree["class.sum"]
    full = [[1, 2, 4], [2, 3, 5], [4, 5, 6]]
    assert unpack_symmetric(packed, uploads)["gram"].tolist() == full
    stacked = {"gram": torch.stack([packed["gram"], 2 * packed["gram"]])}
    both = unpack_symmetric(stacked, uploads)["gram"]
    assert both[0].tolist() == full and torch.equal(both[1], 2 * both[0])
