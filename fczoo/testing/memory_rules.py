"""What every method keeps whose clients keep images."""

import torch

from fczoo.testing.subject import Subject, need_same
from fczoo.testing.trials import need


def exemplars_are_the_clients_own(subject: Subject) -> None:
    """What a client keeps are positions of its own images, each once, and no more than ``memory`` says."""
    run, name = subject.run(), subject.name
    key = subject.method.training().exemplars
    if not key:
        return
    owned: dict[int, set[int]] = {}
    for client in (client for call in run.calls for client in call.clients):
        images = torch.cat([client.index, client.earlier]).tolist()
        owned[client.number] = owned.get(client.number, set()) | set(images)
    memories = run.calls[-1].engine.memories
    need(any(len(m.get(key, ())) for m in memories.values()), f"{name} keeps no image under {key}")
    budget = getattr(subject.method, "memory", None)
    for number, memory in memories.items():
        kept = memory[key].tolist()
        need(set(kept) <= owned[number], f"{name}'s client {number} keeps images of others, or none")
        need(len(set(kept)) == len(kept), f"{name}'s client {number} keeps an image twice")
        room = budget is None or len(kept) <= budget
        need(room, f"{name}'s client {number} keeps {len(kept)} images, memory={budget}")


def memories_are_finite(subject: Subject) -> None:
    """What clients remember is finite tensors, which are replaced and never changed in place."""
    run, name = subject.run(), subject.name
    for call in run.calls:
        for number, memory in call.memories.items():
            for key, value in memory.items():
                need(isinstance(value, torch.Tensor), f"{name} remembers {key}, which is no tensor")
                need(value.isfinite().all(), f"{name}'s client {number} remembers {key}, which is not finite")
            before = call.remembered[number]
            sentence = f"{name}'s client {number} changes its memory in place; return a new tree"
            need_same(before, memory, sentence)


def a_task_ends_in_order(subject: Subject) -> None:
    """Clients settle what they keep after a task's rounds; the round on exemplars alone, then the survey."""
    order = {"begin": 0, "train": 1, "conclude": 2, "balanced": 3, "end": 4}
    moments = [(call.ctx.task.index, order[call.moment]) for call in subject.run().calls]
    need(moments == sorted(moments), f"{subject.name} has its clients asked out of order")
