"""Evaluation of a server state on the test images of every task seen so far.

Personal models are copies of the global model after a few epochs of fine-tuning at each client. A
logit of -infinity or of the lowest number of its type marks a class that a method excludes; such a
class is never predicted.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
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
from fczoo.core.tree import Tree
from fczoo.core.types import Context, HasClientMemory, Task
from fczoo.federation.batches import Client, view_batches
from fczoo.federation.checkpoint import ClientState
from fczoo.federation.client_task_accuracy import client_task_accuracies
from fczoo.federation.local_rules import ControlVariates
from fczoo.federation.local_trainer import LocalTrainer
from fczoo.federation.result import Evaluation
from fczoo.federation.scenario import Scenario

TOP = 5  # predictions per image that count for top-5
BINS = 15  # of the calibration error (Guo et al., 2017)
NAN = float("nan")


def task_predictions(logits: Tensor, classes: Tensor) -> Tensor:
    """Compute argmax_{c in task} z_c: the predictions if the task of each image is known.

    Args:
        logits: Logits or scores z [B, C] over the classes seen.
        classes: First class of each image's task, and the one after its last [B, 2].

    Returns:
        Classes [B]; -1 where the method excludes all classes of the task.
    """
    start, stop = classes[:, :1], classes[:, 1:]
    c = torch.arange(logits.shape[1], device=logits.device)
    best = logits.masked_fill((c < start) | (c >= stop), -torch.inf).max(1)
    return torch.where(best.values > torch.finfo(logits.dtype).min, best.indices, -1)


def is_in_top(logits: Tensor, labels: Tensor, k: int = TOP) -> Tensor:
    """Compute whether the label is among the k classes with the highest logits.

    Among equal logits the lower class comes first, as in argmax, so that k = 1 gives the accuracy.

    Args:
        logits: Logits or scores [B, C] over the classes seen.
        labels: True classes [B].
        k: Number of predictions per image.

    Returns:
        Booleans [B].
    """
    of_label = logits.gather(1, labels[:, None])
    lower = torch.arange(logits.shape[1], device=logits.device) < labels[:, None]
    ahead = (logits > of_label) | ((logits == of_label) & lower)
    return (ahead.sum(1) < k) & (of_label[:, 0] > torch.finfo(logits.dtype).min)


def confidences(logits: Tensor) -> Tensor:
    """Compute max_c softmax(z)_c, the probability of the prediction.

    Args:
        logits: Logits z [B, C] over the classes seen.

    Returns:
        Probabilities [B], at least in float32.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return logits.to(dtype).softmax(1).amax(1)


def calibration_error(confidence: Tensor, correct: Tensor, bins: int = BINS) -> float:
    """Compute ECE = sum_b n_b / n |acc_b - conf_b| over bins of equal width (Guo et al., 2017).

    Bin b = 1, ..., B holds the n_b images with confidence in ((b - 1) / B, b / B]; acc_b is the
    share of correct predictions among them, conf_b their mean confidence.

    Args:
        confidence: Probabilities of the predictions [n], above 0.
        correct: Whether each prediction is correct [n].
        bins: Number B of bins.

    Returns:
        ECE in percentage points; NaN without images.
    """
    if not len(confidence):
        return NAN
    confidence = confidence.double()
    index = (confidence * bins).ceil().long().clamp(1, bins) - 1
    gap = torch.zeros(bins, dtype=torch.float64)
    gap.index_add_(0, index, correct.double() - confidence)  # n_b (acc_b - conf_b)
    return 100 * float(gap.abs().sum()) / len(confidence)


@torch.inference_mode()
def masked_logits(
    method: Method,
    scenario: Scenario,
    state: Tree,
    index: Tensor,
    task: Task,
    batch_size: int,
    client: int | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield logits [B, task.stop] and labels [B] of some test images, in one forward per image.

    A class without images at any client, or at ``client``, gets a logit of -infinity: nothing has
    been learned about it, and the zero logit of an untrained head would beat negative logits.
    Raises TypeError if the method's logits do not cover exactly the classes seen so far, and
    FczooError if a logit of a class with images at a client is NaN.
    """
    store = scenario.test
    has_images = (
        scenario.classes_with_images(task) if client is None else scenario.classes_of(client, task)
    )
    for batch in view_batches(method, store, index, batch_size):
        logits = method.predict(store.backbone, state, batch, task)
        if logits.shape != (len(batch.y), task.stop):
            raise TypeError(
                f"{method.name}.predict returned shape {tuple(logits.shape)}, expected "
                f"{(len(batch.y), task.stop)}: one logit for each class seen"
            )
        logits = logits.masked_fill(~has_images.to(logits.device), -torch.inf)
        if logits.isnan().any():  # which argmax would count as an answer
            problem = f"{method.name}.predict returned NaN after task {task.index + 1}"
            raise FczooError(
                f"{problem}; lower its learning rates with --set, or look for a division by zero"
            )
        yield logits, batch.y.to(logits.device)


def predictions(
    method: Method,
    scenario: Scenario,
    state: Tree,
    index: Tensor,
    task: Task,
    batch_size: int,
    client: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return predictions over all classes seen by ``task``, and labels [n], on the CPU."""
    predicted, labels = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=torch.int64)]
    for logits, y in masked_logits(method, scenario, state, index, task, batch_size, client):
        predicted.append(logits.argmax(1).cpu())
        labels.append(y.cpu())
    return torch.cat(predicted), torch.cat(labels)


