"""Outputs of official implementations of methods with exemplars, reproduced
(tests/methods/golden/README.md).

``out`` holds outputs that the default must give, ``quirk`` those that it must not give.
"""

import pytest
import torch

from fczoo import Batch, Context, Task, create_method
from fczoo.baselines.dde import neighbours
from fczoo.baselines.geodl import flow_kernel, subspace
from fczoo.functional.cosine import cosines
from fczoo.functional.exemplars import exemplar_sums, herding
from helpers_golden import golden
from helpers_official import Features, grads, query_batch, same
from helpers_payload import server_context


class FeatureImages:
    """Replace a client's images by features and labels by position."""

    def __init__(self, features, labels):
        self.whole = query_batch(features, labels)

    def batches(self, index):
        yield query_batch(self.whole.x[index], self.whole.y[index])


@pytest.mark.parametrize(("normalise", "choice"), [(True, "normalised"), (False, "raw")])
def test_herding_matches_mammoth(normalise: bool, choice: str) -> None:
    g = golden("herding_mammoth")
    chosen = []
    for c in g["in.labels"].unique():
        class_indices = (g["in.labels"] == c).nonzero()[:, 0]
        each = int(g["in.buffer_size"]) // 3
        chosen.append(
            class_indices[herding(g["in.feats"][class_indices], each, normalise=normalise)]
        )
    assert torch.cat(chosen).tolist() == g[f"out.{choice}_idx"].tolist()
    opposite = {"normalised": "raw", "raw": "normalised"}[choice]
    assert torch.cat(chosen).tolist() != g[f"out.{opposite}_idx"].tolist()


@pytest.mark.parametrize("old", [0, 4])
def test_icarl_loss(old: int) -> None:
    g, number = golden("icarl_mammoth"), int(old > 0)
    logits = g["in.loss.logits"][:, :8].clone().requires_grad_()
    data = query_batch(logits, g["in.loss.label"], g["in.loss.old_sigmoid"].logit())
    head = {"head.weight": torch.eye(8), "head.bias": torch.zeros(8)}
    method = create_method("icarl")
    ctx = Context(Task(number, old, 8, 8, 2), 0, 1, {})
    loss, _ = method.loss(Features(), head, data, ctx)
    assert same(loss, g[f"out.loss{number}_seen"])
    assert not same(loss, g[f"quirk.loss{number}_all_columns"])
    assert same(grads(loss, logits)[0], g[f"out.loss{number}_seen_grad"])


def test_icarl_predicts_nearest_exemplar_mean() -> None:
    g, task = golden("icarl_mammoth"), Task(0, 0, 5, 5, 1)
    method, exemplars = (
        create_method("icarl"),
        FeatureImages(g["in.exemplar_feats"], g["in.exemplar_labels"]),
    )
    sums = exemplar_sums(torch.arange(40), exemplars, lambda batch: batch.x, 5)
    empty = {"mean": torch.zeros(5, 12), "count": torch.zeros(5)}
    state = method.update_from("after_rounds", empty, sums, server_context(task))
    test = query_batch(g["in.test_feats"], torch.zeros(15, dtype=torch.int64))
    scores = method.predict(Features(), state, test, task)
    assert scores.argmax(1).tolist() == g["out.pred"].tolist()
    assert same(-scores, g["out.dist"])
    assert not same(-scores, g["quirk.dist_with_hflip"])


# --- SS-IL


def linear(g, x: torch.Tensor, suffix: str = "") -> torch.Tensor:
    return x @ g[f"in.W{suffix}"].T + g[f"in.b{suffix}"]


def test_ssil_loss() -> None:
    """Compare SS-IL's loss with the recorded output.

    Seven new images and four exemplars are in one batch, with two finished tasks.
    """
    g, method = golden("ssil_loss"), create_method("ssil")
    x, y = torch.cat([g["in.x_new"], g["in.x_mem"]]), torch.cat([g["in.y_new"], g["in.y_mem"]])
    train = {k: v.clone().requires_grad_() for k, v in {"W": g["in.W"], "b": g["in.b"]}.items()}
    logits, teacher = x @ train["W"].T + train["b"], linear(g, x, "_old")
    cross_entropies = method.separated_loss(logits, y, 8)
    exact = {"rtol": 1e-9, "atol": 0.0}
    torch.testing.assert_close(cross_entropies[:7].sum(), g["out.ce_new_sum"], **exact)
    torch.testing.assert_close(cross_entropies[7:].sum(), g["out.ce_old_sum"], **exact)
    groups = torch.zeros(2, 8, dtype=torch.float64)
    groups[0, :4] = groups[1, 4:] = 1
    for s in range(2):
        distillation = method.task_distillation(
            logits[:, :8], teacher[:, :8], groups[s : s + 1]
        ).mean()
        torch.testing.assert_close(distillation, g["out.kd_per_task"][s], **exact)
    data = Batch(x, y, torch.ones(11, dtype=torch.float64), x, teacher)
    ctx = Context(
        Task(2, 8, 12, 12, 3), 0, 1, {"groups": torch.cat([groups, groups[:1]]).new_zeros(3, 12)}
    )
    ctx.shared["groups"][:2, :8] = groups
    loss, _ = method.loss(
        Features(), {"head.weight": train["W"], "head.bias": train["b"]}, data, ctx
    )
    torch.testing.assert_close(loss, g["out.total"], **exact)
    for gradient, name in zip(grads(loss, train["W"], train["b"]), ("W", "b"), strict=True):
        torch.testing.assert_close(gradient, g[f"out.grad_{name}"], rtol=1e-9, atol=1e-12)


