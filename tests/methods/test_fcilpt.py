"""FCILPT: its prompt pool, keys, usage counts and old clients."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo import Context, FczooError, create_method
from fczoo.aggregators.averaging import uniform
from fczoo.core.payload import Payload
from fczoo.testing.toy_benchmark import small_method
from helpers_methods import CLOSE, DIM


def test_fcilpt_usage_counts_every_choice(make_bench, small_method, watch):
    """Count N prompts for each image in each of the two epochs."""
    run = watch(make_bench(epochs=2), small_method("fcilpt"))
    assert run.rounds
    for call in run.rounds:
        for payload in call.payloads:
            assert payload["usage"].sum() == run.method.chosen * payload.num_samples * 2
            assert payload["usage"].min() >= 0
            assert len(payload["usage"]) == run.method.size


def pool(noise, size: int = 6) -> dict[str, Tensor]:
    return {
        "pool.key": noise(size, DIM),
        "pool.prompt": noise(size, 2, DIM),
        "common": noise(1, DIM),
    }


def test_fcilpt_selects_nearest_keys_regardless_of_norm(backbone, images_batch, noise):
    method, tree = create_method("fcilpt", size=6, chosen=3), pool(noise)
    similarity, chosen = method.choose(backbone, tree, images_batch)
    by_hand = [
        [float(q @ k / (q.norm() * k.norm())) for k in tree["pool.key"]] for q in images_batch.query
    ]
    for row, values, slots in zip(by_hand, similarity.tolist(), chosen.tolist(), strict=True):
        assert slots == sorted(range(6), key=lambda i: -row[i])[:3]
        assert values == pytest.approx([row[i] for i in slots])
    assert len({tuple(sorted(row)) for row in chosen.tolist()}) > 1  # images differ
    longer = {
        **tree,
        "pool.key": tree["pool.key"] * torch.tensor([1e-3, 7.0, 1.0, 1e4, 0.2, 3.0])[:, None],
    }
    assert torch.equal(
        method.choose(backbone, longer, images_batch._replace(query=images_batch.query * 50))[1],
        chosen,
    )


def test_fcilpt_embed_cls_query_is_same_for_all_images(backbone, images_batch, noise):
    method, tree = create_method("fcilpt", size=6, chosen=3, query="embed_cls"), pool(noise)
    similarity, chosen = method.choose(backbone, tree, images_batch)
    assert (chosen == chosen[0]).all() and similarity.std(0).max() < 1e-12
    key = F.normalize(tree["pool.key"], dim=-1) @ F.normalize(backbone.class_token(), dim=0)
    assert chosen[0].tolist() == key.argsort(descending=True)[:3].tolist()


@pytest.mark.parametrize(("keys", "far"), [("same", 0.0), ("opposite", 6.0), ("random", None)])
def test_fcilpt_key_loss_is_between_0_and_2n(backbone, images_batch, noise, tasks, keys, far):
    """Compute the key loss L_QP, the sum of 1 - cos over the N = 3 chosen keys.

    It is averaged over images; the loss adds L_QP / lambda.
    """
    batch = images_batch._replace(query=images_batch.query[:1].expand(6, -1), y=images_batch.y * 0)
    tree = {**pool(noise, 4), "head.weight": noise(7, DIM), "head.bias": noise(7)}
    if keys != "random":
        tree["pool.key"] = (
            batch.query[:1]
            * torch.tensor([1.0, 2.0, 0.5, 3.0])[:, None]
            * (1 if keys == "same" else -1)
        )
    context = Context(tasks[0], 0, 1, {})
    weak, strong = (
        create_method("fcilpt", size=4, chosen=3, strength=s).loss(backbone, tree, batch, context)[
            0
        ]
        for s in (0.5, 1.0)
    )
    key_loss = float(weak - strong)  # 2 L_QP - L_QP
    if far is not None:
        assert key_loss == pytest.approx(far, abs=1e-9)
    else:
        cosine = F.cosine_similarity(batch.query[:1], tree["pool.key"])
        assert key_loss == pytest.approx(float((1 - cosine.topk(3).values).sum()), abs=1e-9)
        assert 0 < key_loss < 6


def test_fcilpt_usage_ignores_padding(backbone, images_batch, noise, tasks):
    tree = {**pool(noise), "head.weight": noise(7, DIM), "head.bias": noise(7)}
    batch = images_batch._replace(
        w=torch.tensor([1.0, 1, 1, 1, 0, 0], dtype=torch.float64), y=images_batch.y * 0
    )
    _, sums = create_method("fcilpt", size=6, chosen=3).loss(
        backbone, tree, batch, Context(tasks[0], 0, 1, {})
    )
    assert sums["usage"].sum() == 3 * 4


def test_fcilpt_rejects_more_prompts_than_pool_size():
    with pytest.raises(FczooError, match=r"fcilpt\.chosen is 5, more than the 4 prompts"):
        create_method("fcilpt", size=4)


def test_fcilpt_old_clients_train_on_previous_task(make_bench, small_method, watch):
    """Let a client without images of task 2 be idle, or move head rows of its earlier classes."""
    present = {}
    for choice in ("idle", "previous_task"):
        run = watch(make_bench(), small_method("fcilpt", support="local", old_clients=choice))
        present[choice] = [sorted(c.number for c in call.clients) for call in run.rounds]
        for call in run.rounds:
            for client, payload in zip(call.clients, call.payloads, strict=True):
                client_classes = set(run.bench.train.labels[client.index].tolist())
                changes = {
                    c
                    for c in range(7)
                    if not torch.equal(payload["head.bias"][c], call.state["head.bias"][c])
                }
                assert changes == (client_classes if len(client_classes) > 1 else set())
                new = client_classes <= set(range(call.ctx.task.start, call.ctx.task.stop))
                assert new or (
                    choice == "previous_task"
                    and call.ctx.task.index == 1
                    and client_classes <= {0, 1, 2}
                )
        assert ("train again on their last ones" in run.result.remark) == (
            choice == "previous_task"
        )
    assert present["idle"][2:4] != present["previous_task"][2:4] == [[0, 1, 2]] * 2


def test_fcilpt_loss_of_old_class_covers_all_seen_classes(backbone, images_batch, noise, tasks):
    """Compute the loss in the second task, with classes 3 and 4 of 5 seen.

    The head gives ln(1 to 7) for every image.
    """
    bias = torch.arange(1, 8, dtype=torch.float64).log()
    tree = {
        **pool(noise),
        "head.weight": torch.zeros(7, DIM, dtype=torch.float64),
        "head.bias": bias,
    }
    for label, of_all in ((1, 2 / (1 + 2 + 3 + 4 + 5)), (4, 5 / (4 + 5))):
        batch = images_batch._replace(y=torch.full_like(images_batch.y, label))
        loss, _ = create_method(
            "fcilpt", size=6, chosen=3, old_clients="previous_task", strength=1e12
        ).loss(backbone, tree, batch, Context(tasks[1], 0, 1, {}))
        assert float(loss) == pytest.approx(-math.log(of_all), abs=1e-9)


def test_fcilpt_local_softmax_trains_rows_of_local_classes(make_bench, small_method, watch):
    """Move the head rows of the client's classes, or of all task classes with ``support=task``."""
    for support in ("local", "task"):
        run = watch(make_bench(), small_method("fcilpt", support=support))
        lacking = 0
        for call in run.rounds:
            for client, payload in zip(call.clients, call.payloads, strict=True):
                client_classes = set(run.bench.train.labels[client.index].tolist())
                changes = {
                    c
                    for c in range(7)
                    if not torch.equal(payload["head.bias"][c], call.state["head.bias"][c])
                }
                task = set(range(call.ctx.task.start, call.ctx.task.stop))
                lacking += client_classes < task
                assert changes == (
                    task
                    if support == "task"
                    else client_classes
                    if len(client_classes) > 1
                    else set()
                )
        assert lacking


