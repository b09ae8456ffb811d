"""LANDER: generator, losses, synthesis and student against outputs of the official code."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from fczoo import Batch, FczooError, Task, Tree, create_method
from fczoo.baselines._data_free_replay import Moments, Reply, layer_distance, mix_moments
from fczoo.baselines._lander_anchors import (
    SPREAD,
    draw_anchors,
    mean_square_difference,
    order_anchors,
)
from fczoo.baselines._lander_generator import (
    balanced_labels,
    crop_and_flip,
    input_layers,
    lander_generator,
    lander_images,
)
from fczoo.baselines._lander_synthesis import (
    STUDENT_DECAY,
    Synthesis,
    SynthesisOptions,
    student_step,
    synthesis_round,
)
from fczoo.core.tree import select, strip_prefix
from fczoo.testing.method_under_test import record_run
from fczoo.testing.toy_benchmark import small_method, toy_bench
from helpers_golden import F32, compare, golden
from helpers_payload import server_context

LAYERS = {
    "input_norm": "n1",
    "linear": "l1.0",
    "norm0": "conv_blocks.0",
    "conv0": "conv_blocks.2",
    "norm1": "conv_blocks.3",
    "conv1": "conv_blocks.6",
    "norm2": "conv_blocks.7",
    "conv2": "conv_blocks.9",
}
STEPS = 1e-3  # tolerance after steps of Adam


def generator_of(g: Tree, prefix: str) -> Tree:
    """Return a recorded generator under the names of this package."""
    tree = {}
    for name in lander_generator(6, 10, 4, 5, 3, 8, torch.Generator()):
        layer, _, part = name.partition(".")
        if layer == "input":
            tree[name] = torch.stack([g[f"{prefix}.le1.{i}.{part}"] for i in range(3)])
        else:
            tree[name] = g[f"{prefix}.{LAYERS[layer]}.{part}"].clone()
    return tree


def network(net: Tree, images: Tensor) -> Reply:
    """Return the reply of the recorded model, a small convolutional network without norms."""
    maps = F.relu(F.conv2d(images, net["conv.weight"], padding=1))
    maps = F.relu(F.conv2d(maps, net["conv2.weight"], stride=2, padding=1))
    features = maps.mean((2, 3))
    attached = F.linear(features, net["mapping.weight"], net["mapping.bias"])
    return Reply(F.linear(features, net["fc.weight"], net["fc.bias"]), attached, [])


def test_generator_and_its_gradients() -> None:
    g = golden("lander_generator")
    tree = {k: v.requires_grad_() for k, v in generator_of(g, "in.generator").items()}
    images = lander_images(tree, g["in.label_embedding"][g["out.targets"]], 4, 8)
    compare("lander_generator", images, g["out.images"], F32)
    images.square().mean().backward()
    for name, gradient in generator_of(g, "out.grad").items():
        # a norm removes biases of input and linear layers: their gradients are rounding errors
        compare("lander_generator", tree[name].grad, gradient, 1e-4, name, least=1e-3)
    labels = balanced_labels(10, 4, torch.Generator().manual_seed(0))
    assert labels[:8].tolist() == g["out.targets"][:8].tolist()
    assert len(labels) == 10
    assert int(labels.max()) < 4


def test_client_losses_and_one_step() -> None:
    """Compare losses, and weights after one step.

    The recorded head reads the attached features; the losses do not depend on that.
    """
    g = golden("lander_loss")
    known, total = int(g["in.known"]), int(g["in.total"])
    task, method = Task(1, known, total, total, 2), create_method("lander")
    student = {k: v.clone().requires_grad_() for k, v in strip_prefix(g, "in.student.").items()}

    def reply(net: Tree, x: Tensor) -> Reply:
        attached = F.linear(x, net["att.weight"], net["att.bias"])
        return Reply(F.linear(attached, net["fc.weight"], net["fc.bias"]), attached, [])

    table = g["in.label_embedding"], torch.tensor(0.015)
    batch = Batch(g["in.x"], g["in.y"], torch.ones(6), g["in.x"])
    out = reply(student, g["in.x"])
    weight_new, weight_old = method.weights(task)
    old = reply(strip_prefix(g, "in.teacher."), g["in.x_synthetic"])
    new = reply(student, g["in.x_synthetic"])
    new = new._replace(logits=new.logits[:, :known])
    loss = weight_new * method.new_loss(out.logits, out.features, table, batch, task)
    loss = loss + weight_old * method.distance(new, old).mean()
    compare("lander_loss", loss, g["out.loss_task1"], F32)
    optimizer = torch.optim.SGD(student.values(), float(g["in.lr"]), 0.9, weight_decay=5e-4)
    loss.backward()
    optimizer.step()
    for name, value in student.items():
        compare("lander_loss", value, g[f"out.after_step.{name}"], F32, name)
    # the recorded first task has all rows of the head
    first, student = Task(0, 0, total, total, 1), strip_prefix(g, "in.student.")
    out = reply(student, g["in.x"])
    batch = batch._replace(y=g["in.y0"])
    loss = method.new_loss(out.logits, out.features, table, batch, first)
    compare("lander_loss", loss, g["out.loss_task0"], F32)


def test_three_rounds_of_synthesis() -> None:
    """Compare kept images, generator and normalisation; the adversary acts in the third round."""
    g = golden("lander_synthesis_nobn")
    steps, lr, prior, match, disagree, anchor, radius, _, _ = g["in.settings"].tolist()
    options = SynthesisOptions(
        steps=int(steps),
        lr_generator=lr,
        prior_weight=prior,
        match=match,
        disagree=disagree,
        anchor_weight=anchor,
        rows=4,
    )
    teacher, student = (
        partial(network, strip_prefix(g, f"in.{n}.")) for n in ("teacher", "student")
    )
    synthesis = Synthesis(generator_of(g, "in.generator"))
    for number in range(3):
        for part in ("weight", "bias"):
            drawn = [g[f"in.reinit_r{number}.le1.{i}.{part}"] for i in range(3)]
            synthesis.generator[f"input.{part}"] = torch.stack(drawn)
        labels = g[f"in.targets_r{number}"]
        targets = labels, g["in.label_embedding"][labels], torch.tensor(radius)
        adversary = student if number == 2 else None
        images = synthesis_round(synthesis, options, teacher, adversary, targets, [], 8, None)
        compare("lander_synthesis_nobn, after Adam", images, g[f"out.kept_r{number}"], STEPS)
        for name in ("mean", "std"):
            compare(
                "lander_synthesis_nobn, after Adam",
                synthesis.normalisation[name],
                g[f"out.{name}_r{number}"],
                STEPS,
            )
        for name, value in generator_of(g, f"out.generator_r{number}").items():
            if name not in ("input.bias", "linear.bias"):
                compare(
                    "lander_synthesis_nobn, after Adam",
                    synthesis.generator[name],
                    value,
                    1e-2,
                    name,
                )


def test_one_student_step() -> None:
    g = golden("lander_student")
    student = {k: v.clone().requires_grad_() for k, v in strip_prefix(g, "in.student.").items()}
    optimizer = torch.optim.SGD(student.values(), 0.1, 0.9, weight_decay=STUDENT_DECAY)
    teacher = partial(network, strip_prefix(g, "in.teacher."))
    options = SynthesisOptions(student_clip=None)
    student_step(student, optimizer, g["in.x"], teacher, network, options)
    for name, value in student.items():
        compare("lander_student", value, g[f"out.student.{name}"], F32, name)


def test_weights_of_new_and_synthetic_images() -> None:
    """Compare weights for 10, 40 and 90 old classes in tasks of ten classes."""
    method, expected = create_method("lander"), {10: (0.3646, 0.9785), 40: (0.2712, 1.6817)}
    for old, weights in {**expected, 90: (0.2480, 2.1525)}.items():
        task = Task(1, old, old + 10, 100, 10)
        assert method.weights(task) == pytest.approx(weights, abs=5e-5)


def test_anchor_hinge_loss_by_hand() -> None:
    """Compute the hinge of squared distances 1 and 3 at radius 1.5.

    The excess of their mean 2 is 0.5; the mean of the excesses 0 and 1.5 is 0.75.
    """
    anchors, attached = torch.zeros(2, 2), torch.tensor([[1.0, 1.0], [3**0.5, 3**0.5]])
    batch = Batch(attached, torch.tensor([0, 1]), torch.ones(2), attached)
    radius, leaf = torch.tensor(1.5), attached.requires_grad_()
    for bound, value in (("batch", 0.5), ("sample", 0.75)):
        method = create_method("lander", bound=bound)
        loss = method.anchor_loss(leaf, anchors, radius, batch)
        assert float(loss.detach()) == pytest.approx(value)
    inside = create_method("lander").anchor_loss(leaf, anchors, torch.tensor(2.5), batch)
    assert float(inside.detach()) == 0
    assert not torch.autograd.grad(inside, leaf)[0].any()


def test_anchors_by_hand(tmp_path: Path) -> None:
    """Order rows of a file by class order; give both kinds of drawn anchors the released scale."""
    table = torch.arange(12.0).view(4, 3)
    save_file({"text": table.half()}, tmp_path / "anchors.safetensors")
    task = Task(0, 0, 2, 4, 2, class_order=(2, 0, 3, 1))
    method = create_method("lander", anchor_file=str(tmp_path / "anchors.safetensors"))
    tree = method.start_anchors(task, 5, torch.Generator().manual_seed(0))
    assert tree["anchors"].tolist() == table[[2, 0, 3, 1]].tolist()
    assert tree["projection.weight"].shape == (3, 5)
    # neighbouring rows differ by 3: pairs at distance 3, 6 and 9 have the squares 9, 36 and 81
    mean_square = (3 * 9 + 2 * 36 + 81) / 6
    assert float(mean_square_difference(table)) == pytest.approx(mean_square)
    assert float(tree["radius"]) == pytest.approx(0.186 * mean_square)
    anchors = replace(method, radius=0.015).start_anchors(task, 5, torch.Generator())
    assert float(anchors["radius"]) == pytest.approx(0.015)
    drawn = draw_anchors("random", 50, 400, torch.Generator().manual_seed(0), "")
    assert float(drawn.square().mean()) == pytest.approx(SPREAD**2, rel=0.02)
    etf = draw_anchors("etf", 4, 6, torch.Generator().manual_seed(0), "")
    torch.testing.assert_close(etf.square().mean(1), torch.full((4,), SPREAD**2))
    cosines = F.cosine_similarity(etf[:, None], etf, dim=2)
    torch.testing.assert_close(cosines, torch.eye(4) * 4 / 3 - 1 / 3)
    assert float(mean_square_difference(table[:1])) == 0


@pytest.mark.parametrize("anchors", ["random", "etf"])
def test_drawn_anchors_of_class_subset(anchors: str) -> None:
    """Draw anchors for the first tasks of a search, which may have any class numbers."""
    task = Task(0, 0, 2, 3, 2, class_order=(9, 1, 4))
    method = create_method("lander", anchors=anchors, anchor_width=4)
    assert method.start_anchors(task, 5, torch.Generator())["anchors"].shape == (3, 4)


def test_invalid_anchors_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no table")
    save_file({"a": torch.zeros(2)}, tmp_path / "flat")
    for file in ("text", "flat", "missing"):
        method = create_method("lander", anchor_file=str(tmp_path / file))
        with pytest.raises(FczooError, match=r"lander\.anchor_file names .*row per class"):
            method.start_anchors(Task(0, 0, 2, 2, 1), 4, torch.Generator())
    with pytest.raises(FczooError, match="3 rows, but none for class 3"):
        order_anchors(torch.zeros(3, 2), (0, 3), "lander.anchor_file")
    with pytest.raises(FczooError, match="etf needs at least 8 entries per anchor"):
        draw_anchors("etf", 8, 7, torch.Generator(), "lander.anchors")
    with pytest.raises(FczooError, match="no synthetic image is kept"):
        create_method("lander", warmup=9, synthesis_rounds=8)


def test_input_layers_and_crops() -> None:
    """Share a layer between rows 0 and 1; a crop of one image is a shifted part of it."""
    tree = lander_generator(4, 3, 2, 5, 2, 8, torch.Generator().manual_seed(0))
    assert tree["input.weight"].shape == (2, 5, 4)
    anchors = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    images = lander_images(tree, anchors[[0, 0, 0]] + 1e-3 * anchors, 2, 8)
    assert images.shape == (3, 3, 8, 8)
    again = input_layers(2, 5, 4, torch.Generator().manual_seed(2))
    assert not again["input.bias"].any()
    assert not torch.equal(again["input.weight"], tree["input.weight"])
    ramp = torch.arange(64.0).view(1, 1, 8, 8).expand(20, 3, 8, 8) + 1
    crops = crop_and_flip(ramp, torch.Generator().manual_seed(0))
    assert crops.shape == ramp.shape
    inner = crops[:, 0, 4, 4]  # the centre never comes from the padding
    assert len(inner.unique()) > 5
    for crop in crops[:, 0]:  # adjacent pixels are adjacent in the image, or padding
        steps = (crop[:, 1:] - crop[:, :-1])[(crop[:, 1:] > 0) & (crop[:, :-1] > 0)]
        assert set(steps.tolist()) in ({1.0}, {-1.0})


def test_layer_distance_by_hand() -> None:
    """Mix 0.1 of the batch's moments with 0.9 of the earlier ones in later rounds."""
    batch, prior = (
        Moments(torch.tensor([3.0]), torch.tensor([5.0])),
        Moments(torch.tensor([0.0]), torch.tensor([1.0])),
    )
    average = Moments(torch.tensor([1.0]), torch.tensor([1.0]))
    assert float(layer_distance([batch], [prior], [])) == pytest.approx(3 + 4)
    # mean 0.1 * 3 + 0.9 * 1 = 1.2; variance 0.1 * 5 + 0.9 = 1.4
    assert float(layer_distance([batch], [prior], [average])) == pytest.approx(1.2 + 0.4)
    assert mix_moments([batch], []) == [batch]


