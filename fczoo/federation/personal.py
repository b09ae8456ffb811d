"""Personal models: the global model after a few epochs of fine-tuning at each client."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from fczoo.core.class_metrics import (
    class_accuracies,
    client_accuracies,
    confusion_matrix,
    confusion_triples,
)
from fczoo.core.protocols import HasClientMemory
from fczoo.core.tree import Tree
from fczoo.core.types import Context
from fczoo.federation.batches import Client
from fczoo.federation.checkpoint import ClientState
from fczoo.federation.client import ClientRuntime
from fczoo.federation.evaluate import predictions
from fczoo.federation.local_rules import ControlVariates
from fczoo.federation.world import World


def trained_copy(runtime: ClientRuntime, client: Client, state: ClientState, ctx: Context) -> Tree:
    """Return the tensors that a client has trained from the broadcast; nothing is changed.

    The method's own loss, optimizers and client memory are used; a rule of ``--local``, which
    pulls clients together, is not.

    Args:
        runtime: Runtime of the clients, with the epochs of its plan.
        client: The client.
        state: Client state after the last exchange.
        ctx: Context of the training, with the broadcast.
    """
    method, memory = runtime.method, dict(state.memories.get(client.number, {}))
    if isinstance(method, HasClientMemory):
        images = runtime.images_of(client)
        with torch.no_grad():
            ctx = replace(ctx, memory=memory)
            memory = dict(method.before_training(runtime.backbone, images, ctx))
        ctx = replace(ctx, memory=memory)
    index = runtime.training_indices(client, memory, ctx)
    teacher_outputs = dict(state.taught.get(client.number, {}))
    start = runtime.start_of(ctx.shared, memory)
    learner = runtime.learner(start, client, index, teacher_outputs, ctx)
    if learner.leaves and learner.queue:
        runtime.steps([learner], ControlVariates(), ctx)
    return learner.trained_tensors


def personal_accuracies(
    world: World,
    runtime: ClientRuntime,
    server_state: Tree,
    client_state: ClientState,
    clients: dict[int, Client],
    ctx: Context,
    before: list[float | None],
) -> list[float | None]:
    """Measure each client's fine-tuned copy on test images with the client's class mix.

    Args:
        world: Data, partition and backbone.
        runtime: Runtime of the clients, with the epochs of fine-tuning in its plan.
        server_state: The server's state, in which the trained tensors are replaced.
        client_state: Client state after the last exchange.
        clients: Clients with images of the last task by number; others keep the global model.
        ctx: Context of the training, with the broadcast.
        before: Accuracy of the global model for each client.

    Returns:
        One accuracy per client in percent; None where ``before`` has none.
    """
    accuracies = list(before)
    for number, labels in _labels_by_client(world, ctx):
        if number in clients and before[number] is not None:
            trained = trained_copy(runtime, clients[number], client_state, ctx)
            model = {**server_state, **trained}
            own = number if runtime.method.training().own_models else None
            accuracies[number] = _accuracy(world, runtime, model, labels, ctx, own)
    return accuracies


def _labels_by_client(world: World, ctx: Context) -> Iterator[tuple[int, np.ndarray]]:
    """Yield each client with the labels of its training images of all tasks."""
    owners, labels = world.images_by_client(ctx.task)
    numbers, starts = np.unique(owners, return_index=True)  # owners are in order
    yield from zip(numbers.tolist(), np.split(labels, starts[1:]), strict=True)


def _accuracy(
    world: World,
    runtime: ClientRuntime,
    state: Tree,
    labels: np.ndarray,
    ctx: Context,
    client: int | None,
) -> float | None:
    """Return the accuracy of a state with a class mix; only images of its classes are tested.

    With ``client`` the answer is one of that client's classes.
    """
    task, pass_size = ctx.task, runtime.plan.pass_size
    index = torch.from_numpy(np.flatnonzero(np.isin(world.stream.test.labels, labels)))
    answers, truth = predictions(runtime.method, world, state, index, task, pass_size, client)
    triples = confusion_triples(truth.numpy(), answers.numpy(), task.stop)
    accuracy = class_accuracies(confusion_matrix(triples, task.stop))
    return client_accuracies(accuracy, np.zeros_like(labels), labels, 1)[0]