def test_ssil_shifts_labels_by_first_new_class() -> None:
    """Shift labels of tasks of five and three classes; released code takes them modulo three."""
    g, method = golden("ssil_loss"), create_method("ssil")
    logits = linear(g, g["in.x_new"])[:, :8]
    loss = method.separated_loss(logits, g["in.y_new_uneven"], 5).sum()
    torch.testing.assert_close(loss, g["alt.uneven_ce_new_sum"], rtol=1e-9, atol=0.0)
    assert abs(float(loss - g["quirk.uneven_ce_new_sum"])) > 1


def test_ssil_loss_in_first_task() -> None:
    g, method = golden("ssil_loss"), create_method("ssil")
    logits = linear(g, g["in.x_new"])
    y = torch.tensor([0, 1, 2, 3, 0, 1, 2])
    ctx = Context(Task(0, 0, 4, 12, 3), 0, 1, {})
    head = {"head.weight": g["in.W"], "head.bias": g["in.b"].clone().requires_grad_()}
    data = Batch(g["in.x_new"], y, torch.ones(7, dtype=torch.float64), logits)
    loss, _ = method.loss(Features(), head, data, ctx)
    torch.testing.assert_close(loss, g["out.first_task_total"], rtol=1e-9, atol=0.0)
    torch.testing.assert_close(
        grads(loss, head["head.bias"])[0], g["out.first_task_grad_b"], rtol=1e-9, atol=1e-12
    )


# --- GeoDL


def test_geodl_kernel_and_losses() -> None:
    g = golden("geodl_full")
    old, weights = g["in.f_old"], torch.ones(8)
    for reading, name in ((False, "out.cosine"), (True, "quirk.distance")):
        new = g["in.f_new"].clone().requires_grad_()
        method = create_method("geodl", distance=reading)
        data = query_batch(new, torch.zeros(8, dtype=torch.int64), old)
        loss = method.geodesic(new, data).mean()
        torch.testing.assert_close(loss, g[name], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(grads(loss, new)[0], g[f"{name}_grad"], rtol=1e-4, atol=1e-6)
    kernel = flow_kernel(subspace(old, weights, 6), subspace(g["in.f_new"], weights, 6))
    torch.testing.assert_close(kernel, g["check.cosine_G"], rtol=1e-4, atol=2e-6)


# --- DDE


def test_dde_epoch() -> None:
    """Reproduce the neighbours of all images, and losses and gradients of two batches."""
    g, close = golden("dde_train"), {"rtol": 1e-5, "atol": 1e-5}
    method = create_method("dde", nearest=int(g["in.top_k"]))
    x, y, old = g["in.x"], g["in.labels"], int(g["in.n_old"])
    teacher_features = x @ g["in.E_old"].T + g["in.b_old"]
    new = (y >= old).nonzero()[:, 0]
    rows_of_new = torch.full_like(y, -1)
    rows_of_new[new] = torch.arange(len(new))
    nearest = neighbours(teacher_features, teacher_features[new], rows_of_new, method.nearest)
    assert new[nearest].tolist() == g["out.neighbours"].tolist()

    names = {"enc.weight": "E", "enc.bias": "b", "fc.fc2.weight": "W_new", "fc.sigma": "sigma"}
    leaves = {k: g[f"in.{v}"].clone().requires_grad_() for k, v in names.items()}
    train = {"head.new": leaves["fc.fc2.weight"], "sigma": leaves["fc.sigma"]}
    features = x @ leaves["enc.weight"].T + leaves["enc.bias"]
    rows = torch.cat([g["in.W_old"], g["in.W_new"]])
    answers = (g["in.sigma"] * cosines(features, rows)).softmax(-1).detach()[new]
    memory = {"near.position": torch.arange(len(y)), "near.row": nearest, "near.answer": answers}
    ctx = Context(Task(1, old, 8, 8, 2), 0, 1, {"head.old": g["in.W_old"]}, memory)
    for step, part in enumerate(torch.arange(len(y)).split(int(g["in.batch_size"]))):
        data = Batch(
            features[part],
            y[part],
            torch.ones(len(part)),
            x[part],
            teacher_features[part],
            position=part,
        )
        scores = method.scores(features[part], train, ctx)
        mixture_loss = method.classification(train["sigma"] * scores, data, ctx).mean()
        torch.testing.assert_close(mixture_loss, g["out.dce_nll"][step], **close)
        plain = torch.nn.functional.cross_entropy(train["sigma"] * scores, y[part])
        assert abs(float((mixture_loss - plain).detach())) > 1e-3
        loss, _ = method.loss(Features(), train, data, ctx)
        torch.testing.assert_close(loss, g["out.total"][step], **close)
        gradients = torch.autograd.grad(loss, list(leaves.values()), retain_graph=True)
        for name, gradient in zip(leaves, gradients, strict=True):
            torch.testing.assert_close(
                gradient, g[f"out.step{step}.grad.{name}"], rtol=1e-4, atol=1e-5
            )
