"""Recorded outputs of HGP's official code (tests/methods/golden/README.md),
reproduced through this package's own functions.
"""

import torch
from torch import Tensor

from fczoo import Context, Task, Tree, create_method, whole_batch
from fczoo.core.backbone import Backbone
from fczoo.functional.losses import normalised_cross_entropy
from helpers_golden import F32, F64, Identity, error, golden


def prefixes(prompt: Tensor, k: slice, v: slice) -> Tree:
    return {
        f"prefix.{i}.{part}": rows[columns]
        for i, rows in enumerate(prompt)
        for part, columns in (("k", k), ("v", v))
    }


FIRST, SECOND = slice(0, 20), slice(20, 40)


def test_hgp_forward(micro: Backbone, images: Tensor) -> None:
    g = golden("hgp_forward_micro")
    plugs = prefixes(g["prompt"], FIRST, SECOND)
    assert error(micro(images, plugs), g["features"]) < F64
    assert (
        error(
            micro(images, {k: torch.zeros_like(v) for k, v in plugs.items()}),
            g["features_zero_prompt"],
        )
        < F64
    )
    assert error(micro(images), g["features_no_prompt"]) < F64
    state = {**plugs, "head.weight": g["last_weight"], "head.bias": g["last_bias"]}
    batch = whole_batch(images, torch.zeros(4, dtype=torch.int64), images)
    assert (
        error(create_method("hgp").predict(micro, state, batch, Task(2, 8, 12, 12, 3)), g["logits"])
        < F64
    )


def test_hgp_forward_differs_from_wrong_variants(micro: Backbone, images: Tensor) -> None:
    g = golden("hgp_forward_micro")
    right = prefixes(g["prompt"], FIRST, SECOND)
    readings = {
        "swapped": prefixes(g["prompt"], SECOND, FIRST),
        "interleaved": prefixes(g["prompt"], slice(0, 40, 2), slice(1, 40, 2)),
        "all rows for both": prefixes(g["prompt"], slice(0, 40), slice(0, 40)),
        "four blocks": {k: v for k, v in right.items() if not k.startswith("prefix.4.")},
        "deep tokens": {f"deep.{i}": rows for i, rows in enumerate(g["prompt"])},
    }
    for name, plugs in readings.items():
        assert error(micro(images, plugs), g["features"]) > 1e-2, name
    assert (
        error(g["features_zero_prompt"], g["features_no_prompt"]) > 1e-3
    )  # zero rows still receive attention


def test_hgp_gaussians() -> None:
    """Compare Gaussians with the recorded output.

    The official code drops class 5 of the task 4..7, which has one image; it is kept here.
    """
    g = golden("hgp_stats_diag")
    method, task = create_method("hgp"), Task(1, 4, 8, 8, 2)
    context = Context(task, 0, 1, {})
    sums = method.collect(
        "after_training",
        Identity(),
        {},
        whole_batch(g["features"], g["labels"], g["features"]),
        context,
    )
    ours = method.make_upload({}, sums, context)
    assert ours["gauss.label"].tolist() == [4, 5, 6, 7]
    assert g["classes"].tolist() == [4, 6, 7]
    assert ours["gauss.count"].tolist() == [40, 1, 17, 2]
    assert g["counts"].tolist() == [40, 17, 2]
    rows = [0, 2, 3]
    assert error(ours["gauss.mean"][rows], g["means"]) < F32
    assert error(ours["gauss.var"][rows], g["variances"]) < F32
    assert error(ours["gauss.mean"][1], g["features"][g["labels"] == 5][0]) < F32
    assert error(ours["gauss.var"][1], g["variances"].mean(0)) < F32
    official = create_method("hgp", keep_single=False).make_upload({}, sums, context)
    assert official["gauss.label"].tolist() == [4, 6, 7]
    assert official["gauss.count"].tolist() == [
        40,
        17,
        2,
    ]
    assert error(official["gauss.mean"], g["means"]) < F32
    assert error(official["gauss.var"], g["variances"]) < F32
    divided_by_n = g["variances"] * ((g["counts"] - 1) / g["counts"])[:, None]
    assert error(divided_by_n, g["variances"]) > 1e-2  # a divisor n instead of n - 1 would differ


def test_hgp_rebalance_loss() -> None:
    g, stop = golden("hgp_rebalance_loss"), 8
    assert int(g["n_seen"]) == stop
    for logits, target, loss, grad in zip(
        g["logits"], g["targets"], g["loss"], g["grad_logits"], strict=True
    ):
        leaf = logits.clone().requires_grad_()
        ours = normalised_cross_entropy(leaf[:, :stop], target, create_method("hgp").logit_norm)
        ours.backward()
        assert error(ours, loss) < F32
        assert error(leaf.grad, grad) < F32
        assert not leaf.grad[:, stop:].any()
        for wrong in (None, 10.0, 1.0):
            assert error(normalised_cross_entropy(logits[:, :stop], target, wrong), loss) > 1e-2
        assert (
            error(normalised_cross_entropy(logits, target, 0.1), loss) > 1e-3
        )  # norm and softmax that include unseen classes
