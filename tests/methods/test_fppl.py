"""FPPL: fused prompts, contrast with prototypes, the debiased head."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo import Batch, Context, Task, create_method
from fczoo.core.tree import select
from helpers_methods import DIM
from helpers_payload import server_context

CLOSE = {"rtol": 1e-10, "atol": 1e-10}  # float64


def one_hot_prompts(noise, seen: int, total: int = 4) -> dict[str, Tensor]:
    """Return prompts p_i whose entries are all e_i, so that a fused prompt shows the weights."""
    prompts = torch.eye(total, DIM, dtype=torch.float64)[:, None].expand(-1, 2, -1)
    tree = {
        "fusion.key": noise(total, DIM),
        "fusion.scale": torch.tensor(4.0, dtype=torch.float64),
        "prompt.1": prompts[seen - 1],
    }
    return {**tree, "past.1": prompts[: seen - 1]} if seen > 1 else tree


def test_fppl_first_task_uses_its_prompt_for_every_image(noise):
    method = create_method("fppl", blocks=(1,))
    tree = {**one_hot_prompts(noise, 1), "prompt.1": noise(2, DIM)}
    prompts = method.fused_prompts(tree, noise(5, DIM))["deep.1"]
    assert torch.equal(prompts, tree["prompt.1"].expand(5, -1, -1))


@pytest.mark.parametrize("seen", [2, 3])
def test_fppl_fuses_prompts_by_softmax_over_seen_tasks(noise, seen):
    method, tree, query = (
        create_method("fppl", blocks=(1,)),
        one_hot_prompts(noise, seen),
        noise(5, DIM),
    )
    weights = method.fused_prompts(tree, query)["deep.1"][:, 0, :4]
    exponentials = [
        [math.exp(4 * float(q @ k / (q.norm() * k.norm()))) for k in tree["fusion.key"][:seen]]
        for q in query
    ]
    torch.testing.assert_close(
        weights[:, :seen],
        torch.tensor([[e / sum(row) for e in row] for row in exponentials], dtype=torch.float64),
        **CLOSE,
    )
    assert (weights >= 0).all() and (weights[:, seen:] == 0).all()
    torch.testing.assert_close(weights.sum(1), torch.ones(5, dtype=torch.float64), **CLOSE)
    longer = {
        **tree,
        "fusion.key": tree["fusion.key"] * torch.tensor([3.0, 0.1, 50.0, 2.0])[:, None],
    }
    torch.testing.assert_close(
        method.fused_prompts(longer, 9 * query)["deep.1"][:, 0, :4], weights, **CLOSE
    )


def test_fppl_hard_fusion_selects_best_task(noise):
    tree, query = one_hot_prompts(noise, 3), noise(8, DIM)
    weights = create_method("fppl", blocks=(1,), fusion="hard").fused_prompts(tree, query)[
        "deep.1"
    ][:, 0, :3]
    best = F.cosine_similarity(query[:, None], tree["fusion.key"][None, :3], dim=-1).argmax(1)
    assert torch.equal(weights, torch.eye(3, dtype=torch.float64)[best])
    assert len(best.unique()) > 1


def test_fppl_new_prompt_starts_from_previous_one(record, backbone, tasks, rng):
    run = record("fppl")
    state = run.method.begin_task(run.states[0], tasks[1], backbone, rng)
    assert state["prototype.mean"].shape == (2, DIM)
    assert not state["prototype.known"].any()
    for name, prompt in select(run.states[0], "prompt.").items():
        assert torch.equal(state[name], prompt)
        assert torch.equal(state[name.replace("prompt.", "past.")], prompt[None])


def test_fppl_keeps_frozen_prompts(record):
    run = record("fppl")
    assert any(
        not torch.equal(v, run.rounds[0].state[k])
        for k, v in select(run.states[0], "prompt.").items()
    ), "nothing was trained"
    for name, prompt in select(run.states[0], "prompt.").items():
        past = name.replace("prompt.", "past.")
        assert torch.equal(run.states[1][past], prompt[None])
        assert torch.equal(run.states[2][past], torch.stack([prompt, run.states[1][name]]))
        assert not torch.equal(run.states[1][name], prompt)


def contrast(
    features: Tensor,
    labels: list[int],
    prototypes: Tensor,
    known: list[float],
    w: list[float] | None = None,
) -> float:
    """Return L_ur at temperature 0.5 in a task of classes 4, 5, ..."""
    count = len(labels)
    batch = Batch(
        torch.empty(count, 0),
        torch.tensor(labels),
        torch.tensor(w or [1.0] * count, dtype=torch.float64),
        torch.empty(count, 0),
    )
    task = Task(1, 4, 4 + len(prototypes), 9, 2)
    broadcast = {
        "prototype.mean": prototypes,
        "prototype.known": torch.tensor(known, dtype=torch.float64),
    }
    return float(
        create_method("fppl", temperature=0.5).contrast(
            features, batch, Context(task, 0, 1, broadcast)
        )
    )


def test_fppl_contrast_is_zero_with_one_class_or_without_prototypes(noise):
    assert contrast(noise(3, DIM), [4, 4, 4], noise(1, DIM), [1.0]) == 0
    assert contrast(noise(3, DIM), [4, 5, 6], noise(3, DIM), [0.0, 0.0, 0.0]) == 0
    assert (
        contrast(noise(3, DIM), [5, 5, 5], noise(3, DIM), [0.0, 1.0, 0.0]) == 0
    )  # the only known one
    assert (
        contrast(noise(3, DIM), [4, 6, 4], noise(3, DIM), [0.0, 1.0, 0.0]) == 0
    )  # no sample's own prototype is known
    assert contrast(noise(3, DIM), [4, 5, 6], noise(3, DIM), [1.0, 1.0, 0.0]) > 0


def test_fppl_contrast_by_hand():
    """Compare the contrast with a value worked out by hand.

    Cosines are 1 and 0 at temperature 0.5. The sample of the unknown third class and the padding
    do not count.
    """
    features = torch.tensor([[2.0, 0.0], [0.0, 5.0], [1.0, 1.0], [9.0, 9.0]], dtype=torch.float64)
    prototypes = torch.tensor([[3.0, 0.0], [0.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    loss = contrast(features, [4, 4, 6, 4], prototypes, [1.0, 1.0, 0.0], w=[1, 1, 1, 0])
    first_loss, second_loss = math.log(1 + math.exp(-2)), math.log(1 + math.exp(2))
    assert loss == pytest.approx((first_loss + second_loss) / 2)


def test_fppl_contrast_is_bounded(noise):
    """Keep the contrast at or below log n + 2 / tau."""
    worst = contrast(
        -torch.eye(DIM, dtype=torch.float64)[:3],
        [4, 5, 6],
        torch.eye(DIM, dtype=torch.float64)[:3],
        [1.0] * 3,
    )
    assert math.log(3) < worst <= math.log(3) + 2 / 0.5


def fppl_update(noise, tasks, rng, labels: list[int], **options):
    """Return the state before and after a server step of task 2.

    Each of two clients has one prototype per label.
    """
    method = create_method("fppl", **options)
    mean = noise(2 * len(labels), DIM)
    rows = {
        "local.label": torch.tensor(labels * 2),
        "local.client": torch.tensor([0] * len(labels) + [1] * len(labels)),
        "local.mean": mean,
    }
    old = {
        "local.label": torch.tensor([0, 2]),
        "local.client": torch.tensor([5, 5]),
        "local.mean": noise(2, DIM),
    }
    state = {
        "head.weight": noise(7, DIM),
        "head.bias": noise(7),
        "prompt.0": noise(2, DIM),
        "fusion.key": noise(3, DIM),
        **old,
    }
    aggregate = {
        **{k: state[k] for k in ("head.weight", "head.bias", "prompt.0", "fusion.key")},
        **rows,
    }
    return state, method.server_update(state, aggregate, server_context(tasks[1], rng=rng)), mean


@pytest.mark.parametrize(
    ("options", "moved"), [({}, [0, 2, 3, 4]), ({"pool": False}, [3, 4]), ({"debias": False}, [])]
)
def test_fppl_debias_moves_only_head_rows_of_classes_with_prototypes(
    noise, tasks, rng, options, moved
):
    state, new_state, _ = fppl_update(noise, tasks, rng, [3, 4], **options)
    assert [
        c for c in range(7) if not torch.equal(new_state["head.weight"][c], state["head.weight"][c])
    ] == moved
    assert [c for c in range(7) if new_state["head.bias"][c] != state["head.bias"][c]] == moved
    for name in ("prompt.0", "fusion.key"):
        assert torch.equal(new_state[name], state[name])


def test_fppl_global_prototypes_are_means_over_holders(noise, tasks, rng):
    _, new_state, mean = fppl_update(noise, tasks, rng, [4])
    assert new_state["prototype.known"].tolist() == [0.0, 1.0]
    torch.testing.assert_close(
        new_state["prototype.mean"],
        torch.stack([torch.zeros(DIM, dtype=torch.float64), mean.mean(0)]),
        **CLOSE,
    )
    assert new_state["local.label"].tolist() == [0, 2, 4, 4]
    assert new_state["local.client"].tolist() == [
        5,
        5,
        0,
        1,
    ]


def test_fppl_local_prototypes_are_means_of_trained_features(record, batch_of):
    """Recompute the last upload of the first client from its trained prompts."""
    run = record("fppl")
    call = run.rounds[-1]
    client, payload = call.clients[0], call.payloads[0]
    batch = batch_of(run.method, run.bench.train, client.index)
    tree = {**call.ctx.shared, **select(payload, "prompt.", "fusion.")}
    features = run.bench.backbone(batch.x, run.method.fused_prompts(tree, batch.query))
    assert payload["local.label"].tolist() == sorted(set(batch.y.tolist()))
    for label, mean in zip(payload["local.label"], payload["local.mean"], strict=True):
        torch.testing.assert_close(mean, features[batch.y == label].mean(0), rtol=1e-9, atol=1e-9)


def test_fppl_fused_prompts_are_bounded_by_task_prompts(noise):
    tree = {**one_hot_prompts(noise, 3), "prompt.1": noise(2, DIM), "past.1": noise(2, 2, DIM)}
    mixture = create_method("fppl", blocks=(1,)).fused_prompts(tree, noise(7, DIM))["deep.1"]
    prompts = torch.cat([tree["past.1"], tree["prompt.1"][None]])
    assert (mixture >= prompts.min(0).values - 1e-12).all()
    assert (mixture <= prompts.max(0).values + 1e-12).all()
