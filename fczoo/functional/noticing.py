"""Clients that notice by themselves that a new task has begun, and turn images of the last into exemplars.

GLFC (Dong et al., CVPR 2022). A client remembers

* ``exemplar.index``: positions of its exemplars, as in ``exemplars``,
* ``last.index``: its images of earlier tasks, until exemplars are chosen from them,
* ``learned`` [C]: true for the classes of which exemplars have been chosen,
* ``task``: the index of the task at hand; ``entropy``: that of its data, nats,
* ``signal`` and ``noticed``: whether it notices a new task now, or has noticed this one.
"""

import logging
import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.method import Method
from fczoo.core.options import option
from fczoo.core.tree import Tree
from fczoo.core.types import Batch, Context, LocalData
from fczoo.functional.exemplars import NONE, warn_once, with_exemplars
from fczoo.functional.herding import herding

log = logging.getLogger("fczoo")


@dataclass(frozen=True)
class NoticedTasks(Method):
    """Base of methods with such clients."""

    memory: int = option(
        200, "images a client may keep (the paper's 2000, shared by ten clients as in FPPL)", low=0
    )
    detector: Literal["entropy", "oracle"] = option(
        "entropy", "how a client notices a new task: the entropy of its data jumps, or it is told"
    )
    threshold: float = option(
        1.2,
        "jump of the entropy, nats, that means a new task; scaled by ln(classes of the task) / ln(10)",
        low=0,
    )
    repeated_exemplars: bool = option(
        False, "let herding choose the same image again", quirk="conditionWang/FCIL"
    )

    @abstractmethod
    def logits(self, backbone: Backbone, tree: Tree, batch: Batch) -> Tensor:
        """Logits [B, C] over all classes of the run."""

    def prepare(self, backbone: Backbone, data: LocalData, ctx: Context) -> Tree:
        """Notice a new task, and turn the images of the last one into exemplars."""
        start = {
            **no_exemplars(ctx.task.classes, backbone.device),
            "entropy": torch.tensor(0.0),
            "noticed": torch.tensor(False),
        }
        memory = {**start, **ctx.memory}
        signal = int(memory["task"]) != ctx.task.index
        if signal:
            memory = {**move_to_task(memory, ctx.task.index, data), "noticed": torch.tensor(False)}
        if self.detector == "entropy":
            batches = data.batches(data.index)
            logits = [self.logits(backbone, ctx.shared, batch)[:, : ctx.task.stop] for batch in batches]
            entropy = mean_entropy(torch.cat(logits)).cpu()
            # The entropy is at most ln(classes), so the threshold grows with it.
            threshold = self.threshold * math.log(ctx.task.size) / math.log(10)
            signal = bool(entropy - memory["entropy"] > threshold)
            memory["entropy"] = entropy
        memory |= {"signal": torch.tensor(signal), "noticed": memory["noticed"] | signal}
        if ctx.round == ctx.rounds - 1 and not memory["noticed"]:
            warn_once(
                f"{self.name}: a client has not noticed task {ctx.task.index + 1} by its entropy: its memory "
                f"stays as it is (see --set {self.name}.detector=oracle)"
            )
        if signal and len(memory["last.index"]):
            memory = self._store(backbone, data, ctx, memory)
        return memory

    def finish(
        self, backbone: Backbone, train: Tree, sums: Tree, data: LocalData, ctx: Context
    ) -> tuple[Tree, Tree]:
        return ctx.memory, {}

    def _store(self, backbone: Backbone, data: LocalData, ctx: Context, memory: Tree) -> Tree:
        def features(index: Tensor) -> Tensor:
            return torch.cat([self.features(backbone, ctx.shared, batch) for batch in data.batches(index)])

        memory = store_last_task(memory, data, features, self.memory, self.repeated_exemplars)
        learned = int(memory["learned"].sum())
        if 0 < self.memory < learned:
            log.warning(
                "%s.memory=%d has no room for one image of each of the client's %d classes: none is kept",
                self.name,
                self.memory,
                learned,
            )
        return memory


def no_exemplars(classes: int, device: torch.device) -> Tree:
    """The memory of a client before its first task, of a run with ``classes`` classes.

    Its table of learned classes lies on ``device``, as every loss reads it.
    """
    return {
        "task": torch.tensor(-1),
        "learned": torch.zeros(classes, dtype=torch.bool, device=device),
        "exemplar.index": NONE,
        "last.index": NONE,
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

    Images of new classes are chosen by herding of their ``features(index)`` [n, D]. ``budget``: images of
    all classes; ``repeats`` as in ``herding``.
    """
    index = memory["last.index"]
    learned = memory["learned"].clone()
    learned[data.labels(index).to(learned.device)] = True

    def choose(own: Tensor, number: int) -> Tensor:
        return own[herding(features(own), number, repeats)]

    share = budget // int(learned.sum())
    kept = with_exemplars(memory["exemplar.index"], index, data, share, choose)
    return {**memory, "learned": learned, "exemplar.index": kept, "last.index": index[:0]}


def mean_entropy(logits: Tensor) -> Tensor:
    """Mean over images of the entropy of the softmax of logits [n, C], nats."""
    p = logits.softmax(-1)
    return -(p * (p + 1e-5).log()).sum(-1).mean()
