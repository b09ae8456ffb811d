"""What every registered method must do, whatever it does. A new file in the right folder is covered without an edit here."""

import json
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, asdict, fields
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from fczoo import Method, create_method
from fczoo.core.method import Distils
from fczoo.core.payload import HEADER_BYTES
from fczoo.core.registry import METHODS
from fczoo.core.tree import drop, nbytes, select
from fczoo.core.types import Batch
from fczoo.federation.downlink import broadcast

EXACT = {"rtol": 0.0, "atol": 0.0}
TIGHT = {"rtol": 1e-9, "atol": 1e-9}  # float64: only the order of sums differs
TRAINED = {
    "rtol": 1e-7,
    "atol": 1e-7,
}  # the same after Adam, which divides the rounding of a zero gradient by eps = 1e-8
LOOSE = {
    "rtol": 1e-3,
    "atol": 1e-3,
}  # float32: Adam blows up the rounding of gradients that are zero but for rounding

pytestmark = pytest.mark.parametrize("name", METHODS.names())


@pytest.fixture
def run(record, name):
    """One run in float64, clients one after another."""
    return record(name)


@pytest.fixture
def training_run(run):
    if not run.rounds:
        pytest.skip("trains nothing")
    return run


@pytest.fixture
def test_logits(batch_of) -> Callable[..., Tensor]:
    def get(record, task: int, index: Tensor | None = None, batch_size: int = 100) -> Tensor:
        store = record.bench.test
        rows = torch.arange(len(store.labels)) if index is None else index
        at, state = record.bench.stream.tasks[task], record.states[task]
        batches = (batch_of(record.method, store, part) for part in rows.split(batch_size))
        return torch.cat(
            [record.method.predict(record.bench.backbone, state, batch, at) for batch in batches]
        )

    return get


def assert_same_trees(ours: dict, theirs: dict, label: str, **tolerance: float) -> None:
    assert ours.keys() == theirs.keys(), label
    for key, value in ours.items():
        torch.testing.assert_close(
            value, theirs[key], msg=lambda text, key=key: f"{label}, {key}: {text}", **tolerance
        )


# --- what a method is


def test_is_frozen_hashable_and_survives_pickling(name):
    method = create_method(name)
    copy = pickle.loads(pickle.dumps(method))
    assert copy == method and hash(copy) == hash(method) and type(copy) is type(method)
    for f in fields(method):
        with pytest.raises(FrozenInstanceError):
            setattr(method, f.name, getattr(method, f.name))


def test_hyper_parameters_survive_json(name):
    method = create_method(name)
    assert create_method(name, **json.loads(json.dumps(asdict(method), allow_nan=False))) == method


def test_every_hyper_parameter_says_what_it_means(name):
    assert [f.name for f in fields(METHODS.get(name)) if not f.metadata.get("meaning")] == []


def test_says_what_it_does_and_where_it_comes_from(name):
    cls = METHODS.get(name)
    assert cls.name == name and cls.paper
    assert cls.__doc__ and not cls.__doc__.startswith(
        f"{cls.__name__}("
    )  # not the one that dataclass makes up


def test_values_for_data_sets_are_valid(name):
    for dataset, values in METHODS.get(name).tuned.items():
        method = create_method(name, dataset)
        assert {key: getattr(method, key) for key in values} == values


# --- the server


def test_begins_from_an_empty_state(small_method, backbone, tasks, rng, name):
    method = small_method(name)
    state = method.begin_task({}, tasks[0], backbone, rng)
    assert state and all(isinstance(v, Tensor) and v.isfinite().all() for v in state.values())
    for prefix in method.training().optims:
        assert select(state, prefix), f"trains {prefix}, which is not there"
        assert not prefix.startswith(method.private or ("\0",)), f"{prefix} is trained and private"


