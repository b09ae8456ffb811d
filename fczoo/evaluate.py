"""Accuracy of a server state on every task seen so far."""

import torch

from .core import Batch, Method, Task, Tree
from .data import Stream
from .engine import make_inputs
from .images import Augment, ImageStore


@torch.inference_mode()
def accuracy_row(method: Method, store: ImageStore, state: Tree, stream: Stream, task: Task, batch_size: int) -> list[float]:
    """Percent of right answers on each task up to ``task``, one forward an image; NaN for a task without test images.

    Raises TypeError when the method's logits do not cover exactly the classes seen so far.
    """
    row = []
    for seen in stream.tasks[: task.index + 1]:
        index = torch.from_numpy(stream.positions(stream.test, seen))
        right = 0
        for rows in index.split(batch_size):
            x, q = make_inputs(method, store, rows, Augment())
            labels = store.labels[rows.to(store.labels.device)]
            logits = method.predict(store.backbone, state, Batch(x, labels, torch.ones_like(labels, dtype=q.dtype), q), task)
            if logits.shape != (len(rows), task.stop):
                raise TypeError(f"{method.name}.predict gave {tuple(logits.shape)}, expected {(len(rows), task.stop)}: one logit for each class seen")
            right += int((logits.argmax(1) == labels).sum())
        row.append(100 * right / len(index) if len(index) else float("nan"))
    return row