def test_lowest_loss_option_keeps_start_of_cheapest_round() -> None:
    """Keep the model that the round of lowest loss started from, the first one on ties.

    Round 3 has the lowest loss; it started from the average of round 2.
    """
    method = create_method("lander", keep="lowest_loss", tune="head")
    task = Task(0, 0, 2, 2, 1)  # no task follows: nothing is synthesised
    state: Tree = {
        "kept.loss": torch.tensor(1e9),
        "head.weight": torch.zeros(2, 1),
        "projection.weight": torch.zeros(1, 1),
    }
    for number, loss in enumerate((5.0, 4.0, 2.0, 2.0)):
        value = number + 1.0  # the average of round ``number + 1``
        merged = {
            "head.weight": torch.full((2, 1), value),
            "projection.weight": torch.full((1, 1), value),
            "first_epoch_loss": torch.tensor(loss),
        }
        ctx = replace(server_context(task), round=number, rounds=4)
        state = method.server_update(state, merged, ctx)
    assert state["head.weight"].tolist() == [[2.0], [2.0]]
    assert float(state["kept.loss"]) == 6.0  # three clients
    assert "first_epoch_loss" not in state
    last = replace(method, keep="last")
    merged.pop("first_epoch_loss")
    assert last.server_update({}, merged, ctx)["head.weight"].tolist() == [[4.0], [4.0]]


