"""The memory of a client that keeps some images of its finished tasks, as positions in its training data.

``exemplar.index``: the images that it keeps. ``last.index``: those of earlier tasks, until exemplars are
chosen from them. ``learned`` [C]: true for the classes of which exemplars have been chosen. ``task``: index
of the task at hand.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from fczoo.core.tree import Tree
from fczoo.core.types import LocalData
from fczoo.functional.herding import herding


def no_exemplars(classes: int, device: torch.device) -> Tree:
    """The memory of a client before its first task, of a run with ``classes`` classes.

    Its table of learned classes lies on ``device``, as every loss reads it.
    """
    empty = torch.empty(0, dtype=torch.int64)
    return {
        "task": torch.tensor(-1),
        "learned": torch.zeros(classes, dtype=torch.bool, device=device),
        "exemplar.index": empty,
        "last.index": empty,
    }


def move_to_task(memory: Tree, task: int, data: LocalData) -> Tree:
    """The memory at the start of a task: images of earlier classes without exemplars wait in ``last.index``.

    Those of tasks in which the client was never drawn, too.
    """
    learned = memory["learned"].cpu()[data.labels(data.earlier).cpu()]
    return {**memory, "task": torch.tensor(task), "last.index": data.earlier[~learned]}


def store_last_task(
    memory: Tree, data: LocalData, features: Callable[[Tensor], Tensor], budget: int, repeats: bool = False
) -> Tree:
    """The memory with exemplars of the last task; every learned class has an equal share of the ``budget``.

    Lists of earlier classes are shortened from their end, images of new classes are chosen by herding of
    their ``features(index)`` [n, D]. ``budget``: images of all classes; ``repeats`` as in ``herding``.
    """
    index, kept = memory["last.index"], memory["exemplar.index"]
    labels, old = data.labels(index).cpu(), data.labels(kept).cpu()
    learned = memory["learned"].clone()
    learned[labels.to(learned.device)] = True
    share = budget // int(learned.sum())
    lists = [kept[old == c][:share] for c in old.unique()]
    for c in labels.unique():
        own = index[labels == c]
        lists.append(own[herding(features(own), share, repeats)])
    return {**memory, "learned": learned, "exemplar.index": torch.cat(lists), "last.index": index[:0]}


def mean_entropy(logits: Tensor) -> Tensor:
    """Mean over images of the entropy of the softmax of logits [n, C], nats."""
    p = logits.softmax(-1)
    return -(p * (p + 1e-5).log()).sum(-1).mean()
