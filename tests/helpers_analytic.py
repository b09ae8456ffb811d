"""Client statistics computed by hand, for methods that are solved from sums."""

from typing import Any

import torch
from torch import Tensor

from fczoo import Batch, Context, Task, Tree
from fczoo.core.payload import Payload
from fczoo.federation.uplink import sum_or_stack
from helpers_payload import server_context

Images = tuple[Tensor, Tensor]  # features [n, D] and labels [n]


class Wide:
    """A replacement for a backbone that has only a width."""

    def __init__(self, dim: int):
        self.dim = dim


def images(seed: int) -> tuple[Tensor, Tensor]:
    """Return 30 images of five classes.

    Args:
        seed: Seed of the features.

    Returns:
        Features [30, 4] in float64 and labels [30].
    """
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(30, 4, generator=rng, dtype=torch.float64), torch.arange(30) % 5


def query_batch(x: Tensor, y: Tensor | None = None, draws: Tensor | None = None) -> Batch:
    """Make a batch of images whose features a method reads.

    Args:
        x: Features [n, D].
        y: Labels [n]; zeros without them.
        draws: Random numbers [n, columns]; one column of zeros without them.

    Returns:
        The batch; every image has weight 1.
    """
    y = torch.zeros(len(x), dtype=torch.int64) if y is None else y
    draw_rows = torch.zeros(len(x), 1) if draws is None else draws
    return Batch(torch.empty(len(x), 0), y, torch.ones(len(x), dtype=x.dtype), x, draws=draw_rows)


def survey_sums(method: Any, state: Tree, batches: list[Batch], task: Task) -> Tree:
    """Return the sums that one client surveys over its batches."""
    ctx = Context(task, 0, 1, state)
    sums = [method.collect("task_start", None, state, batch, ctx) for batch in batches]
    return {name: sum(s[name] for s in sums) for name in sums[0]}


def states_after_tasks(
    method: Any, parts: list[list[Images]], tasks: list[Task], start: Tree, size: int = 1000
) -> list[Tree]:
    """Return the states after each task.

    Args:
        method: An analytic method.
        parts: The images of every client of every task.
        tasks: The tasks, one per entry of ``parts``.
        start: The state before the first task.
        size: Images per batch.

    Returns:
        One state per task.
    """
    states, state = [], start
    for task, clients in zip(tasks, parts, strict=True):
        payloads = []
        for x, y in clients:
            batches = [
                query_batch(*rows) for rows in zip(x.split(size), y.split(size), strict=True)
            ]
            payloads.append(Payload(survey_sums(method, state, batches, task)))
        sums = sum_or_stack(payloads, method.training().per_client_statistics)
        state = method.update_from("task_start", state, sums, server_context(task))
        states.append(state)
    return states
