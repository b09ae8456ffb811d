"""``check_method`` on methods that are broken on purpose: each rule rejects its fault."""

import re
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fczoo import Method, Optim, Training, option
from fczoo.core.payload import whole_tensors
from fczoo.core.registry import METHODS
from fczoo.functional.heads import head_logits, linear_head
from fczoo.functional.losses import task_cross_entropy
from fczoo.testing import check_method
from fczoo.testing import method_rules as rules
from fczoo.testing import training_rules as training
from fczoo.testing.method_under_test import MethodUnderTest
from fczoo.testing.methods import check_loaded_model


@dataclass(frozen=True)
class Linear(Method):
    """Train a linear head on frozen features."""

    paper = "by hand"

    lr: float = option(1e-2, "learning rate of the head", low=0, tune=(1e-4, 1e-1, "log"))

    def training(self) -> Training:
        return Training(optims={"head.": Optim(lr=self.lr)}, inputs=["query"])

    def begin_task(self, state, task, backbone, rng):
        return state or linear_head(task, backbone.dim, rng)

    def loss(self, backbone, train, batch, ctx):
        return task_cross_entropy(head_logits(train, batch.query), batch, ctx.task), {}

    def predict(self, backbone, state, batch, task):
        return head_logits(state, batch.query)[:, : task.stop]


class Changeable(Linear):
    __setattr__ = object.__setattr__


class WithoutPaper(Linear):
    """Name no paper."""

    paper = ""


@dataclass(frozen=True)
class WithoutSearchSpaces(Linear):
    lr: float = option(1e-2, "learning rate of the head", low=0)


@dataclass(frozen=True)
class OneSearchSpace(Linear):
    lr: float = option(1e-2, "learning rate of the head", low=0, tune=(1e-4, 1e-1, "log"))
    strength: float = option(0.1, "weight of what holds it back", low=0)


@dataclass(frozen=True)
class InvalidSearchSpace(Linear):
    lr: float = option(1e-2, "learning rate of the head", low=0, tune=(-1.0, 1.0, "linear"))


class MisspeltOption(Linear):
    dataset_options = {"digits": {"lrr": 1e-3}}


class OptionOutOfRange(Linear):
    dataset_options = {"digits": {"lr": -1.0}}


class TrainsMissingTensor(Linear):
    def training(self):
        return replace(super().training(), optims={"prompt.": Optim()})


class TrainsPrivateState(Linear):
    server_only = ("head.",)


class NamesMissingPrivateState(Linear):
    server_only = ("secret",)


class ChangesOldState(Linear):
    def begin_task(self, state, task, backbone, rng):
        if state:
            state["head.bias"].add_(1)
        return super().begin_task(state, task, backbone, rng)


class ChangesUploads(Linear):
    def aggregate(self, payloads, average):
        mean = average(payloads)
        payloads[0]["head.bias"].add_(1)
        return mean


class ChangesBroadcast(Linear):
    def loss(self, backbone, train, batch, ctx):
        ctx.shared["head.bias"].add_(1)
        return super().loss(backbone, train, batch, ctx)


class ChangesBackbone(Linear):
    def loss(self, backbone, train, batch, ctx):
        backbone.weights["norm.bias"].add_(1)
        return super().loss(backbone, train, batch, ctx)


class UploadsExtraTensor(Linear):
    def make_upload(self, train, sums, ctx):
        return {**train, "labels": torch.ones(3)}


class UploadsExtraTensorOnce(Linear):
    def loss(self, backbone, train, batch, ctx):
        return super().loss(backbone, train, batch, ctx)[0], {"seen": batch.w.sum()}

    def make_upload(self, train, sums, ctx):
        return {**train, "labels": torch.ones(3)} if sums["seen"] == 13 else train


class UploadsNaN(Linear):
    def training(self):
        return replace(super().training(), uploads={"usage": whole_tensors("counts")})

    def make_upload(self, train, sums, ctx):
        return {**train, "usage": torch.tensor(0.0) / 0}


