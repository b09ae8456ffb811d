"""TARGET: its pieces against recorded outputs, synthesis by hand, distillation at clients."""

import pytest
import torch

from fczoo import Batch, Context, Task, create_method
from fczoo.baselines._target_generator import generate_images, image_generator
from fczoo.baselines._target_synthesis import (
    BETAS,
    SynthesisConfig,
    disagreement,
    divergence,
    synthesis_round,
)
from fczoo.core.tree import select
from fczoo.functional.losses import distillation
from fczoo.testing.method_under_test import record_run
from fczoo.testing.toy_benchmark import small_method, toy_backbone, toy_bench
from helpers_golden import golden

EXACT = {"rtol": 1e-9, "atol": 1e-12}
CONFIG = SynthesisConfig(1, 2, 0, 3, 4, 2, 0.01, 0.1, 0.5, 1.0, 0, 0.0)
OFFICIAL = {
    "linear": "l1.0",
    "norm0": "conv_blocks.0",
    "conv0": "conv_blocks.2",
    "norm1": "conv_blocks.3",
    "conv1": "conv_blocks.6",
    "norm2": "conv_blocks.7",
    "conv2": "conv_blocks.9",
}


def test_generator_matches_released_code() -> None:
    g = golden("target_pieces")
    names = image_generator(5, 4, 8, torch.Generator())
    tree = {}
    for name, ours in names.items():
        layer, _, part = name.partition(".")
        tree[name] = g[f"in.gen.{OFFICIAL[layer]}.{part}"]
        assert tree[name].shape == ours.shape
    images = generate_images(tree, g["in.z"], 8)
    torch.testing.assert_close(images, g["out.images_train_mode"], **EXACT)


def test_losses_match_released_code() -> None:
    g = golden("target_pieces")
    student, teacher = g["in.student"], g["in.teacher"]
    loss = distillation(student, teacher, 2.0).mean()
    torch.testing.assert_close(loss, g["out.kd_T2"], **EXACT)
    torch.testing.assert_close(
        divergence(teacher, student, 20.0).mean(), g["out.kldiv_T20"], **EXACT
    )
    each = g["out.kldiv_T1_none"].sum(1)
    torch.testing.assert_close(divergence(teacher, student, 1.0), each, **EXACT)
    agree = teacher.argmax(1) == student.argmax(1)
    assert agree.any() and not agree.all()
    sum_of_agreements = each[agree].sum() / len(each)
    torch.testing.assert_close(disagreement(teacher, student), sum_of_agreements, **EXACT)


def test_images_have_backbone_size(noise) -> None:
    """Generate images of a size that is not a multiple of four, with values in (0, 1)."""
    tree = image_generator(5, 3, 10, torch.Generator().manual_seed(0))
    images = generate_images(tree, noise(4, 5).float(), 10)
    assert images.shape == (4, 3, 10, 10)
    assert images.min() > 0
    assert images.max() < 1


def test_synthesis_round_by_hand(noise) -> None:
    """Take one step of Adam along the summed gradients of a copy that took three steps."""
    start = image_generator(4, 2, 8, torch.Generator().manual_seed(0))
    start = {k: v.double() for k, v in start.items()}
    z = noise(2, 4)
    base = {k: v.clone().requires_grad_() for k, v in start.items()}
    outer = torch.optim.Adam(base.values(), 0.03, betas=BETAS)
    best_images = synthesis_round(base, outer, z, lambda images: images.square().mean(), CONFIG, 8)

    fast = {k: v.clone().requires_grad_() for k, v in start.items()}
    noisy, total, losses_and_images = z.clone().requires_grad_(), dict.fromkeys(start, 0.0), []
    generator_steps = torch.optim.Adam(fast.values(), 0.01, betas=BETAS)
    noise_steps = torch.optim.Adam([noisy], 0.1, betas=BETAS)
    for _ in range(3):
        images = generate_images(fast, noisy, 8)
        loss = images.square().mean()
        losses_and_images.append((float(loss.detach()), images.detach()))
        gradients = torch.autograd.grad(loss, [*fast.values(), noisy])
        for leaf, gradient in zip([*fast.values(), noisy], gradients, strict=True):
            leaf.grad = gradient
        total = {k: total[k] + leaf.grad for k, leaf in fast.items()}
        generator_steps.step()
        noise_steps.step()
    torch.testing.assert_close(
        best_images, min(losses_and_images, key=lambda pair: pair[0])[1], **EXACT
    )
    large = {
        k for k, v in total.items() if v.abs().min() > 1e-6
    }  # the first step of Adam has the size of the rate
    assert len(large) >= 4
    for name in large:
        one_step = start[name] - 0.03 * total[name].sign()
        torch.testing.assert_close(base[name].detach(), one_step, rtol=1e-3, atol=1e-4)


