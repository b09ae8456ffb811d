"""Recorded outputs of PILoRA's official code (tests/methods/golden/README.md), reproduced by this
package.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fczoo import Context, Task, Tree, create_method, whole_batch
from fczoo.aggregators.averaging import fedavg
from fczoo.aggregators.prototypes import prototype_reweight, prototype_weights
from fczoo.core.backbone import Backbone
from fczoo.core.payload import Payload
from fczoo.data.views import get_augment
from fczoo.federation.batches import Client
from fczoo.federation.client_engine import ClientEngine
from fczoo.federation.device import Plan
from fczoo.functional.lora import merged_pairs
from helpers_golden import F64, F64L, Identity, error, golden


class FeatureStore:
    """Replace an image store: the 'images' are features."""

    def __init__(self, features: Tensor, labels: Tensor):
        self.pixels, self.labels, self.backbone = features, labels, Identity()

    def view(self, index: Tensor) -> Tensor:
        return self.pixels[index]


# ---------------------------------------------------------------- one local step


class LocalStep:
    """Hold one batch of 16 features, labels 10 to 19 of 30 classes, without an earlier task."""

    def __init__(self) -> None:
        self.g = g = golden("pilora_loss_t0_d48")
        self.official = create_method("pilora", lr_lora=1e-3, means="running")
        self.task = Task(0, 10, 20, 30, 3)
        self.shared = {"frozen.before": g["centers"][:10], "frozen.after": g["centers"][20:]}
        self.train = {"prototype": g["centers"][10:20]}
        for part in "qv":
            self.train |= {
                f"lora.0.{part}.a": g[f"a_{part}"][0],
                f"lora.0.{part}.b": torch.zeros(48, 4, dtype=torch.float64),
            }
        self.batch = whole_batch(g["features"], g["labels"], g["features"])
        self.context = Context(self.task, 0, 5, self.shared)

    def loss(self, method) -> Tensor:
        return method.loss(Identity(), self.train, self.batch, self.context)[0]


@pytest.fixture(scope="module")
def step() -> LocalStep:
    return LocalStep()


def test_pilora_distances(step: LocalStep) -> None:
    distances = step.official.distances(step.g["features"], step.g["centers"])
    assert error(distances, step.g["distances"]) < F64
    assert (
        error(
            replace(step.official, distance="squared").distances(
                step.g["features"], step.g["centers"]
            ),
            step.g["distances"],
        )
        > 1
    )


def test_pilora_loss_terms(step: LocalStep) -> None:
    g, only_entropy = step.g, replace(step.official, pull=0.0)
    entropy = only_entropy.prototype_loss(g["features"], step.train, step.batch, step.context)
    entropy_and_pull = step.official.prototype_loss(
        g["features"], step.train, step.batch, step.context
    )
    assert error(entropy, g["dce"]) < F64L
    assert error(entropy_and_pull, g["dce_plus_pl"]) < F64L
    assert error((entropy_and_pull - entropy) / step.official.pull, g["pl"]) < F64L
    assert error(step.official.lora_penalty(step.train, step.shared), 0.01 * g["l1"]) < F64L
    assert error(step.loss(step.official), g["total"]) < F64L


@pytest.mark.parametrize(
    "wrong",
    [
        {"distance": "squared"},
        {"support": "task"},
        {"support": "seen"},
        {"sharpness": 2.0},
        {"pull": 0.0},
        {"sparse": 0.0},
    ],
    ids=str,
)
def test_pilora_loss_differs_from_wrong_options(step: LocalStep, wrong: dict) -> None:
    assert error(step.loss(replace(step.official, **wrong)), step.g["total"]) > 100 * F64L


def test_pilora_gradients(step: LocalStep) -> None:
    leaves = {k: v.clone().requires_grad_() for k, v in step.train.items()}
    loss, _ = step.official.loss(Identity(), leaves, step.batch, step.context)
    loss.backward()
    assert error(leaves["prototype"].grad, step.g["grad_centers"]) < F64L
    for part in "qv":
        assert error(leaves[f"lora.0.{part}.a"].grad, step.g[f"grad_a_{part}"]) < F64L
        assert leaves[f"lora.0.{part}.b"].grad is None  # features are fixed, so B has no gradient


@pytest.mark.parametrize("together", [1, 2])
def test_engine_takes_official_pilora_step(step: LocalStep, together: int) -> None:
    """Upload the official tensors after Adam, and the class means, after one epoch of one batch."""
    g = step.g
    engine = ClientEngine(
        step.official,
        Identity(),
        FeatureStore(g["features"], g["labels"]),
        Plan(1, 16, get_augment("none"), 0, together),
    )
    clients = [Client(k, torch.arange(16)) for k in range(2)]
    payloads = engine.train({**step.shared, **step.train}, clients, step.context)
    for payload in payloads:
        assert error(payload["prototype"], g["centers_after"][10:20]) < F64L
        for part in "qv":
            assert error(payload[f"lora.0.{part}.a"], g[f"a_{part}_after"]) < F64L
            assert not payload[f"lora.0.{part}.b"].any()
        assert g["class_present"].all()
        assert error(payload["class.mean"], g["class_means"]) < F64L
    assert torch.equal(
        g["centers_after"][:10], g["centers"][:10]
    )  # the official code also keeps the frozen ones


def test_pilora_step_depends_on_both_rates(step: LocalStep) -> None:
    g = step.g
    exchange = replace(
        step.official, lr_lora=step.official.lr_prototype, lr_prototype=step.official.lr_lora
    )
    engine = ClientEngine(
        exchange,
        Identity(),
        FeatureStore(g["features"], g["labels"]),
        Plan(1, 16, get_augment("none"), 0),
    )
    (payload,) = engine.train(
        {**step.shared, **step.train}, [Client(0, torch.arange(16))], step.context
    )
    assert error(payload["prototype"], g["centers_after"][10:20]) > 1e-3
    assert error(payload["lora.0.q.a"], g["a_q_after"]) > 1e-3


# ---------------------------------------------------------------- the server


HELD_CLASSES = [0, 1, 2]  # no client holds class 3


def test_pilora_weights() -> None:
    g = golden("pilora_reweight_k5c4_f64")
    assert g["mask"].any(0).tolist() == [True, True, True, False]
    ours = prototype_weights(g["protos"], g["means"], g["mask"], 0.2)
    assert error(ours[:, HELD_CLASSES], g["weights"][:, HELD_CLASSES]) < F64L
    assert error(ours[:, 3], torch.full((5,), 0.2, dtype=torch.float64)) < F64
    assert (
        error(ours[:, 3], 2 * g["weights"][:, 3]) < F64L
    )  # the official 0.1 each is right for ten clients only


@pytest.mark.parametrize(
    "wrong", [{"squared": True}, {"temperature": 5.0}, {"temperature": 1.0}], ids=str
)
def test_pilora_weights_differ_from_wrong_options(wrong: dict) -> None:
    g = golden("pilora_reweight_k5c4_f64")
    ours = prototype_weights(g["protos"], g["means"], g["mask"], **{"temperature": 0.2, **wrong})
    assert error(ours[:, HELD_CLASSES], g["weights"][:, HELD_CLASSES]) > 1e-2


def test_pilora_server_step() -> None:
    g = golden("pilora_reweight_k5c4_f64")
    payloads = [
        Payload(
            {
                "prototype": g["protos"][k],
                "class.mean": g["means"][k],
                "class.count": g["mask"][k].double(),
                "lora.0.q.a": g["lora_a"][k],
            },
            k,
            int(g["n_k"][k]),
        )
        for k in range(5)
    ]
    for aggregate in (
        prototype_reweight(payloads),
        create_method("pilora").aggregate(payloads, fedavg),
    ):
        assert error(aggregate["prototype"][HELD_CLASSES], g["merged"][HELD_CLASSES]) < F64L
        assert error(aggregate["prototype"][3], g["protos"][:, 3].mean(0)) < F64
        assert error(aggregate["prototype"][3], 2 * g["merged"][3]) < F64L
        assert error(aggregate["lora.0.q.a"], g["lora_a_avg"]) < F64L
    plain = create_method("pilora", reweight="average").aggregate(payloads, fedavg)
    assert error(plain["prototype"][HELD_CLASSES], g["merged"][HELD_CLASSES]) > 1e-2
    assert error(g["lora_a"].mean(0), g["lora_a_avg"]) > 1e-2  # not the unweighted mean


# ---------------------------------------------------------------- the forward pass


def summed_lora(g: Tree, last: int) -> Tree:
    """Return the method's state in task ``last``: that task's pair and the stacked earlier ones."""
    tree = {}
    for part in "qv":
        for side in "ab":
            factors = [g[f"{side}_{part}_{i}"] for i in range(last + 1)]
            tree[f"lora.0.{part}.{side}"] = factors[-1]
            if last:
                tree[f"past.0.{part}.{side}"] = torch.stack(factors[:-1])
    return tree


@pytest.mark.parametrize("last", [0, 1, 2])
def test_pilora_forward(micro: Backbone, images: Tensor, last: int) -> None:
    g = golden("pilora_mammoth_forward_micro")
    tree, official = summed_lora(g, last), g[f"feature_sum_upto_task{last}"]
    assert error(micro(images, merged_pairs(tree, "sum")), official) < F64
    assert error(micro(images), official) > 1e-3
    first = micro(images, merged_pairs(tree, "first"))
    assert error(first, g["feature_sum_upto_task0"]) < F64
    factor_sum = micro(images, merged_pairs(tree, "factor_sum"))
    sums = {
        f"lora.0.{part}.{side}": sum(g[f"{side}_{part}_{i}"] for i in range(last + 1))
        for part in "qv"
        for side in "ab"
    }
    assert error(factor_sum, micro(images, sums)) < F64
    if last:
        assert error(first, official) > 1e-3 and error(factor_sum, official) > 1e-3


def test_pilora_forward_uses_q_and_v(micro: Backbone, images: Tensor) -> None:
    g = golden("pilora_mammoth_forward_micro")
    exchange = {"q": "v", "v": "q"}
    plugs = {
        f"lora.0.{exchange[part]}.{side}": g[f"{side}_{part}_0"] for part in "qv" for side in "ab"
    }
    assert error(micro(images, plugs), g["feature_sum_upto_task0"]) > 1e-3
