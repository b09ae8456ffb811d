"""Stacks of tensors of finished tasks."""

import torch

from fczoo.core.tree import stack_past


def test_stack_past_keeps_task_order():
    state = {"lora.0.a": torch.tensor([1.0, 2.0]), "head.bias": torch.zeros(3)}
    first = stack_past(state, "lora.", "past.")
    assert {k: v.tolist() for k, v in first.items()} == {"past.0.a": [[1, 2]]}
    second = stack_past({**first, "lora.0.a": torch.tensor([3.0, 4.0])}, "lora.", "past.")
    assert {k: v.tolist() for k, v in second.items()} == {"past.0.a": [[1, 2], [3, 4]]}
