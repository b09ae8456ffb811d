"""Evaluation of a server state on the test images of every task seen so far."""

from collections.abc import Iterator

import torch
from torch import Tensor

from fczoo.core.class_metrics import (
    class_accuracies,
    client_accuracies,
    confusion_matrix,
    confusion_triples,
)
from fczoo.core.errors import FczooError
from fczoo.core.method import Method
from fczoo.core.prediction_metrics import calibration_error, confidences, in_top, task_answers
from fczoo.core.tree import Tree
from fczoo.core.types import Task
from fczoo.federation.batches import view_batches
from fczoo.federation.result import Evaluation
from fczoo.federation.world import World

NAN = float("nan")


@torch.inference_mode()
def masked_logits(
    method: Method, world: World, state: Tree, index: Tensor, task: Task, batch_size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield logits [B, task.stop] and labels [B] of some test images, in one forward per image.

    A class without images at any client has a logit of -infinity, whatever the method gives:
    nothing has been learned of it, and a head that starts at zero would have it beat negative
    logits. Raises TypeError when the method's logits do not cover exactly the classes seen so far,
    and FczooError when a logit of a class with images at a client is NaN.
    """
    store, has_images = world.test, world.classes_with_images(task)
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
        yield logits, batch.y.to(logits.device)


def predictions(
    method: Method, world: World, state: Tree, index: Tensor, task: Task, batch_size: int
) -> tuple[Tensor, Tensor]:
    """Return predictions over all classes seen by ``task``, and labels [n], on the CPU."""
    answers, labels = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=torch.int64)]
    for logits, y in masked_logits(method, world, state, index, task, batch_size):
        answers.append(logits.argmax(1).cpu())
        labels.append(y.cpu())
    return torch.cat(answers), torch.cat(labels)


def evaluate(method: Method, world: World, state: Tree, task: Task, batch_size: int) -> Evaluation:
    """Evaluate a state after ``task``, in one forward per test image of the tasks up to it."""
    gives_logits = method.training().gives_logits
    by_task, top, confident = [], [], []
    for test_task in world.stream.tasks[: task.index + 1]:
        index, rows = _test_index(world, test_task), []
        for logits, y in masked_logits(method, world, state, index, task, batch_size):
            rows.append(torch.stack([y, logits.argmax(1), task_answers(logits, test_task)]).cpu())
            top.append(in_top(logits, y).cpu())
            if gives_logits:
                confident.append(confidences(logits).cpu())
        by_task.append(torch.cat(rows, 1) if rows else torch.empty(3, 0, dtype=torch.int64))
    labels, answers, _ = torch.cat(by_task, 1)
    correct = answers == labels
    triples = confusion_triples(labels.numpy(), answers.numpy(), task.stop)
    class_accuracy = class_accuracies(confusion_matrix(triples, task.stop))
    return Evaluation(
        accuracy=[percent_correct(answers == y) for y, answers, _ in by_task],
        task_aware=[percent_correct(answers == y) for y, _, answers in by_task],
        top5=percent_correct(torch.cat(top)) if top else NAN,
        calibration=_calibration(confident, correct) if gives_logits else None,
        confusion=triples,
        class_accuracy=class_accuracy,
        client_accuracy=_client_accuracies(world, task, class_accuracy),
        next_accuracy=_next_accuracy(method, world, state, task, batch_size),
    )


def accuracy_row(
    method: Method, world: World, state: Tree, task: Task, batch_size: int
) -> list[float]:
    """Return the accuracy in percent on each task up to ``task``; NaN without test images."""
    row = []
    for test_task in world.stream.tasks[: task.index + 1]:
        index = _test_index(world, test_task)
        answers, labels = predictions(method, world, state, index, task, batch_size)
        row.append(percent_correct(answers == labels))
    return row


def percent_correct(correct: Tensor) -> float:
    """Return the share of right answers [n] in percent; NaN without any."""
    return 100 * int(correct.sum()) / len(correct) if len(correct) else NAN


def _client_accuracies(world: World, task: Task, class_accuracy: list[float]) -> list[float | None]:
    """Return the accuracy per client; empty where the server does not know the clients' classes."""
    if not world.sees_clients:
        return []
    owners, labels = world.images_by_client(task)
    return client_accuracies(class_accuracy, owners, labels, world.partition.clients)


def _calibration(confident: list[Tensor], correct: Tensor) -> float:
    return calibration_error(torch.cat(confident), correct) if confident else NAN


def _next_accuracy(
    method: Method, world: World, state: Tree, task: Task, batch_size: int
) -> float | None:
    """Return the accuracy on the task after ``task``; None if one of its classes is new."""
    following = world.stream.tasks[task.index + 1 : task.index + 2]
    if not following or following[0].stop > task.stop:
        return None
    index = _test_index(world, following[0])
    known = world.classes_with_images(task)
    if not known[world.test.labels[index.to(world.test.labels.device)].cpu()].all():
        return None
    answers, labels = predictions(method, world, state, index, task, batch_size)
    return percent_correct(answers == labels) if len(labels) else None


def _test_index(world: World, task: Task) -> Tensor:
    """Return the positions of a task's test images."""
    return torch.from_numpy(world.stream.positions(world.stream.test, task))
