"""Options that whole runs of released code need: positions, views of statistics, idle rounds."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from fczoo import FczooError, Settings, create_method
from fczoo.core.backbone import Backbone
from fczoo.core.tree import select
from fczoo.data.views import ImageStore
from fczoo.functional.prompts import gather_prompts

CLOSE = {"rtol": 1e-9, "atol": 1e-9}


def test_l2p_adds_shifted_position_rows(backbone, tasks, images_batch):
    """Add position rows in order after inserting the prompts.

    One table has rows r1..rn of n prompts and p0, p1.. of class token and patches. The class token
    comes first and takes r1, the prompts take r2..rn and p0, patches their own.
    """
    method = create_method("l2p", size=4, chosen=2, length=2, shifted_positions=True)
    state = method.begin_task({}, tasks[0], backbone, torch.Generator().manual_seed(0))
    state = {name: value.double() for name, value in state.items()}
    rows, positions = state["position"], backbone.weights["pos_embed"]
    chosen = method.choose(state, images_batch)[1]
    prompts = gather_prompts(state["pool.prompt"], chosen).flatten(1, 2)
    by_hand = {
        "full.cls_token": backbone.weights["cls_token"] + rows[0],
        "full.pos_embed": torch.cat([torch.zeros_like(positions[:, :1]), positions[:, 1:]], 1),
        "tokens": prompts + torch.cat([rows[1:], positions[0, :1]]),
    }
    expected = backbone(images_batch.x, by_hand, pool="prompt")
    torch.testing.assert_close(method.features(backbone, state, images_batch), expected, **CLOSE)
    plain = replace(method, shifted_positions=False).features(backbone, state, images_batch)
    assert not torch.allclose(plain, expected)


def test_l2p_rejects_shifted_positions_without_class_position(backbone, tasks):
    weights = {**backbone.weights, "pos_embed": backbone.weights["pos_embed"][:, 1:]}
    patches_only = Backbone(replace(backbone.config, position="patches"), weights)
    method = create_method("l2p", shifted_positions=True)
    with pytest.raises(FczooError, match=r"l2p.shifted_positions moves the class token's"):
        method.begin_task({}, tasks[0], patches_only, torch.Generator())


def test_ewc_idle_round_does_not_call_backbone(record, batch_of):
    run = record("ewc")
    call = run.rounds[1]
    assert call.ctx.round == call.ctx.rounds - 1
    method = replace(run.method, skip_last_round=True)
    data = batch_of(method, run.bench.train, call.clients[0].index)
    train = select(call.state, *method.training().optims)
    train = {name: value.clone().requires_grad_() for name, value in train.items()}
    loss, sums = method.loss(None, train, data, call.ctx)
    assert loss == 0 and not sums
    assert not any(g.any() for g in torch.autograd.grad(loss, list(train.values())))


@pytest.mark.parametrize(("view", "passes"), [("test", 1), ("train", 1), ("train", 2)])
def test_lorm_computes_gram_matrices_of_selected_view(make_bench, monkeypatch, view, passes):
    """Train for one epoch; collect statistics after the round and at the end of the task."""
    bench, seen = make_bench(epochs=1, rounds=1, augment="flip"), Counter[str]()
    for name, function in (("test", "view"), ("train", "training_view")):
        original = getattr(ImageStore, function)

        def count(self, index, *rest, original=original, name=name):
            seen[name] += len(index) * (self is bench.train)
            return original(self, index, *rest)

        monkeypatch.setattr(ImageStore, function, count)
    run = iter(bench.start(create_method("lorm", rank=1, view=view, passes=passes)))
    task = next(run)
    images = sum(len(client.index) for client in bench.clients(task))
    assert seen["train"] == images * (1 + 2 * passes if view == "train" else 1)
    form = 1  # the server computes upload shapes from one image
    assert seen["test"] == form + images * (0 if view == "train" else 2)


@pytest.mark.parametrize("name", ["hgp", "fedproto", "ccvr", "fisheravg"])
def test_unnormalised_statistics_use_uncropped_images(make_bench, small_method, monkeypatch, name):
    crops = []
    original = ImageStore.view
    bench = make_bench(epochs=1, rounds=1)
    cropped = replace(bench, train=ImageStore(bench.stream.train, bench.backbone, test_crop=0.5))

    def note_crop(self, index):
        crops.append(self.test_crop)
        return original(self, index)

    for quirk, expected in ((False, 0.5), (True, 1.0)):
        run = iter(cropped.start(small_method(name, stats_unnormalised=quirk, head_init="zeros")))
        with monkeypatch.context() as patch:
            patch.setattr(ImageStore, "view", note_crop)
            patch.setattr(bench.test, "view", lambda index: original(bench.test, index))
            crops.clear()
            next(run)
        assert expected in crops


def test_without_test_crop_gives_whole_images(make_bench):
    bench, index = make_bench(), torch.arange(3)
    cropped = ImageStore(bench.stream.train, bench.backbone, test_crop=0.5)
    whole = bench.train.view(index)
    assert torch.equal(cropped.without_test_crop().view(index), whole)
    assert not torch.equal(cropped.view(index), whole)


@pytest.mark.parametrize("size", [8, 64])
def test_released_fppl_server_uses_client_batch_size(size):
    settings = Settings.for_dataset("cifar100", as_released="fppl", batch_size=size)
    assert settings.method_options("fppl")["server_batch"] == size