class ChangesFrozenRows(Linear):
    append_only = ("head.",)


class NamesMissingFrozenRows(Linear):
    append_only = ("past.",)


class CountsPadding(Linear):
    def loss(self, backbone, train, batch, ctx):
        return F.cross_entropy(head_logits(train, batch.query), batch.y), {}


class StopsGradients(Linear):
    def loss(self, backbone, train, batch, ctx):
        value, sums = super().loss(backbone, train, batch, ctx)
        return 0 * value, sums


class LogitsOfFutureClasses(Linear):
    def predict(self, backbone, state, batch, task):
        return head_logits(state, batch.query)


class LogitsByBatch(Linear):
    def predict(self, backbone, state, batch, task):
        return super().predict(backbone, state, batch, task) * batch.query.mean()


class ReadsMoreForSeveralImages(Linear):
    def predict(self, backbone, state, batch, task):
        logits = batch.query @ state["head.weight"].mT
        return (logits if len(batch.y) == 1 else logits + state["head.bias"])[:, : task.stop]


class UnseededDraws(Linear):
    def begin_task(self, state, task, backbone, rng):
        return super().begin_task(
            state, task, backbone, torch.Generator().manual_seed(torch.seed() >> 1)
        )


class IgnoresSeed(Linear):
    def training(self):
        return replace(super().training(), optims={"head.": Optim(lr=0.0)})

    def begin_task(self, state, task, backbone, rng):
        return {
            name: torch.zeros_like(v)
            for name, v in super().begin_task(state, task, backbone, rng).items()
        }


class CountsCalls(Linear):
    """Weigh each call of the loss more than the one before.

    Clients together need fewer calls.
    """

    calls = [0]

    def begin_task(self, state, task, backbone, rng):
        self.calls[0] *= bool(state)
        return super().begin_task(state, task, backbone, rng)

    def loss(self, backbone, train, batch, ctx):
        self.calls[0] += 1
        value, sums = super().loss(backbone, train, batch, ctx)
        return value * (1 + self.calls[0]), sums


class StacksUploads(Linear):
    def aggregate(self, payloads, average):
        return {name: torch.stack([p[name] for p in payloads]) for name in payloads[0]}

    def server_update(self, state, merged, ctx):
        return {**state, **{name: value.mean(0) for name, value in merged.items()}}


