"""PILoRA: merged LoRA, its penalties, prototypes."""

import math

import pytest
import torch
from torch import Tensor

from fczoo import Batch, Context, Task, create_method
from fczoo.aggregators.averaging import fedavg
from fczoo.core.backbone import Backbone
from fczoo.core.payload import Payload
from fczoo.core.tree import select
from fczoo.testing.toy_benchmark import small_method
from helpers_methods import DIM
from helpers_payload import server_context


def pilora_state(noise, past: int) -> dict[str, Tensor]:
    """Return a state of seven classes, the current ones 3 and 4.

    It has ``past`` earlier tasks' LoRA next to the current one.
    """
    state = {
        "frozen.before": noise(3, DIM),
        "prototype": noise(2, DIM),
        "frozen.after": noise(2, DIM),
    }
    for part in "qv":
        state |= {f"lora.0.{part}.a": noise(4, DIM), f"lora.0.{part}.b": 0.2 * noise(DIM, 4)}
        if past:
            state |= {
                f"past.0.{part}.a": noise(past, 4, DIM),
                f"past.0.{part}.b": 0.2 * noise(past, DIM, 4),
            }
    return state


def change_first_block(backbone: Backbone, change: dict[str, Tensor]) -> Backbone:
    """Return the backbone with q and v of its first block changed by the given matrices."""
    weight = backbone.weights["blocks.0.attn.qkv.weight"].clone()
    weight[:DIM] += change["q"]
    weight[2 * DIM :] += change["v"]
    return Backbone(backbone.config, {**backbone.weights, "blocks.0.attn.qkv.weight": weight})


def rms(features: Tensor, prototypes: Tensor) -> Tensor:
    return torch.tensor(
        [
            [
                math.sqrt(sum((a - b) ** 2 for a, b in zip(f, p, strict=True)) / len(f))
                for p in prototypes.tolist()
            ]
            for f in features.tolist()
        ]
    )


def test_pilora_with_zero_b_equals_frozen_backbone(backbone, images_batch, noise, tasks):
    state = pilora_state(noise, past=2)
    state |= {k: torch.zeros_like(v) for k, v in state.items() if k.endswith(".b")}
    logits = create_method("pilora").predict(backbone, state, images_batch, tasks[1])
    table = torch.cat([state["frozen.before"], state["prototype"]])
    torch.testing.assert_close(
        logits, -rms(backbone(images_batch.x), table).double(), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    "options",
    [{}, {"merge": "factor_sum"}, {"merge": "first"}, {"local": "current"}, {"tune": "full"}],
)
def test_pilora_trains_lora_or_all_weights_in_every_task(make_bench, small_method, watch, options):
    method = small_method("pilora", lr_lora=1e-3, **options)
    run = watch(make_bench(), method)
    assert [call.ctx.task.index for call in run.rounds] == [0, 0, 1, 1, 2, 2]
    for call in run.rounds:
        for payload in call.payloads:
            trained = select(call.state, f"{method.tune}.")
            assert trained and all(not torch.equal(payload[k], trained[k]) for k in trained)
    assert bool(select(run.rounds[-1].state, "lora.")) == (method.tune == "lora")


@pytest.mark.parametrize("options", [{"merge": "first"}, {"local": "current"}])
def test_pilora_local_loss_ignores_earlier_lora(backbone, images_batch, noise, tasks, options):
    """Use earlier pairs in evaluation, but not in a client's loss and class means."""
    method, state = create_method("pilora", ortho=0.0, **options), pilora_state(noise, 2)
    changes = {k: v + 1 if k.startswith("past.") else v for k, v in state.items()}
    train, batch = (
        select(state, "lora.", "prototype"),
        images_batch._replace(y=torch.full_like(images_batch.y, 3)),
    )
    contexts = [
        Context(tasks[1], 0, 1, {k: v for k, v in s.items() if k not in train})
        for s in (state, changes)
    ]
    losses = [method.loss(backbone, train, batch, c)[0] for c in contexts]
    means = [
        method.collect("after_training", backbone, train, batch, c)["class.sum"] for c in contexts
    ]
    assert torch.equal(*losses) and torch.equal(*means)
    assert not torch.equal(
        *(method.predict(backbone, s, images_batch, tasks[1]) for s in (state, changes))
    )
    together = create_method("pilora", ortho=0.0)
    assert not torch.equal(*(together.loss(backbone, train, batch, c)[0] for c in contexts))


