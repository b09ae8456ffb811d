"""LwF: its teacher and the distillation from it."""

import torch

from fczoo import Task
from fczoo.core.tree import select
from helpers_methods import batch


def test_lwf_teacher_is_final_model_of_previous_task(record):
    run = record("lwf")
    for call in run.rounds:
        t = call.ctx.task.index
        teacher = select(call.state, "teacher.")
        assert bool(teacher) == (t > 0)
        for name, value in teacher.items():
            assert torch.equal(value, run.states[t - 1][name.removeprefix("teacher.")])


def test_lwf_distillation_has_no_gradient_on_new_logits(record, batch_of, noise):
    run, task = record("lwf"), Task(1, 3, 5, 7, 3)
    logits = noise(4, 7).requires_grad_()
    kd = run.method.distillation(logits, batch(noise(4, 2), [3, 4, 3, 4], noise(4, 7)), task)
    (gradient,) = torch.autograd.grad(kd, logits)
    assert gradient[:, :3].any() and not gradient[:, 3:].any()


def test_teacher_outputs_are_cached_for_fixed_view(make_bench, small_method, watch):
    """Compute one teacher pass per task instead of one per epoch."""
    calls: list[int] = []
    method = small_method("lwf")
    original = type(method).teacher_outputs

    def count_images(self, backbone, shared, data, task):
        calls.append(len(data.y))
        return original(self, backbone, shared, data, task)

    type(method).teacher_outputs = count_images
    try:
        fixed_view = watch(make_bench(batch_size=100), method)
        once, calls[:] = sum(calls), []
        watch(make_bench(batch_size=100, augment="flip"), method)
    finally:
        type(method).teacher_outputs = original
    images = sum(
        len(c.index) for call in fixed_view.rounds if call.ctx.round == 0 for c in call.clients
    )
    assert once == images and sum(calls) == 4 * images  # two rounds of two epochs
