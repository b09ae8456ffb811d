"""Recorded outputs of FPPL's official code (tests/methods/golden/README.md),
reproduced through this package's own functions.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo import Batch, Context, Task, Tree, create_method, whole_batch
from fczoo.core.backbone import Backbone
from fczoo.core.registry import PARTITIONERS
from fczoo.core.seeds import numpy_stream
from fczoo.data.dataset import Images
from fczoo.data.partition import make_partition
from fczoo.data.stream import Stream
from fczoo.functional.losses import task_cross_entropy
from fczoo.partitioners.dirichlet import Dirichlet
from fczoo.partitioners.quantity import Quantity
from helpers_golden import F64, error, golden

# ---------------------------------------------------------------- fused prompts


def fppl_tree(g: Tree, seen: int = 3) -> Tree:
    """Return the official prompt tensor as the method's state in task ``seen - 1``.

    Its shape is [T, block, 4, 5, D].
    """
    tree = {"fusion.key": g["psi"], "fusion.scale": g["sigma"][0]}
    for i in range(5):
        prompts = g["prompt"][:seen, i].flatten(1, 2)
        tree[f"prompt.{i}"] = prompts[-1]
        if seen > 1:
            tree[f"past.{i}"] = prompts[:-1]
    return tree


def fuse_prompts(tree: Tree, query: Tensor, **options: object) -> Tensor:
    prompts = create_method("fppl", **options).fused_prompts(tree, query)
    return torch.stack([prompts[f"deep.{i}"] for i in range(5)], 1)


def test_fppl_fusion() -> None:
    g = golden("fppl_fusion")
    soft, hard, one = (
        fuse_prompts(fppl_tree(g), g["query"]),
        fuse_prompts(fppl_tree(g), g["query"], fusion="hard"),
        fuse_prompts(fppl_tree(g, 1), g["query"]),
    )
    assert error(soft, g["fused"]) < F64
    assert error(hard, g["fused_wo_fusion"]) < F64
    assert error(one, g["fused_task1"]) < F64
    assert error(hard, g["fused"]) > 1e-2
    assert error(soft, g["fused_wo_fusion"]) > 1e-2


def test_fppl_fusion_weights() -> None:
    """Compare fusion weights with the recorded output.

    One-hot prompts show them: the fused value in column t is the weight of task t.
    """
    g = golden("fppl_fusion")
    marks = torch.eye(3, dtype=torch.float64)
    tree = {"fusion.key": g["psi"], "past.0": marks[:2, None], "prompt.0": marks[2:]}
    method = create_method("fppl", blocks=(0,), length=1)
    for scale, official in (
        (g["sigma"][0], "weights"),
        (torch.ones((), dtype=torch.float64), "weights_sigma1"),
    ):
        ours = method.fused_prompts({**tree, "fusion.scale": scale}, g["query"])["deep.0"][:, 0]
        assert error(ours, g[official][:, :3]) < F64
    assert not g["weights"][:, 3:].any()
    assert error(g["weights_sigma1"], g["weights"]) > 1e-2  # the scale is applied as a factor
    inverse_scale = method.fused_prompts({**tree, "fusion.scale": 1 / g["sigma"][0]}, g["query"])[
        "deep.0"
    ][:, 0]
    assert error(inverse_scale, g["weights"][:, :3]) > 1e-2


def test_fppl_forward(micro: Backbone, images: Tensor) -> None:
    g = golden("fppl_forward_micro")
    method, tree = create_method("fppl"), fppl_tree(g)
    tree |= {"head.weight": g["fc_weight"], "head.bias": g["fc_bias"]}
    assert error(micro(images), g["query"]) < F64
    assert error(fuse_prompts(tree, g["query"]), g["fused"]) < F64
    features = micro(images, method.fused_prompts(tree, g["query"]))
    assert error(features, g["features"]) < F64
    batch = Batch(
        images, torch.zeros(4, dtype=torch.int64), torch.ones(4, dtype=torch.float64), g["query"]
    )
    assert error(method.predict(micro, tree, batch, Task(2, 8, 12, 12, 5)), g["logits"]) < F64
    assert method.predict(micro, tree, batch, Task(1, 4, 8, 12, 5)).shape == (4, 8)


def test_fppl_forward_differs_from_wrong_variants(micro: Backbone, images: Tensor) -> None:
    g = golden("fppl_forward_micro")
    tree = fppl_tree(g)
    right = create_method("fppl").fused_prompts(tree, g["query"])
    as_prefix = {f"prefix.{i}.{part}": right[f"deep.{i}"] for i in range(5) for part in "kv"}
    readings = {
        "hard": create_method("fppl", fusion="hard").fused_prompts(tree, g["query"]),
        "four blocks": {k: v for k, v in right.items() if k != "deep.4"},
        "six blocks": {**right, "deep.5": right["deep.4"]},
        "one later": {f"deep.{i + 1}": right[f"deep.{i}"] for i in range(5)},
        "prefixes": as_prefix,
        "input only": {"tokens": right["deep.0"]},
    }
    for name, plugs in readings.items():
        assert error(micro(images, plugs), g["features"]) > 1e-3, name


# ---------------------------------------------------------------- the loss


class Contrast:
    """Hold 12 features of classes 4 to 7; prototypes of classes 0 to 7 are known."""

    def __init__(self) -> None:
        self.g = g = golden("fppl_unified_full")
        assert g["cur_classes"].tolist() == [4, 5, 6, 7] and g["proto_mask"][4:8].all()
        self.task = Task(1, 4, 8, 12, 3)
        self.context = self.context_of(g["protos"][4:8])

    def context_of(self, prototypes: Tensor) -> Context:
        return Context(
            self.task,
            1,
            5,
            {"prototype.mean": prototypes, "prototype.known": torch.ones(4, dtype=torch.float64)},
        )

    def loss(self, features: Tensor, **options: object) -> Tensor:
        return create_method("fppl", **options).contrast(
            features, whole_batch(features, self.g["labels"], features), self.context
        )


def test_fppl_unified_loss() -> None:
    c = Contrast()
    g = c.g
    features, logits = g["features"].clone().requires_grad_(), g["logits"].clone().requires_grad_()
    contrast, entropy = (
        c.loss(features),
        task_cross_entropy(logits, whole_batch(features, g["labels"], features), c.task),
    )
    assert error(contrast, g["loss_ur"]) < F64
    assert error(entropy, g["loss_ce"]) < F64
    total = entropy + create_method("fppl").unify * contrast
    assert error(total, g["loss_total"]) < F64
    total.backward()
    assert error(features.grad, g["grad_features"]) < F64
    assert error(logits.grad, g["grad_logits"]) < F64
    assert not logits.grad[:, [0, 1, 2, 3, 8, 9, 10, 11]].any()


def test_fppl_contrast_of_single_samples() -> None:
    c = Contrast()
    assert c.g["used"].all()
    for i in range(12):
        one = whole_batch(
            c.g["features"][i : i + 1], c.g["labels"][i : i + 1], c.g["features"][i : i + 1]
        )
        assert (
            error(create_method("fppl").contrast(one.x, one, c.context), c.g["per_sample"][i]) < F64
        )


def test_fppl_contrast_differs_from_wrong_variants() -> None:
    c = Contrast()
    g, task = c.g, Task(0, 0, 8, 12, 3)
    assert error(c.loss(g["features"], temperature=5.0), g["loss_ur"]) > 1e-2  # tau as a factor
    assert error(c.loss(g["features"], temperature=1.0), g["loss_ur"]) > 1e-2
    old_too = Context(
        task,
        1,
        5,
        {"prototype.mean": g["protos"][:8], "prototype.known": torch.ones(8, dtype=torch.float64)},
    )
    negatives = create_method("fppl").contrast(
        g["features"], whole_batch(g["features"], g["labels"], g["features"]), old_too
    )
    assert error(negatives, g["loss_ur"]) > 1e-2  # old prototypes as negatives
    assert (
        error(F.cross_entropy(g["logits"], g["labels"]), g["loss_ce"]) > 1e-2
    )  # all classes in the cross-entropy


# ---------------------------------------------------------------- the partition


STATISTICS = {
    "classes a client": lambda counts: (counts > 0).sum(1).mean(),
    "largest share of a class": lambda counts: (counts.max(0) / counts.sum(0)).mean(),
    "spread of client sizes": lambda counts: counts.sum(1).std(),
}


def split_statistics(counts: np.ndarray) -> np.ndarray:
    """Return [runs, statistics] of counts [runs, client, class]."""
    return np.array(
        [[statistic(run) for statistic in STATISTICS.values()] for run in counts.astype(float)]
    )


def difference_in_standard_errors(ours: np.ndarray, official: np.ndarray) -> np.ndarray:
    a, b = split_statistics(ours), split_statistics(official)
    return np.abs(a.mean(0) - b.mean(0)) / np.sqrt(
        a.var(0, ddof=1) / len(a) + b.var(0, ddof=1) / len(b)
    )


def our_splits(beta: float, cap: bool = True) -> np.ndarray:
    labels = np.repeat(np.arange(10), 100)
    partitioner = Dirichlet(beta, draw="split", cap=cap, min_size=10, max_tries=10_000)
    runs = [partitioner(labels, 10, numpy_stream("golden", seed)) for seed in range(40)]
    return np.array([[np.bincount(labels[part], minlength=10) for part in parts] for parts in runs])


@pytest.mark.parametrize("beta", [0.1, 0.5, 1.0])
def test_fppl_partition(beta: float) -> None:
    official = golden("partition_fppl")[f"dirichlet_beta{beta}_counts"].numpy()
    errors = difference_in_standard_errors(our_splits(beta), official)
    assert (errors < 3).all(), dict(zip(STATISTICS, errors, strict=True))
    assert (
        difference_in_standard_errors(our_splits({0.1: 0.5, 0.5: 1.0, 1.0: 0.5}[beta]), official)
        > 3
    ).any()
    assert (
        difference_in_standard_errors(our_splits(beta, cap=False), official)[2] > 3
    )  # the cap reduces the variance of sizes


def test_fppl_partition_over_data_set() -> None:
    """Match the distribution of the released partition over the data set.

    The released code draws once and cuts into tasks afterwards. The sums over five tasks are
    compared with the recorded counts.
    """
    labels, cut = (
        np.repeat(np.arange(10), 100),
        tuple(Task(t, 2 * t, 2 * t + 2, 10, 5) for t in range(5)),
    )
    images = Images(np.zeros((1000, 1, 1, 3), np.uint8), labels)
    stream = Stream(
        "toy", images, images, np.arange(1000), tuple(range(10)), tuple("abcdefghij"), cut
    )
    spec = "dirichlet:0.5,scope=dataset,cap=on,min_size=10,max_tries=10000"
    splits = [
        [np.concatenate(c) for c in zip(*make_partition(stream, spec, 10, seed).tasks, strict=True)]
        for seed in range(40)
    ]
    ours = np.array(
        [[np.bincount(labels[part], minlength=10) for part in parts] for parts in splits]
    )
    official = golden("partition_fppl")["dirichlet_beta0.5_counts"].numpy()
    assert (difference_in_standard_errors(ours, official) < 3).all()


@pytest.mark.parametrize("alpha", [2, 4])
def test_fppl_partition_by_quantity(alpha: int) -> None:
    """Match the distribution of the released partition by quantity.

    The record gives alpha as a fraction of the ten classes. Every client owns the class of its
    number.
    """
    labels, partitioner = (
        np.repeat(np.arange(10), 100),
        Quantity(alpha, anchored=True, scope="dataset"),
    )
    runs = [partitioner(labels, 10, numpy_stream("golden", seed)) for seed in range(40)]
    ours = np.array([[np.bincount(labels[part], minlength=10) for part in parts] for parts in runs])
    official = golden("partition_fppl")[f"quantity_alpha{alpha / 10}_counts"].numpy()
    for counts in (ours, official):
        assert (counts > 0).sum(2).tolist() == [[alpha] * 10] * 40
        assert all((run.diagonal() > 0).all() for run in counts)
    varying = [1, 2]  # the number of classes per client is constant
    with np.errstate(invalid="ignore"):
        errors = difference_in_standard_errors(ours, official)
    assert (errors[varying] < 3).all(), errors
    without_anchors = np.array(
        [
            [
                np.bincount(labels[p], minlength=10)
                for p in Quantity(alpha)(labels, 10, numpy_stream("golden", s))
            ]
            for s in range(40)
        ]
    )
    assert not all((run.diagonal() > 0).all() for run in without_anchors)


def test_fppl_partition_without_skew() -> None:
    """Give every client ten images of every class with beta 0, which means IID."""
    labels = np.repeat(np.arange(10), 100)
    ours = [
        np.bincount(labels[part], minlength=10).tolist()
        for part in PARTITIONERS.create("iid")(labels, 10, numpy_stream("golden", 0))
    ]
    assert [ours] * 40 == golden("partition_fppl")["dirichlet_beta0_counts"].tolist()