def test_clients_distil_drawn_images(noise, backbone) -> None:
    """Distil the first and the third of four images, which draws of 0 and .5 select.

    The loss has 25 times their cross-entropy at T = 2.
    """
    method, task = create_method("target", tune="lora"), Task(1, 3, 5, 7, 3)
    pool = torch.randint(256, (4, 3, 16, 16), generator=torch.Generator().manual_seed(0)).to(
        torch.uint8
    )
    head = {"head.weight": noise(7, 32), "head.bias": noise(7)}
    teacher = {"teacher.head.weight": noise(7, 32), "teacher.head.bias": noise(7)}
    x, labels = noise(2, 3, 16, 16), torch.tensor([3, 4])
    draws = torch.tensor([[0.0], [0.5]]).double()
    batch = Batch(x, labels, torch.ones(2).double(), x.new_empty(2, 0), draws=draws)
    loss, _ = method.loss(
        backbone, head, batch, Context(task, 0, 1, {"synthetic": pool, **teacher})
    )

    features = backbone(x) @ head["head.weight"].T + head["head.bias"]
    plain = torch.nn.functional.cross_entropy(features[:, 3:5], labels - 3)
    mean, std = (
        torch.tensor(v, dtype=torch.float64).view(3, 1, 1)
        for v in (backbone.config.mean, backbone.config.std)
    )
    synthetic_features = backbone((pool[[0, 2]].double() / 255 - mean) / std)
    new = synthetic_features @ head["head.weight"][:3].T + head["head.bias"][:3]
    old = (
        synthetic_features @ teacher["teacher.head.weight"][:3].T + teacher["teacher.head.bias"][:3]
    )
    distillation = -((old / 2).softmax(1) * (new / 2).log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(loss, plain + 25 * distillation, **EXACT)


def test_images_are_synthesised_after_all_but_last_task(record) -> None:
    run = record("target")
    broadcasts = [call.state.get("synthetic") for call in run.rounds]
    by_task = {
        call.ctx.task.index: images for call, images in zip(run.rounds, broadcasts, strict=True)
    }
    assert by_task[0] is None and not torch.equal(by_task[1], by_task[2])
    shape = (run.method.images, 3, 16, 16)
    assert all(v.dtype == torch.uint8 and v.shape == shape for v in (by_task[1], by_task[2]))
    assert torch.equal(run.states[2]["synthetic"], by_task[2])
    assert torch.equal(
        run.states[0]["synthetic"], by_task[1]
    )  # made from the final model of the first task
    teacher = select(run.rounds[-1].state, "teacher.head.")
    assert torch.equal(teacher["teacher.head.weight"], run.states[1]["head.weight"])
    assert run.result.client_storage > by_task[2].numel()  # bytes


def test_teacher_classifies_synthetic_images() -> None:
    """Give synthetic images different labels, with more confidence than a grey image."""
    method = small_method("target", synthesis_rounds=3, synthesis_batch=12, steps=40, warmup=3)
    run = record_run(toy_bench(rounds=1, epochs=1), small_method("fedavg", lr=0.1), 0)
    backbone, rng = toy_backbone(), torch.Generator().manual_seed(0)
    images = method.synthetic_images(run.states[0], Task(0, 0, 3, 7, 3), backbone, rng)
    logits = method.answers(backbone, run.states[0], images.double() / 255)[:, :3]
    grey = method.answers(backbone, run.states[0], torch.full((1, 3, 16, 16), 0.5).double())[:, :3]
    assert len(set(logits.argmax(1).tolist())) > 1
    assert float(logits.softmax(1).amax(1).mean()) > float(grey.softmax(1).amax())


def test_without_distillation_equals_uniform_fedavg() -> None:
    bench = toy_bench(rounds=1, epochs=1, aggregator="uniform")
    ours, plain = (
        record_run(bench, small_method(name, **options), 0)
        for name, options in (("target", {"strength": 0.0}), ("fedavg", {}))
    )
    for task in (0, 2):
        for name, value in plain.states[task].items():
            torch.testing.assert_close(ours.states[task][name], value, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("exclude", "labels"), [(False, {0, 1, 2}), (True, {0, 1})])
def test_synthetic_labels_are_seen_classes(monkeypatch, exclude, labels) -> None:
    """Draw labels from seen classes, or from all but the newest as in fed-mammoth."""
    method = small_method("target", exclude_last_label=exclude)
    class_counts = []

    def record_classes(config, teacher, student, start, classes, size, rng):
        class_counts.append(classes)
        return torch.zeros(1)

    monkeypatch.setattr("fczoo.baselines.target.synthesise_images", record_classes)
    head = {"head.weight": torch.zeros(7, 32).double(), "head.bias": torch.zeros(7).double()}
    method.synthetic_images(head, Task(0, 0, 3, 7, 3), toy_backbone(), torch.Generator())
    assert class_counts == [len(labels)]
