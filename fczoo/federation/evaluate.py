"""Evaluation of a server state on the test images of every task seen so far."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType

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
    method: Method,
    world: World,
    state: Tree,
    index: Tensor,
    task: Task,
    batch_size: int,
    client: int | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield logits [B, task.stop] and labels [B] of some test images, in one forward per image.

    A class without images at any client, or at ``client``, has a logit of -infinity, whatever the
    method gives: nothing has been learned of it, and a head that starts at zero would have it beat
    negative logits. Raises TypeError when the method's logits do not cover exactly the classes seen so far,
    and FczooError when a logit of a class with images at a client is NaN.
    """
    store = world.test
    has_images = (
        world.classes_with_images(task) if client is None else world.classes_of(client, task)
    )
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
    method: Method,
    world: World,
    state: Tree,
    index: Tensor,
    task: Task,
    batch_size: int,
    client: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return predictions over all classes seen by ``task``, and labels [n], on the CPU."""
    answers, labels = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=torch.int64)]
    for logits, y in masked_logits(method, world, state, index, task, batch_size, client):
        answers.append(logits.argmax(1).cpu())
        labels.append(y.cpu())
    return torch.cat(answers), torch.cat(labels)


def evaluate(
    method: Method,
    world: World,
    state: Tree,
    task: Task,
    batch_size: int,
    own_models: Mapping[int, Tree] = MappingProxyType({}),
) -> Evaluation:
    """Evaluate a state after ``task``, in one forward per test image of the tasks up to it.

    ``own_models`` of clients take its place: each is tested on all images with an answer among the
    client's classes. Accuracies are the means over these models.
    """
    gives_logits = method.training().gives_logits
    top, confident, of_model = [], [], dict[int | None, list[Tensor]]()
    models: Mapping[int | None, Tree] = dict(own_models.items()) or {None: state}
    for client, model in models.items():
        of_model[client] = []
        for test_task in world.stream.tasks[: task.index + 1]:
            index, rows = _test_index(world, test_task), [torch.empty(3, 0, dtype=torch.int64)]
            for logits, y in masked_logits(method, world, model, index, task, batch_size, client):
                answers = torch.stack([y, logits.argmax(1), task_answers(logits, test_task)])
                rows.append(answers.cpu())
                top.append(in_top(logits, y).cpu())
                if gives_logits:
                    confident.append(confidences(logits).cpu())
            of_model[client].append(torch.cat(rows, 1))
    by_task = [torch.cat(parts, 1) for parts in zip(*of_model.values(), strict=True)]
    triples = _confusion(list(chain(*of_model.values())), task)
    labels, answers, _ = torch.cat([*chain(*of_model.values())], 1)
    class_accuracy = class_accuracies(confusion_matrix(triples, task.stop))
    return Evaluation(
        accuracy=[percent_correct(answers == y) for y, answers, _ in by_task],
        task_aware=[percent_correct(answers == y) for y, _, answers in by_task],
        top5=percent_correct(torch.cat(top)) if top else NAN,
        calibration=_calibration(confident, answers == labels) if gives_logits else None,
        confusion=triples,
        class_accuracy=class_accuracy,
        client_accuracy=_client_accuracies(
            world,
            task,
            {
                client: class_accuracies(confusion_matrix(_confusion(parts, task), task.stop))
                for client, parts in of_model.items()
            },
        ),
        next_accuracy=_next_accuracy(method, world, models, task, batch_size),
    )


def _confusion(parts: Sequence[Tensor], task: Task) -> list[list[int]]:
    """Return the confusion of labels and answers, the first two rows of each part [3, n]."""
    labels, answers, _ = torch.cat([*parts], 1)
    return confusion_triples(labels.numpy(), answers.numpy(), task.stop)


def accuracy_row(
    method: Method,
    world: World,
    state: Tree,
    task: Task,
    batch_size: int,
    own_models: Mapping[int, Tree] = MappingProxyType({}),
) -> list[float]:
    """Return the accuracy in percent on each task up to ``task``; NaN without test images.

    ``own_models`` of clients take the place of the state, as in ``evaluate``.
    """
    models: Mapping[int | None, Tree] = dict(own_models.items()) or {None: state}
    return [
        _mean_accuracy(method, world, models, _test_index(world, test_task), task, batch_size)
        for test_task in world.stream.tasks[: task.index + 1]
    ]


def _mean_accuracy(
    method: Method,
    world: World,
    models: Mapping[int | None, Tree],
    index: Tensor,
    task: Task,
    batch_size: int,
) -> float:
    """Return the share of right answers of all models on some images, in percent."""
    correct = []
    for client, model in models.items():
        answers, labels = predictions(method, world, model, index, task, batch_size, client)
        correct.append(answers == labels)
    return percent_correct(torch.cat(correct))


def percent_correct(correct: Tensor) -> float:
    """Return the share of right answers [n] in percent; NaN without any."""
    return 100 * int(correct.sum()) / len(correct) if len(correct) else NAN


def _client_accuracies(
    world: World, task: Task, class_accuracy: Mapping[int | None, list[float]]
) -> list[float | None]:
    """Return the accuracy per client, of the global model (None) or of its own.

    It is empty where the server does not know the clients' classes.
    """
    if not world.sees_clients:
        return []
    (owners, labels), clients = world.images_by_client(task), world.partition.clients
    of_model = {
        client: client_accuracies(accuracy, owners, labels, clients)
        for client, accuracy in class_accuracy.items()
    }
    if None in of_model:
        return of_model[None]
    return [of_model[client][client] if client in of_model else None for client in range(clients)]


def _calibration(confident: list[Tensor], correct: Tensor) -> float:
    return calibration_error(torch.cat(confident), correct) if confident else NAN


def _next_accuracy(
    method: Method,
    world: World,
    models: Mapping[int | None, Tree],
    task: Task,
    batch_size: int,
) -> float | None:
    """Return the accuracy on the task after ``task``; None if one of its classes is new."""
    following = world.stream.tasks[task.index + 1 : task.index + 2]
    if not following or following[0].stop > task.stop:
        return None
    index = _test_index(world, following[0])
    known = world.classes_with_images(task)
    if not known[world.test.labels[index.to(world.test.labels.device)].cpu()].all():
        return None
    accuracy = _mean_accuracy(method, world, models, index, task, batch_size)
    return None if math.isnan(accuracy) else accuracy


def _test_index(world: World, task: Task) -> Tensor:
    """Return the positions of a task's test images."""
    return torch.from_numpy(world.stream.positions(world.stream.test, task))
