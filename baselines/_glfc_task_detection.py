"""Task detection of GLFC: clients detect new tasks and choose exemplars of the last task.

Dong et al., CVPR 2022. The memory of a client holds

* ``exemplar.index``: positions of its exemplars, as in ``exemplars``,
* ``last.index``: images of earlier tasks of which no exemplars are chosen yet,
* ``learned`` [C]: true for classes whose exemplars have been chosen,
* ``task``: index of the current task; ``entropy``: mean entropy of its data, nats,
* ``signal``: true if it detects a new task in this round; ``noticed``: true once it has.
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
from fczoo.functional.exemplars import NO_POSITIONS, herding, update_exemplars, warn_once

log = logging.getLogger("fczoo")


@dataclass(frozen=True)
class TaskDetection(Method):
    """Base of methods whose clients detect new tasks."""

    memory: int = option(
        200,
        "maximum number of exemplars per client (200: the usual 2000, divided among ten clients "
        "as in FPPL)",
        low=0,
    )
    detector: Literal["entropy", "oracle"] = option(
        "entropy",
        "how a client detects a new task: entropy, the entropy of the model's outputs on its "
        "data rises; oracle, the run notifies it",
    )
    threshold: float = option(
        1.2,
        "rise of the entropy, in nats, that signals a new task; it is scaled by ln(classes of "
        "the task) / ln(10)",
        low=0,
    )
    repeated_exemplars: bool = option(
        False, "allow herding to choose the same image more than once", quirk="conditionWang/FCIL"
    )

    @abstractmethod
    def logits(self, backbone: Backbone, tree: Tree, batch: Batch) -> Tensor:
        """Compute logits over all classes of the run.

        Args:
            backbone: The frozen backbone.
            tree: Tensors of the model.
            batch: Images of a client.

        Returns:
            Logits [B, C].
        """

    def before_training(self, backbone: Backbone, data: LocalData, ctx: Context) -> Tree:
        """Detect a new task, and then choose exemplars of the last one.

        Args:
            backbone: The frozen backbone.
            data: Local data of the client.
            ctx: Memory of the client, broadcast tensors, task and round.

        Returns:
            The new memory.
        """
        start = {
            **initial_memory(ctx.task.classes, backbone.device),
            "entropy": torch.tensor(0.0),
            "noticed": torch.tensor(False),
        }
        memory = {**start, **ctx.memory}
        # Oracle: the run notifies the client of the new task.
        signal = int(memory["task"]) != ctx.task.index
        if signal:
            memory = {**move_to_task(memory, ctx.task.index, data), "noticed": torch.tensor(False)}
        # Entropy detector: H = mean entropy of the current data under the received model. A rise of
        # H by more than the threshold signals a new task.
        if self.detector == "entropy":
            batches = data.batches(data.index)
            logits = [
                self.logits(backbone, ctx.shared, batch)[:, : ctx.task.stop] for batch in batches
            ]
            entropy = mean_entropy(torch.cat(logits)).cpu()
            # H <= ln(classes): scale the threshold, set for ten classes per task, accordingly.
            threshold = self.threshold * math.log(ctx.task.size) / math.log(10)
            signal = bool(entropy - memory["entropy"] > threshold)
            memory["entropy"] = entropy
        memory |= {"signal": torch.tensor(signal), "noticed": memory["noticed"] | signal}
        if ctx.round == ctx.rounds - 1 and not memory["noticed"]:
            warn_once(
                f"{self.name}: a client did not detect task {ctx.task.index + 1} by the entropy: "
                f"it stores no new exemplars (see --set {self.name}.detector=oracle)"
            )
        # On a signal: choose exemplars of the last task's classes under the received model.
        if signal and len(memory["last.index"]):
            memory = self._store(backbone, data, ctx, memory)
        return memory

    def after_training(
        self, backbone: Backbone, train: Tree, sums: Tree, data: LocalData, ctx: Context
    ) -> tuple[Tree, Tree]:
        return ctx.memory, {}

    def _store(self, backbone: Backbone, data: LocalData, ctx: Context, memory: Tree) -> Tree:
        def features(index: Tensor) -> Tensor:
            return torch.cat(
                [self.features(backbone, ctx.shared, batch) for batch in data.batches(index)]
            )

        memory = store_last_task(memory, data, features, self.memory, self.repeated_exemplars)
        number = int(memory["learned"].sum())
        if 0 < self.memory < number:
            log.warning(
                "%s.memory=%d has no room for one image of each of the client's %d classes: it "
                "stores no exemplars",
                self.name,
                self.memory,
                number,
            )
        return memory


def initial_memory(classes: int, device: torch.device) -> Tree:
    """Create the memory of a client before its first task.

    Args:
        classes: Number of classes C of the run.
        device: Device of ``learned``, which every loss reads.

    Returns:
        The memory, without exemplars.
    """
    return {
        "task": torch.tensor(-1),
        "learned": torch.zeros(classes, dtype=torch.bool, device=device),
        "exemplar.index": NO_POSITIONS,
        "last.index": NO_POSITIONS,
    }


def move_to_task(memory: Tree, task: int, data: LocalData) -> Tree:
    """Move the memory to a new task: collect images of classes without exemplars in ``last.index``.

    This includes images of tasks in which the client was never selected.

    Args:
        memory: Memory of the client.
        task: Index of the new task.
        data: Local data of the client.

    Returns:
        The new memory.
    """
    is_learned = memory["learned"].cpu()[data.labels(data.earlier).cpu()]
    return {**memory, "task": torch.tensor(task), "last.index": data.earlier[~is_learned]}


def store_last_task(
    memory: Tree,
    data: LocalData,
    features: Callable[[Tensor], Tensor],
    budget: int,
    repeats: bool = False,
) -> Tree:
    """Choose exemplars of the last task by herding, with equal shares per learned class.

    Args:
        memory: Memory of the client.
        data: Local data of the client.
        features: Function from positions [n] to features [n, D].
        budget: Number of exemplars of all classes together.
        repeats: Allow an image to be chosen again, as in ``herding``.

    Returns:
        The memory with the new exemplars.
    """
    # The share per class is budget // learned classes; older lists are shortened to it.
    index = memory["last.index"]
    has_exemplars = memory["learned"].clone()
    has_exemplars[data.labels(index).to(has_exemplars.device)] = True

    def choose(own: Tensor, number: int) -> Tensor:
        return own[herding(features(own), number, repeats)]

    share = budget // int(has_exemplars.sum())
    positions = update_exemplars(memory["exemplar.index"], index, data, share, choose)
    return {
        **memory,
        "learned": has_exemplars,
        "exemplar.index": positions,
        "last.index": index[:0],
    }


def mean_entropy(logits: Tensor) -> Tensor:
    """Compute the mean over images of the entropy of their softmax.

    Args:
        logits: Logits [n, C].

    Returns:
        The mean entropy, nats.
    """
    p = logits.softmax(-1)
    return -(p * (p + 1e-5).log()).sum(-1).mean()
