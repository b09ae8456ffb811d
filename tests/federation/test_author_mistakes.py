"""Common mistakes of a method's author raise a sentence that names the function."""

from dataclasses import dataclass

import pytest
import torch

from fczoo import Method, Optim, Training
from fczoo.core.errors import FczooError
from fczoo.core.options import build, option
from fczoo.core.registry import METHODS, register_method
from fczoo.federation.evaluate import predictions
from fczoo.federation.scenario import Scenario
from fczoo.functional.heads import head_logits, linear_head
from fczoo.functional.losses import task_cross_entropy
from fczoo.testing.toy_benchmark import toy_bench


@dataclass(frozen=True)
class Linear(Method):
    """Train a linear head on frozen features."""

    name = "linear"

    def training(self):
        return Training(optims={"head.": Optim()}, inputs=["query"])

    def begin_task(self, state, task, backbone, rng):
        return state or {k: v.double() for k, v in linear_head(task, backbone.dim, rng).items()}

    def loss(self, backbone, train, batch, ctx):
        return task_cross_entropy(head_logits(train, batch.query), batch, ctx.task), {}

    def predict(self, backbone, state, batch, task):
        return head_logits(state, batch.query)[:, : task.stop]


def with_changed_result(function: str, changed) -> Method:
    """Return Linear with a function whose right result is passed to ``changed``."""
    right = getattr(Linear, function)
    return type("Linear", (Linear,), {function: lambda *arguments: changed(right(*arguments))})()


@pytest.mark.parametrize("together", [1, 3])
@pytest.mark.parametrize(
    ("function", "changed", "says"),
    [
        ("loss", lambda result: result[0], "returns Tensor, expected"),
        ("loss", lambda result: (1.5, {}), "a loss a float, expected a scalar tensor"),
        ("loss", lambda result: (result[0].expand(3), {}), r"a loss of shape \(3,\), expected"),
        (
            "loss",
            lambda result: (result[0], {"count": 1.0}),
            "the sum 'count' as float, expected a tensor",
        ),
        (
            "loss",
            lambda result: (result[0].detach(), {}),
            "does not depend on the trained tensors; look for a detach",
        ),
        ("predict", lambda logits: logits * torch.nan, "returned NaN after task 1"),
    ],
)
def test_invalid_return_value_stops_run(function, changed, says, together) -> None:
    with pytest.raises((TypeError, FczooError), match=rf"linear\.{function} .*{says}"):
        toy_bench(torch.float64, together=together).run(with_changed_result(function, changed))


def test_nan_of_class_without_images_is_ignored(monkeypatch) -> None:
    bench = toy_bench(torch.float64)
    run = bench.start(Linear())
    list(run)
    monkeypatch.setattr(
        Scenario, "classes_with_images", lambda scenario, task: torch.arange(task.stop) > 0
    )
    arguments = bench, run.state, torch.arange(len(bench.test.labels)), bench.stream.tasks[-1], 100

    def first_is_nan(logits):
        return logits.index_fill(1, torch.tensor([0]), torch.nan)

    answers, _ = predictions(with_changed_result("predict", first_is_nan), *arguments)
    assert answers.equal(predictions(Linear(), *arguments)[0]) and 0 not in answers


@pytest.mark.parametrize("changed", [lambda result: None, lambda result: dict(result.optims)])
def test_training_must_return_training(changed) -> None:
    with pytest.raises(FczooError, match=r"linear\.training returns \w+; return a fczoo\.Training"):
        toy_bench(torch.float64).check(with_changed_result("training", changed))


def test_unknown_training_options_are_rejected() -> None:
    with pytest.raises(FczooError, match="optimizer 'adamm'; known: adam, adamw, sgd"):
        Optim("adamm")
    with pytest.raises(FczooError, match="learning-rate schedule 'cosin'; known: constant, cosine"):
        Optim(schedule="cosin")
    with pytest.raises(FczooError, match="input of a batch 'features'; known: images, query"):
        Training(inputs=["features"])


def test_class_with_missing_functions_is_rejected() -> None:
    @dataclass(frozen=True)
    class Half(Method):
        def training(self):
            return Training()

    with pytest.raises(
        FczooError, match=r"Half in .* does not define begin_task, predict; define them"
    ):
        build(Half, "half", {})


def test_class_with_options_must_be_dataclass() -> None:
    class NoDataclass(Method):
        rate: float = option(0.1, "a rate")

    says = r"NoDataclass in .* is not a dataclass; write @dataclass\(frozen=True\) above the class"
    with pytest.raises(FczooError, match=says):
        register_method("bare")(NoDataclass)
    assert "bare" not in METHODS.names()
