"""UOPP: base step and prototypes against recorded outputs, few-shot steps and rectifier by hand."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo import Batch, Context, Task, Tree, create_method
from fczoo.baselines._uopp_prototypes import (
    Samples,
    merge_by_weight,
    moved_sums,
    query_loss,
    rectify,
    start_rectifier,
)
from fczoo.baselines.pip import GOLDEN_RATIO
from fczoo.core.tree import select
from fczoo.core.types import whole_batch
from fczoo.functional.gaussians import moment_sums
from fczoo.testing.method_under_test import record_run
from fczoo.testing.toy_benchmark import small_method, toy_bench
from helpers_golden import F32, compare, golden
from helpers_payload import server_context

BASE, LATER = Task(0, 0, 6, 12, 3), Task(1, 2, 4, 4, 2)
ONE_BLOCK = {"general_blocks": (0,), "expert_blocks": (0,)}


def test_base_step() -> None:
    """Compare cross-entropy, gradients and their norm of real images and prototypes.

    The recorded copies are u V away from the prototype. The table of spreads is chosen such that
    this method's own u gives the same.
    """
    g, method = golden("uopp_base_step"), create_method("uopp", **ONE_BLOCK)
    leaves = {k: g[f"in.{k}"].clone().requires_grad_() for k in ("head.weight", "head.bias", "key")}
    leaves["prompt"] = g["in.prompt"].clone().requires_grad_()
    classes, entry = g["in.prototype_classes"], torch.arange(36).view(6, 6)
    own_u = (0.25 + GOLDEN_RATIO * entry) % 1 / 3
    tables = {"mean": torch.zeros(6, 6), "spread": torch.zeros(6, 6), "held": torch.zeros(6)}
    tables["mean"][classes], tables["held"][classes] = g["in.prototypes"], 1.0
    far = g["in.uniform"] / 3 * g["in.variances"].square()
    tables["spread"][classes] = far / own_u[classes]
    none = {
        f"{name}.0.{part}": torch.zeros(1, 6) for name in ("general", "expert") for part in "kv"
    }
    train = {**leaves, **none, "expert.key": leaves["key"]}
    draws = torch.full((7, 1), 0.25)
    batch = Batch(g["in.x"], g["in.y"], torch.ones(7), g["in.cls_features"], draws=draws)

    def backbone(images: Tensor, plugs: Tree) -> Tensor:
        return images @ leaves["prompt"].mT

    loss, _ = method.loss(backbone, train, batch, Context(BASE, 1, 2, tables))
    similarity = F.cosine_similarity(g["in.cls_features"], g["in.key"][None]).mean()
    compare("uopp_base_step", loss + similarity, g["out.cross_entropy"], F32)
    gradients = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    for name, gradient in gradients.items():
        compare("uopp_base_step", gradient, g[f"out.grad.{name}"], F32, name)
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    compare("uopp_base_step", norm, g["out.norm"], F32)
    assert method.training().clip_norm == float(g["in.max_norm"])
    deviation = g["in.variances"].sqrt() * g["in.uniform"] / 3  # the default's copies
    rows = torch.cat([g["in.prototypes"] + sign * deviation for sign in (0, 1, -1)])
    compare("uopp_base_step", rows, g["alt.rows_standard_deviation"], F32)


@pytest.mark.parametrize("released", [False, True])
def test_squared_variance_uses_fourth_power_of_deviation(released: bool) -> None:
    """Copy a mean 0 with deviation 2: u V is 2 u, or 16 u where V is the variance squared."""
    method = create_method("uopp", squared_variance=released, reach=1.0)
    shared = {"mean": torch.zeros(1, 1), "spread": torch.full((1, 1), 2.0), "held": torch.ones(1)}
    head = {"head.weight": torch.tensor([[1.0], [0.0]]), "head.bias": torch.zeros(2)}
    batch = Batch(*4 * [torch.ones(1)], draws=torch.tensor([[0.5]]))
    loss = method.prototype_loss(head, batch, Context(Task(0, 0, 1, 2, 1), 1, 2, shared))
    assert float(loss) == 0.0  # one class of the task: its probability is 1
    two = Context(
        Task(0, 0, 2, 2, 1),
        1,
        2,
        {
            k: v.repeat(2, *[1] * (v.dim() - 1))
            for k, v in (("mean", shared["mean"]), ("spread", shared["spread"]))
        }
        | {"held": torch.tensor([1.0, 0.0])},
    )
    away = 16 * 0.5 if released else 2 * 0.5
    expected = sum(math.log1p(math.exp(-z)) for z in (0.0, away, -away))
    assert float(method.prototype_loss(head, batch, two)) == pytest.approx(expected, rel=1e-5)


def client_sums(g: Tree, client: int) -> Tree:
    """Return the sums of a client of the recorded prototypes, whose prompt is a matrix."""
    x = torch.cat([g[f"in.x_k{client}b{part}"] for part in (0, 1)])
    y = torch.cat([g[f"in.y_k{client}b{part}"] for part in (0, 1)])
    sums = moment_sums(x @ g[f"in.prompt_k{client}"].mT, whole_batch(x, y), BASE)
    return {k.replace("class.", "proto."): v for k, v in sums.items()}


def test_prototypes_are_weighted_by_participations() -> None:
    """Compare means of clients and their merge; the variance is the pooled one of all images."""
    g = golden("uopp_prototypes")
    clients = [client_sums(g, k) for k in range(3)]
    for k, sums in enumerate(clients):
        for c in g[f"in.available_k{k}"].tolist():
            mean = sums["proto.sum"][c] / sums["proto.count"][c]
            compare("uopp_prototypes", mean, g[f"out.mean_k{k}c{c}"].double(), F32)
    uploads = {name: torch.stack([sums[name] for sums in clients]) for name in clients[0]}
    uploads["expert.key"] = torch.tensor([[1.0], [2.0], [6.0]])
    merged = merge_by_weight(uploads, g["in.participations"])
    assert float(merged["expert.key"]) == pytest.approx((1 * 1 + 3 * 2 + 2 * 6) / 6)
    method, zeros = create_method("uopp"), torch.zeros(6, 6, dtype=torch.float64)
    state = {"mean": zeros, "spread": zeros, "held": zeros[0]}
    after = method.update_from("task_start", state, dict(merged), server_context(BASE))
    for c in range(6):
        compare("uopp_prototypes", after["mean"][c], g[f"out.global_mean_c{c}"], F32)
    held_by_one = after["spread"][5].square()  # client 1 has all images of class 5
    x = torch.cat([g["in.x_k1b0"], g["in.x_k1b1"]])[
        torch.cat([g["in.y_k1b0"], g["in.y_k1b1"]]) == 5
    ]
    spread = (x @ g["in.prompt_k1"].mT).double().var(0, correction=0)
    torch.testing.assert_close(held_by_one, spread, rtol=1e-5, atol=1e-6)
    compare(
        "uopp_prototypes", -g["out.global_mean_c5"].square(), g["quirk.global_variance_c5"], F32
    )


def test_server_counts_participations_of_task() -> None:
    """Weigh client 2, which takes part twice, by 2/3 and client 0 by 1/3 in the second round."""
    method = create_method("uopp", weights="participations")
    none = torch.zeros(2, 1)
    state = {"mean": none, "spread": none, "held": none[:, 0], "taken_part": torch.empty(0)}
    empty = {"proto.count": torch.zeros(1, 2), "proto.sum": none[None], "proto.squares": none[None]}
    first = {"clients": torch.tensor([2]), "expert.key": torch.tensor([[5.0]]), **empty}
    state = method.server_update(state, first, server_context(LATER))
    both = {k: v.repeat(2, *[1] * (v.dim() - 1)) for k, v in empty.items()}
    second = {"clients": torch.tensor([0, 2]), "expert.key": torch.tensor([[3.0], [6.0]]), **both}
    state = method.server_update(state, second, server_context(LATER))
    assert state["taken_part"].tolist() == [1.0, 0.0, 2.0]
    assert state["expert.key"].tolist() == [5.0]


def few_shot_state() -> Tree:
    """Return prototypes of four classes of two tasks, in the plane; class 3 has none."""
    return {
        "old_mean": torch.tensor([[2.0, 0.0], [0.0, 1.0]]),
        "old_held": torch.ones(2),
        "mean": torch.tensor([[-3.0, 0.0], [9.0, 9.0]]),
        "held": torch.tensor([1.0, 0.0]),
        "task_ends": torch.tensor([2, 4]),
    }


def test_few_shot_loss_by_hand() -> None:
    """Use cosines 0, 1 and 0 of (0, 5) with the prototypes; ignore the class without one."""
    method = create_method("uopp")
    features = torch.tensor([[0.0, 5.0], [1.0, 1.0]])
    batch = whole_batch(features, torch.tensor([2, 3]))
    loss = method.few_shot_loss(features, batch, few_shot_state())
    assert float(loss) == pytest.approx(math.log(2 + math.exp(10)))
    longer = method.few_shot_loss(7 * features, batch, few_shot_state())
    assert float(longer) == pytest.approx(float(loss))  # the length of f is irrelevant


def test_predictions_with_and_without_batch_vote() -> None:
    """Predict the nearest prototype by default; the released code votes and knows the task.

    Two of three queries are nearest to the key of the first task, so the head predicts all.
    """
    head = {"head.weight": torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 1.0]])}
    keys = {"past.key": torch.tensor([[1.0, 0.0]]), "expert.key": torch.tensor([0.0, 1.0])}
    slots = {f"expert.0.{p}": torch.zeros(1, 2) for p in "kv"}
    slots |= {f"past.0.{p}": torch.zeros(1, 1, 2) for p in "kv"}
    general = {f"general.0.{p}": torch.zeros(1, 2) for p in "kv"}
    none = {"next.key": torch.zeros(0, 2), "head.bias": torch.zeros(4)}
    state = {**few_shot_state(), **head, **keys, **slots, **general, **none}
    images = torch.tensor([[0.0, 5.0], [-1.0, 0.0], [1.0, 0.0]])

    def answers(method, query: list[list[float]], label: int) -> list[int]:
        batch = whole_batch(images, torch.full((3,), label), torch.tensor(query))
        return method.predict(lambda x, plugs: x, state, batch, LATER).argmax(1).tolist()

    first, second = [[1.0, 0.1], [0.1, 1.0], [1.0, 0.0]], [[0.1, 1.0], [1.0, 0.0], [0.0, 1.0]]
    plain = create_method("uopp", **ONE_BLOCK)
    voting = create_method("uopp", batch_vote=True, **ONE_BLOCK)
    assert answers(plain, first, 0) == answers(plain, second, 2) == [1, 2, 0]
    assert answers(voting, first, 2) == [3, 0, 0]  # the head
    assert answers(voting, second, 3) == [1, 2, 0]
    assert answers(voting, second, 1)[1] < 2  # images of the first task: its two classes


def test_later_tasks_freeze_head_and_use_own_rate() -> None:
    training = create_method("uopp", lr=0.1, lr_few=0.3).training()
    base, few = training.active_optims(BASE, 0), training.active_optims(LATER, 0)
    assert {k: v.lr for k, v in base.items()} == {"general.": 0.1, "expert.": 0.1, "head.": 0.1}
    assert {k: v.lr for k, v in few.items()} == {"general.": 0.3, "expert.": 0.3}


def test_reset_prompt_restores_previous_prompts() -> None:
    """Restore them in every round, as the released code does; the default keeps the average."""
    method = create_method("uopp", reset_prompt=True)
    state = {
        **few_shot_state(),
        "spread": torch.zeros(2, 2),
        "past.2.k": torch.tensor([[7.0]]),
        "expert.2.k": torch.tensor([1.0]),
        "expert.key": torch.tensor([2.0]),
    }
    zero = {"proto.count": torch.zeros(2), "proto.sum": torch.zeros(2, 2)}
    merged = {**zero, "proto.squares": torch.zeros(2, 2), "expert.2.k": torch.tensor([3.0])}
    ctx = server_context(LATER)  # the first of two rounds
    assert method.server_update(state, dict(merged), ctx)["expert.2.k"].tolist() == [7.0]
    plain = create_method("uopp").server_update(state, dict(merged), ctx)
    assert plain["expert.2.k"].tolist() == [3.0]


def random_rectifier(seed: int) -> tuple[Tree, Tensor, Samples]:
    generator = torch.Generator().manual_seed(seed)
    tree = {k: v.double() for k, v in start_rectifier(3, 4, 2, generator).items()}
    means = torch.randn(4, 3, generator=generator).double()
    x = torch.randn(6, 3, generator=generator).double()
    label = torch.cat([torch.eye(4)[[0, 1, 2, 3]], torch.full((2, 4), 0.25)]).double()
    return tree, means, Samples(x, label, torch.ones(6).double())


def test_rectifier_ignores_padding_and_absent_classes() -> None:
    tree, means, samples = random_rectifier(0)
    present = torch.tensor([1.0, 1.0, 1.0, 0.0]).double()
    plain = rectify(tree, means, present, samples, 2)
    longer = Samples(
        torch.cat([samples.x, 9 * samples.x[:1]]),
        torch.cat([samples.label, samples.label[:1]]),
        torch.cat([samples.weight, torch.zeros(1).double()]),
    )
    torch.testing.assert_close(rectify(tree, means, present, longer, 2), plain)
    other = means.clone()
    other[3] = 5.0
    torch.testing.assert_close(rectify(tree, other, present, samples, 2)[:3], plain[:3])
    assert not torch.allclose(plain[:3], means[:3])


def test_solver_has_fourth_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare with p0 exp(-integral of lambda) for D = -p and lambda = 0.1 * 0.1^(t / 40)."""
    name = "fczoo.baselines._uopp_prototypes._derivative"
    monkeypatch.setattr(name, lambda tree, p, *rest: -p)
    _, means, samples = random_rectifier(1)
    integral = 0.1 * 40 / math.log(10) * (1 - 0.1 ** (39 / 40))
    exact = means * math.exp(-integral)
    errors = [
        float((rectify({}, means, means, samples, steps) - exact).abs().max()) for steps in (4, 8)
    ]
    assert errors[1] < errors[0] / 10
    assert errors[1] < 1e-4


