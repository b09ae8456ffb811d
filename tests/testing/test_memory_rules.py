"""``check_method`` on methods whose clients keep a forbidden memory."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fczoo import Method, Optim, Training
from fczoo.functional.heads import head_logits, linear_head
from fczoo.testing.method_under_test import MethodUnderTest
from fczoo.testing.methods import check_client_memory, check_exemplars


@dataclass(frozen=True)
class KeepsFirstImage(Method):
    """Train a linear head on frozen features.

    Clients keep the first image of a task ``often`` times.
    """

    name = "broken"
    often = 1

    def training(self) -> Training:
        return Training({"head.": Optim(lr=1e-2)}, inputs=["query"], exemplars="kept")

    def begin_task(self, state, task, backbone, rng):
        return state or linear_head(task, backbone.dim, rng)

    def loss(self, backbone, train, batch, ctx):
        logits = head_logits(train, batch.query)
        return batch.mean(F.cross_entropy(logits, batch.y, reduction="none")), {}

    def predict(self, backbone, state, batch, task):
        return head_logits(state, batch.query)[:, : task.stop]

    def end_task_client(self, backbone, data, ctx):
        return {"kept": data.index[:1].repeat(self.often)}, {}


class KeepsNothing(KeepsFirstImage):
    often = 0


class KeepsTwice(KeepsFirstImage):
    often = 2


class KeepsMoreThanMemory(KeepsFirstImage):
    memory = 0


class KeepsImagesOfOthers(KeepsFirstImage):
    def end_task_client(self, backbone, data, ctx):
        return {"kept": torch.arange(70)}, {}


class KeepsNaN(KeepsFirstImage):
    def end_task_client(self, backbone, data, ctx):
        return {"kept": data.index[:1], "mean": torch.tensor(float("nan"))}, {}


class ChangesMemoryInPlace(KeepsFirstImage):
    def end_task_client(self, backbone, data, ctx):
        ctx.memory["kept"] = data.index[:1]
        return ctx.memory, {}


def test_client_may_keep_own_image():
    subject = MethodUnderTest(KeepsFirstImage())
    check_exemplars(subject)
    check_client_memory(subject)


@pytest.mark.parametrize(
    ("cls", "says"),
    [
        (KeepsNaN, "stores mean, which is not finite, in its memory"),
        (ChangesMemoryInPlace, "in place"),
    ],
)
def test_invalid_client_memory_is_rejected(cls: Any, says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        check_client_memory(MethodUnderTest(cls()))


BROKEN: list[tuple[type[KeepsFirstImage], str]] = [
    (KeepsNothing, "broken stores no exemplar in kept"),
    (KeepsTwice, "broken's client . stores an exemplar twice"),
    (KeepsMoreThanMemory, "broken's client . stores 1 exemplars, memory=0"),
    (KeepsImagesOfOthers, "broken's client . stores exemplars that are not its own"),
]


@pytest.mark.parametrize(("cls", "says"), BROKEN)
def test_invalid_exemplars_are_rejected(cls: Any, says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        check_exemplars(MethodUnderTest(cls()))