def test_a_new_task_leaves_the_old_state_alone(run, tasks, rng):
    old = {k: v.clone() for k, v in run.states[0].items()}
    run.method.begin_task(run.states[0], tasks[1], run.bench.backbone, rng)
    assert_same_trees(run.states[0], old, "state", **EXACT)


def test_the_server_does_not_change_payloads(run):
    for call in run.calls:
        for sent, kept in zip(call.payloads, call.kept, strict=True):
            assert_same_trees(kept, sent, "payload", **EXACT)


@pytest.fixture
def secretive_run(run):
    if not run.method.private:
        pytest.skip("keeps nothing private")
    return run


def test_private_state_is_not_broadcast(secretive_run):
    private = secretive_run.method.private
    for state in secretive_run.states.values():
        assert select(state, *private) and not select(broadcast(secretive_run.method, state), *private)
    for call in secretive_run.calls:
        assert not select(call.ctx.shared, *private)


def test_clients_compute_the_same_without_the_private_state(secretive_run):
    for moment, call in last_calls(secretive_run).items():
        engine, state = call.engine, drop(call.state, *secretive_run.method.private)
        again = (
            engine.train(state, call.clients, call.ctx)
            if moment == "train"
            else engine.survey(moment, state, call.clients, call.ctx)
        )
        for ours, theirs in zip(again, call.payloads, strict=True):
            assert_same_trees(ours, theirs, "payload", **EXACT)


def last_calls(run) -> dict:
    """The last round and, by moment, the last survey."""
    return {call.moment: call for call in run.calls}


# --- what goes over the wire


def test_payloads_are_finite_and_signed(run):
    assert run.calls
    for call in run.calls:
        assert len(call.payloads) == len(call.clients)
        for client, payload in zip(call.clients, call.payloads, strict=True):
            assert payload.client == client.number
            assert payload.num_samples == len(client.index)
            assert all(isinstance(v, Tensor) and v.isfinite().all() for v in payload.values())


def test_uploads_are_counted_in_bytes(run):
    payloads = [payload for call in run.calls for payload in call.payloads]
    assert run.result.bytes_up == sum(nbytes(p.tensors) + HEADER_BYTES for p in payloads) > 0
    assert run.result.client_rounds == len(payloads)


# --- training


def test_clients_together_equal_clients_one_by_one(record, test_logits, run, name):
    together = record(name, together=3)
    assert len(run.calls) == len(together.calls)
    for one, all_ in zip(run.calls, together.calls, strict=True):
        for ours, theirs in zip(one.payloads, all_.payloads, strict=True):
            assert_same_trees(
                ours,
                theirs,
                f"task {one.ctx.task.index}, round {one.ctx.round}, client {ours.client}",
                **TRAINED,
            )
    for task in run.states:
        torch.testing.assert_close(test_logits(run, task), test_logits(together, task), rtol=1e-6, atol=1e-6)
    assert run.result.accuracy == together.result.accuracy


def test_clients_together_equal_clients_one_by_one_in_single_precision(record, name):
    one, together = record(name, torch.float32), record(name, torch.float32, together=3)
    for ours, theirs in zip(one.calls[0].payloads, together.calls[0].payloads, strict=True):
        assert_same_trees(ours, theirs, f"client {ours.client}", **LOOSE)


def test_the_state_that_clients_get_is_not_changed_by_them(run):
    for call in run.calls:
        assert_same_trees(call.after, call.state, "state", **EXACT)


def test_what_finished_tasks_left_stays_bitwise_the_same(run):
    """Where the method promises it: the rows of one task's state are the first rows of the next one's."""
    states = [run.states[t] for t in sorted(run.states)]
    for before, after in pairwise(states):
        for key, rows in select(before, *run.method.frozen).items():
            assert torch.equal(after[key][: len(rows)], rows), key
    assert all(any(len(v) for v in select(states[-1], prefix).values()) for prefix in run.method.frozen)


def test_frozen_weights_stay_bitwise_the_same(run, backbone):
    assert_same_trees(run.bench.backbone.weights, backbone.weights, "backbone", **EXACT)