def test_query_loss_and_moved_sums_by_hand() -> None:
    """Give log 2 for equal cosines with the two present classes of three."""
    shared = {"mean": torch.tensor([[1.0, 0.0]] * 3), "held": torch.ones(3)}
    rectified = torch.tensor([[2.0, 0.0], [3.0, 0.0], [0.0, 1.0]])
    loss = query_loss(rectified, torch.tensor([1.0, 1.0, 0.0]), shared, 10.0)
    assert float(loss) == pytest.approx(math.log(2))
    # features 1 and 3 with mean 2 move to mean 5: squares 2 + 2 * 25
    sums = {"proto.count": torch.tensor([2.0]), "proto.sum": torch.tensor([[4.0]])}
    sums["proto.squares"] = torch.tensor([[10.0]])
    moved = moved_sums(sums, torch.tensor([[5.0]]))
    assert {k: float(v) for k, v in moved.items()} == {"proto.sum": 10.0, "proto.squares": 52.0}


def test_rectifier_trains_in_later_tasks_only() -> None:
    record = record_run(toy_bench(rounds=1), small_method("uopp", rectify="ode"))
    for call in record.calls:
        if call.phase == "train":
            before = select(call.state, "rectifier.")
            after = record.states[call.ctx.task.index]
            same = [torch.equal(value, after[name]) for name, value in before.items()]
            assert all(same) == (call.ctx.task.index == 0)


