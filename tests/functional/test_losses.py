"""Cross-entropy over the classes of a task, of all tasks so far, or of the run."""

import math

import pytest
import torch

from fczoo.core.tasks import Task
from fczoo.core.types import Batch
from fczoo.functional.losses import task_cross_entropy


@pytest.mark.parametrize(("support", "classes"), [("task", 2), ("seen", 3), ("all", 5)])
def test_support_selects_classes_of_softmax(support, classes):
    """Compare with the logarithm of the number of classes, the loss of zero logits."""
    task = Task(index=1, start=1, stop=3, classes=5, count=3)
    logits = torch.zeros(2, 5, requires_grad=True)
    empty = torch.empty(2, 0)
    batch = Batch(x=empty, y=torch.tensor([1, 2]), w=torch.ones(2), query=empty)
    loss = task_cross_entropy(logits, batch, task, support)
    assert loss.item() == pytest.approx(math.log(classes))
    loss.backward()
    assert int(logits.grad.any(0).sum()) == classes