def test_padding_changes_nothing(run, batch_of):
    """Rows of weight 0 with garbage for pixels and features: same loss, same gradient, same sums."""
    method, backbone = run.method, run.bench.backbone
    for moment, call in last_calls(run).items():
        real = batch_of(method, run.bench.train, call.clients[0].index[:3])
        padded = with_garbage(real)
        if moment == "train":
            train = select(call.state, *method.training().optims)
            for short, long in zip(
                gradients(method, backbone, train, real, call),
                gradients(method, backbone, train, padded, call),
                strict=True,
            ):
                assert_same_trees(short, long, "loss", **TIGHT)
            if method.training().stats == "none":
                continue
            short, long = (method.stats(backbone, train, batch, call.ctx) for batch in (real, padded))
        else:
            short, long = (
                method.survey(moment, backbone, broadcast(method, call.state), batch, call.ctx.task)
                for batch in (real, padded)
            )
        assert_same_trees(short, long, moment, **TIGHT)


def with_garbage(batch: Batch, rows: int = 2) -> Batch:
    rng = torch.Generator().manual_seed(0)

    def noise(like: Tensor) -> Tensor:
        return 10 * torch.randn(rows, *like.shape[1:], generator=rng, dtype=like.dtype)

    return Batch(
        torch.cat([batch.x, noise(batch.x)]),
        torch.cat([batch.y, batch.y[:1].expand(rows)]),
        torch.cat([batch.w, batch.w.new_zeros(rows)]),
        torch.cat([batch.query, noise(batch.query)]),
    )


def gradients(method: Method, backbone, train: dict, batch: Batch, call) -> tuple[dict, dict]:
    """Loss and sums; gradient of the loss."""
    leaves = {k: v.clone().requires_grad_() for k, v in train.items()}
    if isinstance(method, Distils):
        batch = batch._replace(teacher=method.teach(backbone, call.ctx.shared, batch, call.ctx.task).detach())
    loss, sums = method.loss(backbone, leaves, batch, call.ctx)
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    assert any(g.abs().max() > 0 for g in found), "nothing is trained"
    return {**sums, "loss of the test": loss.detach()}, dict(zip(leaves, found, strict=True))


# --- answers


def test_answers_are_logits_of_the_classes_seen_so_far(run, test_logits, tasks):
    for task in tasks:
        logits = test_logits(run, task.index)
        assert logits.shape == (len(run.bench.test.labels), task.stop)
        assert logits.isfinite().all()


def test_answers_do_not_depend_on_the_batch(run, test_logits):
    index = torch.arange(len(run.bench.test.labels))
    whole = test_logits(run, 2)
    torch.testing.assert_close(test_logits(run, 2, batch_size=1), whole, **TIGHT)
    torch.testing.assert_close(test_logits(run, 2, index=index.flip(0), batch_size=5).flip(0), whole, **TIGHT)


def test_accuracy_covers_every_task_seen(run, test_logits, tasks):
    labels = run.bench.test.labels
    for t, row in enumerate(run.result.accuracy):
        right = (test_logits(run, t).argmax(1) == labels).double()
        by_hand = [
            100 * right[(labels >= seen.start) & (labels < seen.stop)].mean().item()
            for seen in tasks[: t + 1]
        ]
        assert row == pytest.approx(by_hand)
    assert len(run.result.accuracy) == len(tasks)


# --- seeds


def test_the_same_seed_gives_the_same_run(record, run, name):
    again = record(name, copy=1)
    assert again.result.accuracy == run.result.accuracy
    assert_same_trees(again.states[2], run.states[2], "final state", **EXACT)


def test_another_seed_gives_another_run(record, training_run, name):
    other, trained = record(name, seed=1), tuple(training_run.method.training().optims)
    ours, theirs = select(training_run.states[2], *trained), select(other.states[2], *trained)
    assert any(not torch.equal(v, theirs[k]) for k, v in ours.items())