BROKEN: list[tuple[Any, type[Method], str]] = [
    (
        rules.check_dataclass,
        Changeable,
        r"lr can be changed after creation; write @dataclass\(frozen=True\)",
    ),
    (
        rules.check_description,
        WithoutPaper,
        "does not name its source; set the class attribute paper",
    ),
    (
        rules.check_search_spaces,
        WithoutSearchSpaces,
        "for 0 of its options; 1 to 4 options, the learning rates among them, must have one: "
        "option",
    ),
    (
        rules.check_search_spaces,
        OneSearchSpace,
        "for 1 of its options; 2 to 4 options, the learning rates among them, must have one: "
        "option",
    ),
    (rules.check_search_spaces, InvalidSearchSpace, "lr has a search space with an invalid value"),
    (rules.check_dataset_options, MisspeltOption, "has no option 'lrr'"),
    (rules.check_dataset_options, OptionOutOfRange, "it must be at least 0"),
    (
        rules.check_first_state,
        TrainsMissingTensor,
        "trains prompt., which begin_task does not create",
    ),
    (rules.check_first_state, TrainsPrivateState, "trains head., which is server_only"),
    (rules.check_broadcast, NamesMissingPrivateState, "which the state does not have"),
    (
        rules.check_begin_task_changes_no_input,
        ChangesOldState,
        r"changes the old state in place.*head\.bias",
    ),
    (
        rules.check_server_changes_no_upload,
        ChangesUploads,
        r"changes an upload in place.*head\.bias",
    ),
    (
        training.check_clients_change_no_state,
        ChangesBroadcast,
        r"clients change the broadcast state.*head\.bias",
    ),
    (
        training.check_backbone_weights,
        ChangesBackbone,
        r"changes the backbone's weights.*norm\.bias",
    ),
    (
        rules.check_declared_uploads,
        UploadsExtraTensor,
        "uploads 'labels' without declaring it; add its group",
    ),
    (
        rules.check_declared_uploads,
        UploadsExtraTensorOnce,
        "uploads 'labels' without declaring it; add its group",
    ),
    (rules.check_finite_uploads, UploadsExtraTensorOnce, "honest upload is rejected: "),
    (
        rules.check_finite_uploads,
        UploadsNaN,
        "fails in the toy benchmark.*not finite",
    ),
    (training.check_append_only_rows, ChangesFrozenRows, "changes frozen rows of head."),
    (
        training.check_append_only_rows,
        NamesMissingFrozenRows,
        "append_only names past., which is not in the state",
    ),
    (training.check_padding, CountsPadding, "counts padding \\(rows of weight 0\\) in train"),
    (training.check_padding, StopsGradients, "loss has only zero gradients; nothing is trained"),
    (
        training.check_logits,
        LogitsOfFutureClasses,
        "one logit for each class seen",
    ),
    (
        training.check_logits_of_batches,
        LogitsByBatch,
        "logits that depend on other images of the batch",
    ),
    (
        training.check_same_seed,
        UnseededDraws,
        "is not reproducible with the same seed",
    ),
    (training.check_other_seed, IgnoresSeed, "trains identically with another seed"),
    (
        training.check_batched_clients,
        CountsCalls,
        "with --together 3 in task 1, round 1",
    ),
    (
        rules.check_combined_settings,
        StacksUploads,
        "does not average head.weight; leave it out",
    ),
    (training.check_batched_clients_in_float32, CountsCalls, "in float32 with --together 3"),
    (
        check_loaded_model,
        ReadsMoreForSeveralImages,
        "cannot predict: KeyError 'head.bias'",
    ),
]


@pytest.fixture
def subject(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> MethodUnderTest:
    cls = type("Broken", (request.param,), {"__doc__": "Broken.", "__module__": __name__})
    cls.name = "broken"
    monkeypatch.setitem(METHODS._entries, "broken", cls)
    return MethodUnderTest(cls())


@pytest.mark.parametrize(
    ("rule", "subject", "says"),
    BROKEN,
    indirect=["subject"],
    ids=[f"{rule.__name__}-{cls.__name__}" for rule, cls, _ in BROKEN],
)
def test_broken_method_is_rejected(rule: Any, subject: MethodUnderTest, says: str) -> None:
    with pytest.raises(AssertionError, match=f"broken.*{says}") as caught:
        rule(subject)
    assert re.fullmatch(".+", str(caught.value))


@pytest.mark.parametrize("subject", [Linear], indirect=True)
def test_inconsistent_result_is_rejected(subject: MethodUnderTest) -> None:
    result = subject.run().result
    rules.check_upload_bytes(subject)
    training.check_accuracy(subject)
    result.bytes_up += 1
    with pytest.raises(
        AssertionError, match=r"broken uploads \d+ bytes in 16 uploads, but the result counts"
    ):
        rules.check_upload_bytes(subject)
    result.accuracy[1][0] += 1
    with pytest.raises(AssertionError, match=r"broken has accuracies .* but its predictions give"):
        training.check_accuracy(subject)


@pytest.mark.parametrize("subject", [Linear], indirect=True)
def test_check_method_accepts_instance(
    subject: MethodUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        AssertionError, match=r"broken cannot be pickled; define its class at the top"
    ):
        check_method(subject.method)
    monkeypatch.setitem(globals(), "Broken", type(subject.method))
    type(subject.method).__qualname__ = "Broken"
    check_method(subject.method)


def test_combinations_cover_each_pair_once() -> None:
    """Count pairs of values of two settings over 25 methods: 5 x 5, each once."""
    runs = [rules.combination(number) for number in range(7, 32)]
    for first, second in combinations(rules.CHOICES, 2):
        assert len({(run[first], run[second]) for run in runs}) == 25