def test_zero_rectifier_contracts_prototypes_to_mean() -> None:
    """Weigh all samples equally with weights of 0: dp/dt = lambda(t) (mean of the samples - p).

    The integral of lambda from 0 to 39 is 4 / ln 10 (1 - 0.1^0.975) = 1.553, so prototypes keep
    exp(-1.553) = 0.2116 of their distance to the mean.
    """
    tree = start_rectifier(2, 2, 1, torch.Generator().manual_seed(0))
    tree = {name: torch.zeros_like(value).double() for name, value in tree.items()}
    x = torch.tensor([[4.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
    samples = Samples(x, torch.eye(2).double(), torch.ones(2).double())
    moved = rectify(tree, x, torch.ones(2), samples, 39)
    kept = math.exp(-4 / math.log(10) * (1 - 0.1**0.975))
    assert kept == pytest.approx(0.2116, abs=1e-4)
    torch.testing.assert_close(moved - x.mean(0), kept * (x - x.mean(0)), rtol=1e-4, atol=1e-6)


def test_initial_rectifier_contracts_prototypes() -> None:
    """Keep about a fifth of the distance of two means with random weights."""
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        tree = start_rectifier(64, 2, 4, generator)
        hot = torch.eye(2).repeat_interleave(4, 0)
        x = torch.randn(8, 64, generator=generator)
        x = x + 2 * torch.randn(2, 64, generator=generator).repeat_interleave(4, 0)
        means = hot.mT @ x / 4
        moved = rectify(tree, means, torch.ones(2), Samples(x, hot, torch.ones(8)), 6)
        kept = float((moved[0] - moved[1]).norm() / (means[0] - means[1]).norm())
        assert kept == pytest.approx(0.2116, abs=0.05)