def evaluate(
    method: Method,
    scenario: Scenario,
    models: Mapping[int | None, Tree],
    task: Task,
    batch_size: int,
) -> Evaluation:
    """Evaluate models after ``task``, in one forward per test image of the tasks up to it.

    ``models`` has the state of the server under None, or the clients' own models by their numbers:
    each is tested on all images, with predictions among the client's classes. Accuracies are the
    means over these models.
    """
    gives_logits, tasks = method.training().gives_logits, scenario.stream.tasks[: task.index + 1]
    index, counts = _test_index(scenario, tasks)
    classes = torch.tensor([[test_task.start, test_task.stop] for test_task in tasks])
    # all tasks share the batches, so that many small tasks cost no more than few large ones
    batch_classes = classes.repeat_interleave(torch.tensor(counts), 0).split(batch_size)
    top, confidence, of_model = [], [], dict[int | None, Tensor]()
    for client, model in models.items():
        rows = [torch.empty(3, 0, dtype=torch.int64)]
        batches = masked_logits(method, scenario, model, index, task, batch_size, client)
        for (logits, y), bounds in zip(batches, batch_classes, strict=False):  # may have no image
            aware = task_predictions(logits, bounds.to(logits.device))
            rows.append(torch.stack([y, logits.argmax(1), aware]).cpu())
            top.append(is_in_top(logits, y).cpu())
            if gives_logits:
                confidence.append(confidences(logits).cpu())
        of_model[client] = torch.cat(rows, 1)
    labels, predicted, aware = torch.stack([*of_model.values()], 1)  # [models, images] each
    triples = _confusion(torch.cat([*of_model.values()], 1), task)
    class_accuracy = class_accuracies(confusion_matrix(triples, task.stop))
    by_model = {
        client: class_accuracies(confusion_matrix(_confusion(rows, task), task.stop))
        for client, rows in of_model.items()
    }
    return Evaluation(
        accuracy=_task_accuracies(predicted == labels, counts),
        task_aware=_task_accuracies(aware == labels, counts),
        top5=percent_correct(torch.cat(top)) if top else NAN,
        calibration=_calibration(confidence, predicted == labels) if gives_logits else None,
        confusion=triples,
        class_accuracy=class_accuracy,
        client_accuracy=_client_accuracies(scenario, task, by_model),
        client_task_accuracy=client_task_accuracies(scenario, task, by_model),
        next_accuracy=_next_accuracy(method, scenario, models, task, batch_size),
    )


def _confusion(rows: Tensor, task: Task) -> list[list[int]]:
    """Return the confusion of labels and predictions, the first two rows of [3, n]."""
    labels, predicted, _ = rows
    return confusion_triples(labels.numpy(), predicted.numpy(), task.stop)


def accuracy_row(
    method: Method,
    scenario: Scenario,
    models: Mapping[int | None, Tree],
    task: Task,
    batch_size: int,
) -> list[float]:
    """Return the accuracy of models in percent on each task up to ``task``; NaN without images.

    ``models`` are those of ``evaluate``.
    """
    index, counts = _test_index(scenario, scenario.stream.tasks[: task.index + 1])
    correct = _correct_predictions(method, scenario, models, index, task, batch_size)
    return _task_accuracies(correct, counts)


def _correct_predictions(
    method: Method,
    scenario: Scenario,
    models: Mapping[int | None, Tree],
    index: Tensor,
    task: Task,
    batch_size: int,
) -> Tensor:
    """Return whether each model predicts the class of each image correctly [models, n]."""
    correct = []
    for client, model in models.items():
        predicted, labels = predictions(method, scenario, model, index, task, batch_size, client)
        correct.append(predicted == labels)
    return torch.stack(correct)


def _task_accuracies(correct: Tensor, counts: Sequence[int]) -> list[float]:
    """Return the share of correct predictions [models, n] per task in percent, given its images."""
    return [percent_correct(part) for part in correct.split([*counts], 1)]


def percent_correct(correct: Tensor) -> float:
    """Return the share of correct predictions in percent; NaN without any."""
    return 100 * int(correct.sum()) / correct.numel() if correct.numel() else NAN


def _client_accuracies(
    scenario: Scenario, task: Task, class_accuracy: Mapping[int | None, list[float]]
) -> list[float | None]:
    """Return the accuracy per client, of the global model (None) or its own model.

    It is empty if the server does not know the clients' classes.
    """
    if not scenario.sees_clients:
        return []
    (owners, labels), clients = scenario.images_by_client(task), scenario.partition.clients
    of_model = {
        client: client_accuracies(accuracy, owners, labels, clients)
        for client, accuracy in class_accuracy.items()
    }
    if None in of_model:
        return of_model[None]
    return [of_model[client][client] if client in of_model else None for client in range(clients)]


