"""Sums of surveys: totals or rows, random draws for their images, and classes without any image."""

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
from fczoo.federation.engine import ClientEngine
from fczoo.federation.evaluate import accuracy_row
from fczoo.federation.run import FederatedRun
from fczoo.federation.uplink import Uplink, sum_or_stack
from fczoo.testing.world import TASKS, toy_bench
from helpers_engine import DESCENT


@dataclass(frozen=True)
class Asking(Method):
    """Send the number of images and the sum of the draws for them; answer class 0."""

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


def test_the_total_is_added_up_in_float64() -> None:
    """Totals are sums in float64.

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
def test_a_survey_gives_a_total_or_rows(watch, separate) -> None:
    run = watch(toy_bench(), Asking(separate=separate))
    counts = [[13.0], [10.0], [7.0]]
    assert run.states[0]["images"].tolist() == (counts if separate else [30.0])


def test_draws_of_a_survey_belong_to_the_image(watch) -> None:
    """An image has the same draws at every owner and in every batch."""
    bench = toy_bench()
    pool = replace(
        bench.partition,
        tasks=tuple(
            tuple([np.sort(np.concatenate(p))] + [p[0][:0]] * 2) for p in bench.partition.tasks
        ),
    )
    ours = watch(bench, Asking()).states[2]
    theirs = watch(replace(bench, partition=pool), Asking()).states[2]
    torch.testing.assert_close(ours["drawn"], theirs["drawn"])
    other_seed = watch(bench, Asking(), 1).states[2]
    assert not torch.allclose(ours["drawn"], other_seed["drawn"])


def test_even_draws_cut_a_client_into_equal_parts(watch) -> None:
    run = watch(toy_bench(), Asking(separate=True, even=True))
    assert [sorted(row) for row in run.states[0]["parts"].tolist()] == [
        [6.0, 7.0],
        [5.0, 5.0],
        [3.0, 4.0],
    ]
    draws = image_draws(Asking(even=True).training(), 30, torch.tensor([4, 9, 2, 7]), "key")
    assert draws[:, 0].sort().values.tolist() == [0.125, 0.375, 0.625, 0.875]


@dataclass(frozen=True)
class Noisy(Asking):
    """Train with a loss that uploads the draws for it."""

    def training(self) -> Training:
        uploads = {"drawn": whole_tensors("counts")}
        return Training({"w": DESCENT}, ["query"], uploads, draws=2)

    def begin_task(self, state, task, backbone, rng) -> Tree:
        return state or {"w": torch.zeros(2, dtype=torch.float64)}

    def loss(self, backbone, train, batch: Batch, ctx) -> tuple[Tensor, Tree]:
        noise = (batch.draws * batch.w[:, None]).sum(0)
        return (train["w"] - noise).square().sum(), {"drawn": noise}


def test_draws_of_a_loss_are_the_clients_own_and_the_same_together(watch) -> None:
    one, together = watch(toy_bench(), Noisy()), watch(toy_bench(together=3), Noisy())
    draws_by_round = [[p["drawn"].tolist() for p in call.payloads] for call in one.calls]
    for ours, theirs in zip(one.calls, together.calls, strict=True):
        for a, b in zip(ours.payloads, theirs.payloads, strict=True):
            torch.testing.assert_close(a["drawn"], b["drawn"])
    assert len({str(draws) for call in draws_by_round for draws in call}) == sum(
        map(len, draws_by_round)
    )  # new in every round


def test_a_class_that_nobody_held_is_no_answer() -> None:
    """Never answer a class that no client held.

    All logits are equal, so the answer is the first class that was held: 1, which is right in a
    third.
    """
    bench = toy_bench()
    labels = bench.stream.train.labels
    positions = bench.stream.train_index[labels != 0]
    without = tuple(
        tuple(np.intersect1d(part, positions) for part in parts) for parts in bench.partition.tasks
    )
    bench = replace(bench, partition=replace(bench.partition, tasks=without))
    assert bench.classes_with_images(TASKS[1]).tolist() == [False, True, True, True, True]
    assert accuracy_row(Asking(), bench, {None: {}}, TASKS[0], 10) == [pytest.approx(100 / 3)]


def test_show_says_that_rows_stay_apart() -> None:
    assert "secure aggregation" not in part_page("fedncm", "digits")
    assert "so secure aggregation, which reveals only totals, cannot hide them" in part_page(
        "fedcof", "digits"
    )


# --- added up as they arrive


ANALYTIC = {"fedridge": "gram", "ranpac": "judge_gram", "slca": "moment.products"}


@pytest.mark.parametrize(("name", "tensor"), ANALYTIC.items())
def test_second_moments_of_one_client_are_alive_at_a_time(
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
    monkeypatch.setattr(Uplink, "folds", False)
    storing_run = run_to_end(toy_bench(**options), method)
    assert max(alive_counts) == 3  # else all clients' at once
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


SPOILT = {
    "gram is not finite": lambda sums: {**sums, "gram": sums["gram"] * float("nan")},
    "gram has shape (2, 2), expected (528,)": lambda sums: {**sums, "gram": torch.zeros(2, 2)},
    "lacks gram": lambda sums: {k: v for k, v in sums.items() if k != "gram"},
    "class.count is a count below 0": lambda sums: {**sums, "class.count": -sums["class.count"]},
    "dropped out": lambda sums: {},
}


@pytest.mark.parametrize("reason", SPOILT)
def test_what_is_broken_is_left_out_of_the_sum(monkeypatch, small_method, reason) -> None:
    """Add nothing of a broken upload, and stop without enough others.

    The second client's upload is the broken one.
    """
    survey = ClientEngine.collect

    def spoilt(*arguments: Any) -> Iterator[Payload]:
        for payload in survey(*arguments):
            yield (
                payload.holding(SPOILT[reason](payload.tensors)) if payload.client == 1 else payload
            )

    bench, method = toy_bench(), small_method("fedridge")
    parts = [(a, b[:0], *others) for a, b, *others in bench.partition.tasks]
    without = replace(bench, partition=replace(bench.partition, tasks=tuple(parts)))
    expected_state = run_to_end(without, method).state
    monkeypatch.setattr(ClientEngine, "collect", spoilt)
    run = run_to_end(bench, method)
    assert [(r["client"], r["reason"]) for r in run.result.rejected] == [(1, reason)] * 3
    assert all(torch.equal(value, run.state[name]) for name, value in expected_state.items())
    with pytest.raises(FczooError, match=r"2 of 3 uploads are valid, 3 needed; client 1"):
        run_to_end(toy_bench(min_clients=3), method)


def test_a_factor_of_a_rank_is_sent_and_is_the_best_of_that_rank() -> None:
    """Keep 3 of [[2, 1], [1, 2]] = 3 (1, 1)(1, 1)^T / 2 + 1 (1, -1)(1, -1)^T / 2: 2 of 3 numbers.

    With both eigenvalues nothing is lost. A factor of another shape stays as it is.
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
def test_gram_rank_saves_bytes_and_the_full_rank_loses_nothing(name: str) -> None:
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


def test_a_free_bias_needs_the_exact_gram_matrix() -> None:
    with pytest.raises(FczooError, match=r"fedridge.bias=free reads; add fedridge.bias=none"):
        create_method("fedridge", gram_rank=4)


def test_the_lower_triangle_of_a_symmetric_matrix_is_sent() -> None:
    """Row by row, also of sums side by side; other tensors stay."""
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
