"""Tasks of each client when clients are in different tasks at a time, and their accuracies."""

from collections.abc import Mapping

import numpy as np

from fczoo.core.class_metrics import client_accuracies
from fczoo.core.types import Task
from fczoo.data.client_stages import uses_stages
from fczoo.federation.scenario import Scenario


def client_tasks(scenario: Scenario) -> list[list[int]]:
    """Return client, first and last stage of each task of each client; empty without stages.

    They are in order of first stages, then of clients. A task without images is left out.

    Args:
        scenario: Data and partition, by stage.
    """
    if not uses_stages(scenario.settings.moving, scenario.settings.task_order):
        return []
    tasks: list[list[int]] = []
    latest: dict[int, tuple[np.ndarray, list[int]]] = {}  # client -> its images and its entry
    for stage, clients in enumerate(scenario.partition.tasks):
        for client, images in enumerate(clients):
            earlier_images, entry = latest.get(client, (np.empty(0, np.int64), []))
            if len(images) and not np.array_equal(images, earlier_images):
                entry = [client, stage, stage]
                tasks.append(entry)
            if entry and len(images):
                entry[2] = stage
            latest[client] = images, entry
    return tasks


def client_task_accuracies(
    scenario: Scenario, task: Task, class_accuracy: Mapping[int | None, list[float]]
) -> list[float | None]:
    """Return the accuracy on test images with the class mix of each client-task that has begun.

    Args:
        scenario: Data and partition, by stage.
        task: The stage after which the model was tested.
        class_accuracy: Accuracy per class of the global model (None), or of each client's own.

    Returns:
        Accuracies in percent in the order of ``client_tasks``; None without tested classes, or
            if the client has no model yet.
    """
    accuracies: list[float | None] = []
    for client, first, _ in client_tasks(scenario):
        if first > task.index:
            break
        of_model = class_accuracy.get(client if None not in class_accuracy else None)
        index = scenario.clients(scenario.stream.tasks[first], idle=True)[client].index
        labels = scenario.stream.train.labels[index.numpy()]
        owners = np.zeros_like(labels)
        value = client_accuracies(of_model, owners, labels, 1)[0] if of_model else None
        accuracies.append(value)
    return accuracies