def _calibration(confidence: list[Tensor], correct: Tensor) -> float:
    return calibration_error(torch.cat(confidence), correct.flatten()) if confidence else NAN


def _next_accuracy(
    method: Method,
    scenario: Scenario,
    models: Mapping[int | None, Tree],
    task: Task,
    batch_size: int,
) -> float | None:
    """Return the accuracy on the task after ``task``; None if one of its classes is new."""
    following = scenario.stream.tasks[task.index + 1 : task.index + 2]
    if not following or following[0].stop > task.stop:
        return None
    index, _ = _test_index(scenario, following)
    classes_seen = scenario.classes_with_images(task)
    if not classes_seen[scenario.test.labels[index.to(scenario.test.labels.device)].cpu()].all():
        return None
    accuracy = percent_correct(
        _correct_predictions(method, scenario, models, index, task, batch_size)
    )
    return None if math.isnan(accuracy) else accuracy


def _test_index(scenario: Scenario, tasks: Sequence[Task]) -> tuple[Tensor, list[int]]:
    """Return the positions of the tasks' test images, and their number per task."""
    positions = [scenario.stream.positions(scenario.stream.test, task) for task in tasks]
    return torch.from_numpy(np.concatenate(positions)), [len(part) for part in positions]


def trained_copy(trainer: LocalTrainer, client: Client, state: ClientState, ctx: Context) -> Tree:
    """Return the tensors that a client has trained from the broadcast; nothing is changed.

    The method's own loss, optimizers and client memory are used; a rule of ``--local``, which
    pulls clients together, is not.

    Args:
        trainer: Trainer of the clients, with the epochs of its plan.
        client: The client.
        state: Client state after the last exchange.
        ctx: Context of the training, with the broadcast.
    """
    method, memory = trainer.method, dict(state.memories.get(client.number, {}))
    if isinstance(method, HasClientMemory):
        images = trainer.images_of(client)
        with torch.no_grad():
            ctx = replace(ctx, memory=memory)
            memory = dict(method.before_training(trainer.backbone, images, ctx))
        ctx = replace(ctx, memory=memory)
    index = trainer.training_indices(client, memory, ctx)
    teacher_outputs = dict(state.teacher_outputs.get(client.number, {}))
    start = trainer.start_of(ctx.shared, memory)
    learner = trainer.learner(start, client, index, teacher_outputs, ctx)
    if learner.leaves and learner.queue:
        trainer.steps([learner], ControlVariates(), ctx)
    return learner.trained_tensors


def personal_accuracies(
    scenario: Scenario,
    trainer: LocalTrainer,
    server_state: Tree,
    client_state: ClientState,
    clients: dict[int, Client],
    ctx: Context,
    before: list[float | None],
) -> list[float | None]:
    """Measure each client's fine-tuned copy on test images with the client's class mix.

    Args:
        scenario: Data, partition and backbone.
        trainer: Trainer of the clients, with the epochs of fine-tuning in its plan.
        server_state: The server's state, in which the trained tensors are replaced.
        client_state: Client state after the last exchange.
        clients: Clients with images of the last task by number; others keep the global model.
        ctx: Context of the training, with the broadcast.
        before: Accuracy of the global model for each client.

    Returns:
        One accuracy per client in percent; None if ``before`` has none.
    """
    accuracies = list(before)
    for number, labels in _labels_by_client(scenario, ctx):
        if number in clients and before[number] is not None:
            copy = trained_copy(trainer, clients[number], client_state, ctx)
            model = {**server_state, **copy}
            own = number if trainer.method.training().own_models else None
            accuracies[number] = _accuracy(scenario, trainer, model, labels, ctx, own)
    return accuracies


def _labels_by_client(scenario: Scenario, ctx: Context) -> Iterator[tuple[int, np.ndarray]]:
    """Yield each client with the labels of its training images of all tasks."""
    owners, labels = scenario.images_by_client(ctx.task)
    numbers, starts = np.unique(owners, return_index=True)  # owners are in order
    yield from zip(numbers.tolist(), np.split(labels, starts[1:]), strict=True)


def _accuracy(
    scenario: Scenario,
    trainer: LocalTrainer,
    state: Tree,
    labels: np.ndarray,
    ctx: Context,
    client: int | None,
) -> float | None:
    """Return the accuracy of a state on test images with the class mix of ``labels``.

    Only images of these classes are tested. With ``client`` the predictions are among its classes.
    """
    task, pass_size = ctx.task, trainer.plan.pass_size
    index = torch.from_numpy(np.flatnonzero(np.isin(scenario.stream.test.labels, labels)))
    predicted, truth = predictions(trainer.method, scenario, state, index, task, pass_size, client)
    triples = confusion_triples(truth.numpy(), predicted.numpy(), task.stop)
    accuracy = class_accuracies(confusion_matrix(triples, task.stop))
    return client_accuracies(accuracy, np.zeros_like(labels), labels, 1)[0]
