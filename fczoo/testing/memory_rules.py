"""Checks of methods whose clients keep images.

Each function raises AssertionError with one sentence on what is wrong.
"""

import torch

from fczoo.core.task_order import task_exchanges
from fczoo.core.types import Exchange
from fczoo.testing.method_under_test import MethodUnderTest, need_same
from fczoo.testing.runs import need


def exemplars_are_the_clients_own(subject: MethodUnderTest) -> None:
    """Check that exemplars are positions of the client's images, each once, at most ``memory``.

    Args:
        subject: The method and its runs in the toy world.
    """
    run, name = subject.run(), subject.name
    key = subject.method.training().exemplars
    if not key:
        return
    client_images: dict[int, set[int]] = {}
    for client in (client for call in run.calls for client in call.clients):
        images = torch.cat([client.index, client.earlier]).tolist()
        client_images[client.number] = client_images.get(client.number, set()) | set(images)
    memories = run.calls[-1].engine.memories
    need(any(len(m.get(key, ())) for m in memories.values()), f"{name} keeps no image under {key}")
    budget = getattr(subject.method, "memory", None)
    for number, memory in memories.items():
        exemplar_indices = memory[key].tolist()
        need(
            set(exemplar_indices) <= client_images[number],
            f"{name}'s client {number} keeps images of others, or positions that do not exist",
        )
        need(
            len(set(exemplar_indices)) == len(exemplar_indices),
            f"{name}'s client {number} keeps an image twice",
        )
        room = budget is None or len(exemplar_indices) <= budget
        need(
            room, f"{name}'s client {number} keeps {len(exemplar_indices)} images, memory={budget}"
        )


def memories_are_finite(subject: MethodUnderTest) -> None:
    """Check that client memory is finite tensors, which are replaced and never changed in place.

    Args:
        subject: The method and its runs in the toy world.
    """
    run, name = subject.run(), subject.name
    for call in run.calls:
        for number, memory in call.memories.items():
            for key, value in memory.items():
                need(
                    isinstance(value, torch.Tensor),
                    f"{name} remembers {key}, which is not a tensor",
                )
                need(
                    value.isfinite().all(),
                    f"{name}'s client {number} remembers {key}, which is not finite",
                )
            live_memory = call.remembered[number]
            sentence = f"{name}'s client {number} changes its memory in place; return a new tree"
            need_same(live_memory, memory, sentence)


def a_task_ends_in_order(subject: MethodUnderTest) -> None:
    """Check the order at a task's end: rounds, client memory, round on exemplars, statistics.

    Args:
        subject: The method and its runs in the toy world.
    """
    positions = []
    for call in subject.run().calls:
        ctx = call.ctx
        if call.phase == "train" or call.phase == "balanced":
            exchange = Exchange(ctx.task, ctx.round, balanced=ctx.balanced)
        else:
            exchange = Exchange(ctx.task, boundary=call.phase)
        order = list(task_exchanges(subject.method, ctx.task, ctx.rounds))
        positions.append((ctx.task.index, order.index(exchange)))
    need(positions == sorted(positions), f"{subject.name} calls its clients out of order")