def test_fcilpt_selection_does_not_depend_on_pool_order(backbone, images_batch, noise):
    method, tree, order = (
        create_method("fcilpt", size=6, chosen=3),
        pool(noise),
        torch.tensor([4, 0, 5, 2, 1, 3]),
    )
    permutation = {
        **tree,
        "pool.key": tree["pool.key"][order],
        "pool.prompt": tree["pool.prompt"][order],
    }
    old_choice, new_choice = (
        method.choose(backbone, t, images_batch)[1] for t in (tree, permutation)
    )
    assert torch.equal(order[new_choice], old_choice)
    assert not torch.equal(new_choice, old_choice)


def test_fcilpt_zero_key_has_zero_similarity(backbone, images_batch, noise):
    tree = pool(noise)
    tree["pool.key"][2] = 0
    similarity, chosen = create_method("fcilpt", size=6, chosen=6).choose(
        backbone, tree, images_batch
    )
    assert similarity.isfinite().all() and similarity[chosen == 2].abs().max() == 0


def test_fcilpt_without_sorting_averages_by_position(noise):
    payloads = [
        Payload({**pool(noise), "usage": torch.tensor([1.0, 5, 2, 0, 3, 4]).roll(i)}, i, i + 1)
        for i in range(3)
    ]
    mean = create_method("fcilpt", sort=False).aggregate(payloads, uniform)
    assert "usage" not in mean
    for key in ("pool.key", "pool.prompt", "common"):
        torch.testing.assert_close(mean[key], sum(p[key] for p in payloads) / 3)