@pytest.mark.parametrize("past", [0, 1, 2])
@pytest.mark.parametrize("merge", ["sum", "factor_sum", "first"])
def test_pilora_merges_lora_of_all_tasks(backbone, images_batch, noise, tasks, merge, past):
    """Compare merges with their formulas.

    With one task every merge is that task. Later: sum of B_i A_i, (sum B)(sum A), or only B_1 A_1.
    """
    state, change = pilora_state(noise, past), {}
    for part in "qv":
        pairs = [(state[f"past.0.{part}.a"][i], state[f"past.0.{part}.b"][i]) for i in range(past)]
        pairs.append((state[f"lora.0.{part}.a"], state[f"lora.0.{part}.b"]))
        change[part] = {
            "sum": sum(b @ a for a, b in pairs),
            "factor_sum": sum(b for _, b in pairs) @ sum(a for a, _ in pairs),
            "first": pairs[0][1] @ pairs[0][0],
        }[merge]
    logits = create_method("pilora", merge=merge).predict(backbone, state, images_batch, tasks[1])
    scores = -rms(
        change_first_block(backbone, change)(images_batch.x),
        torch.cat([state["frozen.before"], state["prototype"]]),
    )
    torch.testing.assert_close(logits, scores.double(), rtol=1e-5, atol=1e-5)


def test_pilora_overlap_with_earlier_lora():
    """Sum |A_i A_t'| over earlier tasks and over q and v; orthogonal rows give zero."""
    method = create_method("pilora", ortho=1.0, sparse=0.0)
    current = {
        "lora.0.q.a": torch.tensor([[1.0, 0, 0, 0], [0, 2.0, 0, 0]]),
        "lora.0.v.a": torch.tensor([[0, 0, 3.0, 0]]),
    }

    def penalty(q: list, v: list) -> float:
        return float(
            method.lora_penalty(
                current, {"past.0.q.a": torch.tensor(q), "past.0.v.a": torch.tensor(v)}
            )
        )

    assert penalty([[[0, 0, 5.0, 1.0]]], [[[1.0, 1.0, 0, -1.0]]]) == 0
    assert penalty([[[1.0, -3.0, 0, 0]]], [[[1.0, 1.0, 0, -1.0]]]) == 1 + 6
    assert penalty([[[0, 0, 1.0, 0]]], [[[0, 0, -2.0, 0]]]) == 6
    assert (
        penalty([[[1.0, 0, 0, 0]], [[-1.0, 1.0, 0, 0]]], [[[0, 0, 0, 1.0]], [[0, 0, 1.0, 1.0]]])
        == 1 + (1 + 2) + 3
    )  # two earlier tasks
    assert (
        penalty([[[-1.0, 3.0, 0, 0]]], [[[1.0, 1.0, 0, -1.0]]]) == 7
    )  # the sign of a row does not matter
    assert float(method.lora_penalty(current, {})) == 0  # no earlier task


def test_pilora_sparsity_penalty_of_a():
    current = {
        "lora.0.q.a": torch.tensor([[1.0, -2.0]]),
        "lora.0.v.a": torch.tensor([[0.5, 0.0]]),
        "lora.0.q.b": torch.full((2, 1), 100.0),
    }
    assert float(
        create_method("pilora", ortho=0.5, sparse=0.01).lora_penalty(current, {})
    ) == pytest.approx(0.035)


def test_pilora_prototype_loss_by_hand():
    """Compare the prototype loss with a value worked out by hand.

    The feature is at distance 1 from its prototype and 3 from the other (root mean square, D = 2).
    """
    method = create_method("pilora", pull=0.1, support="task", sharpness=2.0)
    task = Task(0, 0, 2, 2, 1)
    train = {"prototype": torch.tensor([[1.0, 1.0], [3.0, -3.0]])}
    broadcast = {"frozen.before": torch.empty(0, 2), "frozen.after": torch.empty(0, 2)}
    batch = Batch(torch.empty(1, 0), torch.tensor([0]), torch.ones(1), torch.empty(1, 0))
    loss = method.prototype_loss(torch.zeros(1, 2), train, batch, Context(task, 0, 1, broadcast))
    assert float(loss) == pytest.approx(math.log(1 + math.exp(-2.0 * (3 - 1))) + 0.1 * 1)


