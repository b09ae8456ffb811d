"""Joint training on all images so far."""

import pytest
import torch
import torch.nn.functional as F

from fczoo import create_method
from fczoo.core.tree import select
from helpers_methods import CLOSE


def test_joint_trains_on_all_images_so_far(make_bench, small_method, watch):
    central = watch(make_bench(), small_method("joint"))
    spread = watch(make_bench(), small_method("joint", setting="federated"))
    for run, clients in ((central, 1), (spread, 3)):
        for call in run.rounds:
            assert len(call.clients) == clients
            labels = torch.cat([run.bench.train.labels[c.index] for c in call.clients])
            assert sorted(labels.tolist()) == [
                c for c in range(call.ctx.task.stop) for _ in range(10)
            ]
            client_indices = [set(c.index.tolist()) for c in call.clients]
            assert sum(map(len, client_indices)) == len(set().union(*client_indices))


def test_joint_resets_state_in_every_task(small_method, backbone, tasks, rng):
    method = small_method("joint")
    first = method.begin_task({}, tasks[0], backbone, torch.Generator().manual_seed(1))
    end_state = {k: v + 1 for k, v in first.items()}
    again = method.begin_task(end_state, tasks[1], backbone, torch.Generator().manual_seed(1))
    assert all(torch.equal(again[k], first[k]) for k in first)


def test_joint_softmax_covers_all_seen_classes(record, batch_of):
    run = record("joint")
    call = run.rounds[-1]
    data = batch_of(run.method, run.bench.train, torch.arange(20))
    train = select(call.state, *run.method.training().optims)
    loss, _ = run.method.loss(run.bench.backbone, train, data, call.ctx)
    torch.testing.assert_close(
        loss,
        F.cross_entropy(run.method.logits(run.bench.backbone, train, data)[:, :7], data.y),
        **CLOSE,
    )


@pytest.mark.parametrize("setting", ["central", "federated"])
def test_head_from_class_means_covers_all_seen_classes(make_bench, watch, batch_of, setting):
    """Set rows to means of untrained features in every task."""
    run = watch(
        make_bench(rounds=1, epochs=1), create_method("joint", head_init="means", setting=setting)
    )
    data = batch_of(run.method, run.bench.train, torch.arange(len(run.bench.train.labels)))
    features = run.bench.backbone(data.x)
    for call in run.rounds:
        stop = call.ctx.task.stop
        means = torch.stack([features[data.y == c].mean(0) for c in range(stop)])
        torch.testing.assert_close(
            call.state["head.weight"][:stop], F.normalize(means, dim=1), **CLOSE
        )
        assert not call.state["head.weight"][stop:].any()