def test_lowest_loss_option_uploads_first_epoch_loss() -> None:
    """Send the sum of the first of two epochs, declared as a loss."""
    bench = toy_bench(rounds=1, epochs=2, batch_size=8)
    record = record_run(bench, small_method("lander", keep="lowest_loss", lr=0.0, lr_backbone=0.0))
    losses = [float(p["first_epoch_loss"]) for p in record.rounds[0].payloads]
    one = record_run(
        toy_bench(rounds=1, epochs=1, batch_size=8),
        small_method("lander", keep="lowest_loss", lr=0.0, lr_backbone=0.0),
    )
    # Nothing moves, so the sums of two epochs would be about twice as large.
    assert losses == pytest.approx(
        [float(p["first_epoch_loss"]) for p in one.rounds[0].payloads], rel=1e-6
    )
    assert "kept.loss" not in record.rounds[-1].state  # stays at the server
    assert "losses" in record.result.uploaded


def test_image_pool_and_frozen_mean_anchors() -> None:
    record = record_run(toy_bench(rounds=1, epochs=1), small_method("lander", images=50))
    pool = record.rounds[1].state["synthetic"]
    assert pool.shape == (50, 3, 5, 5)  # of 5 kept rounds of 16
    assert pool.dtype == torch.uint8
    assert pool.float().std() > 1
    assert not select(record.rounds[0].state, "synthetic")
    means = record_run(
        toy_bench(rounds=1, epochs=1), small_method("lander", anchors="frozen_means")
    )
    table = means.rounds[1].state["anchors"]
    assert table.shape == (7, 32)
    assert table[:5].any(1).all()
    assert not table[5:].any()  # future classes
    assert math.isclose(
        float(means.rounds[1].state["radius"]), 0.186 * float(mean_square_difference(table[:5]))
    )
