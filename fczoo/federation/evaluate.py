"""Accuracy of a server state on every task seen so far."""

import torch
from torch import Tensor

from fczoo.core.errors import FczooError
from fczoo.core.method import Method
from fczoo.core.tree import Tree
from fczoo.core.types import Task
from fczoo.federation.batches import view_batches
from fczoo.federation.world import World


@torch.inference_mode()
def predictions(
    method: Method, world: World, state: Tree, index: Tensor, task: Task, batch_size: int
) -> tuple[Tensor, Tensor]:
    """Return predictions over all classes seen by ``task``, and labels [n], on the CPU.

    One forward an image. A class without images at any client is never predicted,
    whatever its logit: nothing has been learned of it, and a head that starts at zero would have it
    beat negative logits. Raises TypeError when the method's logits do not cover exactly the classes
    seen so far, and FczooError when a logit of a class with images at a client is NaN.
    """
    store, has_images = world.test, world.classes_with_images(task)
    answers, labels = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=torch.int64)]
    for batch in view_batches(method, store, index, batch_size):
        logits = method.predict(store.backbone, state, batch, task)
        if logits.shape != (len(batch.y), task.stop):
            raise TypeError(
                f"{method.name}.predict gave {tuple(logits.shape)}, expected "
                f"{(len(batch.y), task.stop)}: "
                f"one logit for each class seen"
            )
        logits = logits.masked_fill(~has_images.to(logits.device), -torch.inf)
        if logits.isnan().any():  # which argmax would count as an answer
            problem = f"{method.name}.predict gives NaN after task {task.index + 1}"
            raise FczooError(
                f"{problem}; lower its learning rates with --set, or look for a division by zero"
            )
        answers.append(logits.argmax(1).cpu())
        labels.append(batch.y.cpu())
    return torch.cat(answers), torch.cat(labels)


def accuracy_row(
    method: Method, world: World, state: Tree, task: Task, batch_size: int
) -> list[float]:
    """Return the accuracy in percent on each task up to ``task``; NaN without test images."""
    row, stream = [], world.stream
    for test_task in stream.tasks[: task.index + 1]:
        index = torch.from_numpy(stream.positions(stream.test, test_task))
        answers, labels = predictions(method, world, state, index, task, batch_size)
        row.append(
            100 * int((answers == labels).sum()) / len(index) if len(index) else float("nan")
        )
    return row