def test_pilora_distance_gradient_is_finite_at_prototype():
    method = create_method("pilora")
    features = torch.ones(1, 4, requires_grad=True)
    method.distances(features, torch.ones(1, 4)).sum().backward()
    assert torch.equal(features.grad, torch.zeros(1, 4))


def test_pilora_keeps_frozen_prototypes_and_lora(record, tasks):
    run = record("pilora")
    first, second, last = (run.states[t] for t in range(3))
    begin = run.rounds[0].state
    assert not torch.equal(first["prototype"], begin["prototype"]), "nothing was trained"
    assert torch.equal(second["frozen.before"], first["prototype"])
    assert torch.equal(last["frozen.before"], torch.cat([first["prototype"], second["prototype"]]))
    assert torch.equal(torch.cat([first["frozen.after"][2:]]), second["frozen.after"])
    assert not len(last["frozen.after"])
    for name, value in select(first, "lora.").items():
        past = name.replace("lora.", "past.")
        assert past not in first
        assert torch.equal(second[past], value[None])
        assert torch.equal(last[past], torch.stack([value, second[name]]))


def test_pilora_head_tune_keeps_prototype_of_unheld_class(tasks, noise):
    method = create_method("pilora", head_tune=True)
    old = noise(3, DIM)
    sums = {"class.count": torch.tensor([2.0, 0.0, 1.0]), "class.sum": noise(3, DIM)}
    new = method.update_from("task_start", {"prototype": old}, sums, server_context(tasks[0]))[
        "prototype"
    ]
    torch.testing.assert_close(
        new, torch.stack([sums["class.sum"][0] / 2, old[1], sums["class.sum"][2]]).to(new)
    )


@pytest.mark.parametrize("unheld", ["average", "server"])
@pytest.mark.parametrize("reweight", ["distance", "average"])
def test_pilora_prototype_of_unheld_class(record, tasks, backbone, rng, unheld, reweight):
    run = record("pilora")
    call = run.rounds[0]
    method = create_method("pilora", unheld=unheld, reweight=reweight)
    payloads = []
    for k, p in enumerate(call.payloads):
        count = p["class.count"].clone()
        count[1] = 0
        payloads.append(Payload({**p.tensors, "class.count": count}, k, p.num_samples))
    ctx = server_context(tasks[0], backbone, rng)
    new_state = method.server_update(call.state, method.aggregate(payloads, fedavg), ctx)
    assert new_state.keys() == call.state.keys()
    is_old = [torch.equal(new_state["prototype"][c], call.state["prototype"][c]) for c in range(3)]
    assert is_old == [False, unheld == "server", False]


def test_equal_reweighting_averages_prototypes_uniformly(record):
    """Average LoRA by image counts and prototypes by the number of clients (section 4.2)."""
    method = create_method("pilora", reweight="equal")
    payloads = [
        Payload({**p.tensors, "prototype": torch.full_like(p["prototype"], 4.0 * k)}, k, 1 + 2 * k)
        for k, p in enumerate(record("pilora").rounds[0].payloads[:2])
    ]
    merged = method.aggregate(payloads, fedavg)
    assert (merged["prototype"] == 2.0).all()  # (0 + 4) / 2; by image counts 1 and 3 it would be 3
    name = next(iter(select(merged, "lora.")))
    expected = 0.25 * payloads[0][name] + 0.75 * payloads[1][name]
    torch.testing.assert_close(merged[name], expected)


def test_running_means_cover_all_views(make_bench, watch):
    """Average over all views, but count each image once.

    Two epochs see each image twice; the server rejects larger counts.
    """
    run = watch(
        make_bench(epochs=2, rounds=1, augment="none"), small_method("pilora", means="running")
    )
    assert run.rounds and not run.result.rejected
    for call in run.rounds:
        task = call.ctx.task
        for client, payload in zip(call.clients, call.payloads, strict=True):
            class_counts = torch.bincount(
                run.bench.train.labels[client.index], minlength=task.stop
            )[task.start :]
            assert torch.equal(payload["class.count"], class_counts.double())
            assert torch.equal(payload["class.mean"].any(1), class_counts > 0)
