"""Surveys by hand, for methods that are solved from sums."""

from typing import Any

import torch
from torch import Tensor

from fczoo import Batch, Task, Tree
from fczoo.core.payload import Payload
from fczoo.federation.sums import gathered
from helpers_payload import server_context

Images = tuple[Tensor, Tensor]  # features [n, D] and labels [n]


class Wide:
    """Stands in for a backbone of which only the width is asked."""

    def __init__(self, dim: int):
        self.dim = dim


def images(seed: int) -> tuple[Tensor, Tensor]:
    """30 images of five classes."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(30, 4, generator=rng, dtype=torch.float64), torch.arange(30) % 5


def asked(x: Tensor, y: Tensor | None = None, draws: Tensor | None = None) -> Batch:
    """Images of which the method reads features."""
    y = torch.zeros(len(x), dtype=torch.int64) if y is None else y
    drawn = torch.zeros(len(x), 1) if draws is None else draws
    return Batch(torch.empty(len(x), 0), y, torch.ones(len(x), dtype=x.dtype), x, draws=drawn)


def surveyed(method: Any, state: Tree, batches: list[Batch], task: Task) -> Tree:
    """One client's sums."""
    sums = [method.survey("begin", None, state, batch, task) for batch in batches]
    return {name: sum(s[name] for s in sums) for name in sums[0]}


def learned(
    method: Any, parts: list[list[Images]], tasks: list[Task], start: Tree, size: int = 1000
) -> list[Tree]:
    """States after each task; ``parts`` has the images of every client of every task,
    in batches of ``size``.
    """
    states, state = [], start
    for task, clients in zip(tasks, parts, strict=True):
        sent = []
        for x, y in clients:
            batches = [asked(*rows) for rows in zip(x.split(size), y.split(size), strict=True)]
            sent.append(Payload(surveyed(method, state, batches, task)))
        sums = gathered(sent, method.training().separate)
        state = method.absorb("begin", state, sums, server_context(task))
        states.append(state)
    return states