def test_class_means_come_from_clients_with_new_images(make_bench, watch):
    """Start new rows at means over the clients that have images of the task."""
    bench = make_bench(rounds=1, epochs=1)
    method = small_method("fcilpt", old_clients="previous_task", head_init="means")
    run = watch(bench, method)
    survey_clients = [
        {c.number for c in call.clients} for call in run.calls if call.phase == "task_start"
    ]
    assert survey_clients == [
        {c.number for c in bench.clients(task)} for task in bench.stream.tasks
    ]
    round_clients = [{c.number for c in call.clients} for call in run.rounds]
    assert any(
        new_clients < all_clients
        for new_clients, all_clients in zip(survey_clients, round_clients, strict=True)
    )


def test_fcilpt_selects_one_specific_and_nearest_similar_prompts(backbone, images_batch, noise):
    """Choose 1 of 2 task-specific and 2 of 3 task-similar prompts for an image.

    Cosines with the query are 0.9 and 0.8 for the former, 0.1, 0.3 and 0.2 for the latter. An
    undivided pool takes the two task-specific prompts.
    """
    query = F.normalize(images_batch.query[:1], dim=-1)
    other = noise(1, DIM)
    other = F.normalize(other - (other @ query.mT) * query, dim=-1)
    cosines = torch.tensor([[0.9], [0.8], [0.1], [0.3], [0.2]], dtype=torch.float64)
    tree = {**pool(noise, 5), "pool.key": cosines * query + (1 - cosines**2).sqrt() * other}
    batch = images_batch._replace(query=query.expand(6, -1))
    divided = create_method("fcilpt", size=5, chosen=3, specific=2)
    similarity, chosen = divided.choose(backbone, tree, batch)
    assert chosen.tolist() == [[0, 3, 4]] * 6
    torch.testing.assert_close(similarity[0], cosines[[0, 3, 4], 0])
    undivided = create_method("fcilpt", size=5, chosen=3)
    assert undivided.choose(backbone, tree, batch)[1].tolist() == [[0, 1, 3]] * 6


def test_fcilpt_sorts_each_part_of_divided_pool():
    """Sort by usage: 1 and 4 of task-specific prompts, 2, 9 and 5 of task-similar ones."""
    keys = torch.arange(5.0)[:, None]
    usage = torch.tensor([1.0, 4, 2, 9, 5])
    payload = Payload({"pool.key": keys, "pool.prompt": keys[:, None], "usage": usage}, 0, 1)
    for specific, order in ((2, [1, 0, 3, 4, 2]), (0, [3, 4, 1, 2, 0])):
        method = create_method("fcilpt", size=5, chosen=3, specific=specific)
        assert method.aggregate([payload], uniform)["pool.key"][:, 0].tolist() == order


def test_fcilpt_rejects_cifar100_pool_without_similar_prompts():
    with pytest.raises(FczooError, match=r"so 0 of the 10 prompts are task-similar and .* 1 to 1;"):
        create_method("fcilpt", "cifar100", specific=10)
    for dataset, similar in (("miniimagenet", 9), ("tinyimagenet", 14)):
        method = create_method("fcilpt", dataset, specific=10)
        assert method.size - method.specific == similar >= method.chosen - 1


def test_fcilpt_with_fixed_head_uploads_no_head(make_bench, small_method, watch):
    """Upload keys, prompts, the common prompt and counts; keep rows at their class means."""
    run = watch(make_bench(), small_method("fcilpt", head="fixed", head_init="means", specific=1))
    for call in run.rounds:
        for payload in call.payloads:
            assert set(payload) == {"pool.key", "pool.prompt", "common", "usage"}
            assert not torch.equal(payload["common"], call.state["common"])
    rows = run.states[2]["head.weight"]
    assert torch.equal(rows[:3], run.rounds[0].state["head.weight"][:3])
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(7).to(rows), **CLOSE)
