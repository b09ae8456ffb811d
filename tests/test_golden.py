"""Outputs of the official implementations (tests/golden/README.md), reproduced through this package's own functions."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from fczoo import Batch, Context, Task, Tree, create_method
from fczoo.aggregate import fedavg, prototype_reweight, prototype_weights
from fczoo.backbone import Backbone, ViTConfig, attend
from fczoo.data import Images, Stream
from fczoo.engine import Client, Engine, Plan
from fczoo.gaussians import normalised_cross_entropy
from fczoo.images import AUGMENTS
from fczoo.losses import task_cross_entropy
from fczoo.partition import make_partition
from fczoo.partitioners.dirichlet import Dirichlet
from fczoo.seeds import numpy_stream

F64, F64L, F32 = 1e-9, 1e-6, 2e-5


def golden(name: str) -> Tree:
    return load_file(Path(__file__).parent / "golden" / f"{name}.safetensors")


def error(ours: Tensor, official: Tensor) -> float:
    """max |a - b| / max |b|."""
    assert ours.shape == official.shape
    return float((ours.detach() - official).abs().max() / official.abs().max())


def whole_batch(x: Tensor, y: Tensor) -> Batch:
    return Batch(x, y, torch.ones(len(y), dtype=x.dtype), x)


@pytest.fixture(scope="module")
def micro() -> Backbone:
    config = ViTConfig("micro", image_size=32, patch_size=8, dim=48, depth=6, heads=4, mlp_dim=96, eps=1e-6)
    return Backbone(config, golden("common_micro_vit")).to(dtype=torch.float64)


@pytest.fixture(scope="module")
def images() -> Tensor:
    return golden("common_images")["micro_images"].double()


class Identity:
    """Stands in for a backbone where the official vectors start from features: what goes in comes out."""

    dtype, device = torch.float64, torch.device("cpu")

    def __call__(self, images: Tensor, plugs: Tree | None = None) -> Tensor:
        return images


class FeatureStore:
    """Stands in for an image store: the 'images' are features."""

    def __init__(self, features: Tensor, labels: Tensor):
        self.features, self.labels, self.backbone = features, labels, Identity()

    def view(self, index: Tensor) -> Tensor:
        return self.features[index]


# ---------------------------------------------------------------- PILoRA


class LocalStep:
    """One batch of 16 features, labels 10 to 19 of 30 classes; no earlier task."""

    def __init__(self) -> None:
        self.g = g = golden("pilora_loss_t0_d48")
        self.official = create_method("pilora", lr_lora=1e-3, means="running")
        self.task = Task(0, 10, 20, 30, 3)
        self.shared = {"frozen.before": g["centers"][:10], "frozen.after": g["centers"][20:]}
        self.train = {"prototype": g["centers"][10:20]}
        for part in "qv":
            self.train |= {f"lora.0.{part}.a": g[f"a_{part}"][0], f"lora.0.{part}.b": torch.zeros(48, 4, dtype=torch.float64)}
        self.batch = whole_batch(g["features"], g["labels"])
        self.context = Context(self.task, 0, 5, self.shared)

    def loss(self, method) -> Tensor:
        return method.loss(Identity(), self.train, self.batch, self.context)[0]


@pytest.fixture(scope="module")
def step() -> LocalStep:
    return LocalStep()


def test_pilora_distances(step: LocalStep) -> None:
    distances = step.official.distances(step.g["features"], step.g["centers"])
    assert error(distances, step.g["distances"]) < F64
    assert error(replace(step.official, distance="squared").distances(step.g["features"], step.g["centers"]), step.g["distances"]) > 1


def test_pilora_loss_terms(step: LocalStep) -> None:
    g, only_entropy = step.g, replace(step.official, pull=0.0)
    entropy = only_entropy.prototype_loss(g["features"], step.train, step.batch, step.context)
    both = step.official.prototype_loss(g["features"], step.train, step.batch, step.context)
    assert error(entropy, g["dce"]) < F64L
    assert error(both, g["dce_plus_pl"]) < F64L
    assert error((both - entropy) / step.official.pull, g["pl"]) < F64L
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
def test_pilora_loss_tells_readings_apart(step: LocalStep, wrong: dict) -> None:
    assert error(step.loss(replace(step.official, **wrong)), step.g["total"]) > 100 * F64L


def test_pilora_gradients(step: LocalStep) -> None:
    leaves = {k: v.clone().requires_grad_() for k, v in step.train.items()}
    loss, _ = step.official.loss(Identity(), leaves, step.batch, step.context)
    loss.backward()
    assert error(leaves["prototype"].grad, step.g["grad_centers"]) < F64L
    for part in "qv":
        assert error(leaves[f"lora.0.{part}.a"].grad, step.g[f"grad_a_{part}"]) < F64L
        assert leaves[f"lora.0.{part}.b"].grad is None  # features are given, so B does not enter


@pytest.mark.parametrize("together", [1, 2])
def test_pilora_step_of_the_engine(step: LocalStep, together: int) -> None:
    """One epoch of one batch: the upload holds the official tensors after Adam, and the class means seen on the way."""
    g = step.g
    engine = Engine(step.official, Identity(), FeatureStore(g["features"], g["labels"]), Plan(1, 16, AUGMENTS["none"], 0, together))
    clients = [Client(k, torch.arange(16)) for k in range(2)]
    payloads = engine.train({**step.shared, **step.train}, clients, step.context)
    for payload in payloads:
        assert error(payload["prototype"], g["centers_after"][10:20]) < F64L
        for part in "qv":
            assert error(payload[f"lora.0.{part}.a"], g[f"a_{part}_after"]) < F64L
            assert not payload[f"lora.0.{part}.b"].any()
        assert g["class_present"].all() and error(payload["class.mean"], g["class_means"]) < F64L
    assert torch.equal(g["centers_after"][:10], g["centers"][:10])  # the frozen ones stand still there, too


def test_pilora_step_tells_rates_apart(step: LocalStep) -> None:
    g = step.g
    swapped = replace(step.official, lr_lora=step.official.lr_prototype, lr_prototype=step.official.lr_lora)
    engine = Engine(swapped, Identity(), FeatureStore(g["features"], g["labels"]), Plan(1, 16, AUGMENTS["none"], 0))
    (payload,) = engine.train({**step.shared, **step.train}, [Client(0, torch.arange(16))], step.context)
    assert error(payload["prototype"], g["centers_after"][10:20]) > 1e-3
    assert error(payload["lora.0.q.a"], g["a_q_after"]) > 1e-3


HELD = [0, 1, 2]  # class 3 is held by nobody


def test_pilora_weights() -> None:
    g = golden("pilora_reweight_k5c4_f64")
    assert g["mask"].any(0).tolist() == [True, True, True, False]
    ours = prototype_weights(g["protos"], g["means"], g["mask"], 0.2)
    assert error(ours[:, HELD], g["weights"][:, HELD]) < F64L
    assert error(ours[:, 3], torch.full((5,), 0.2, dtype=torch.float64)) < F64
    assert error(ours[:, 3], 2 * g["weights"][:, 3]) < F64L  # officially 0.1 each, which is right for ten clients only


@pytest.mark.parametrize("wrong", [{"squared": True}, {"temperature": 5.0}, {"temperature": 1.0}], ids=str)
def test_pilora_weights_tell_readings_apart(wrong: dict) -> None:
    g = golden("pilora_reweight_k5c4_f64")
    ours = prototype_weights(g["protos"], g["means"], g["mask"], **{"temperature": 0.2, **wrong})
    assert error(ours[:, HELD], g["weights"][:, HELD]) > 1e-2


def test_pilora_server_step() -> None:
    g = golden("pilora_reweight_k5c4_f64")
    payloads = [
        {
            "prototype": g["protos"][k],
            "class.mean": g["means"][k],
            "class.count": g["mask"][k].double(),
            "lora.0.q.a": g["lora_a"][k],
            "num_samples": g["n_k"][k],
            "client": torch.tensor(k),
        }
        for k in range(5)
    ]
    for merged in (prototype_reweight(payloads), create_method("pilora").aggregate(payloads, fedavg)):
        assert error(merged["prototype"][HELD], g["merged"][HELD]) < F64L
        assert error(merged["prototype"][3], g["protos"][:, 3].mean(0)) < F64
        assert error(merged["prototype"][3], 2 * g["merged"][3]) < F64L
        assert error(merged["lora.0.q.a"], g["lora_a_avg"]) < F64L
    plain = create_method("pilora", reweight="average").aggregate(payloads, fedavg)
    assert error(plain["prototype"][HELD], g["merged"][HELD]) > 1e-2
    assert error(g["lora_a"].mean(0), g["lora_a_avg"]) > 1e-2  # not the unweighted mean


def summed_lora(g: Tree, last: int) -> Tree:
    """State of the method in task ``last``: that task's pair and the stacked earlier ones."""
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
    assert error(micro(images, create_method("pilora", merge="sum")._plugs(tree)), official) < F64
    assert error(micro(images), official) > 1e-3
    first = micro(images, create_method("pilora", merge="first")._plugs(tree))
    assert error(first, g["feature_sum_upto_task0"]) < F64
    crossed = micro(images, create_method("pilora", merge="factor_sum")._plugs(tree))
    sums = {f"lora.0.{part}.{side}": sum(g[f"{side}_{part}_{i}"] for i in range(last + 1)) for part in "qv" for side in "ab"}
    assert error(crossed, micro(images, sums)) < F64
    if last:
        assert error(first, official) > 1e-3 and error(crossed, official) > 1e-3


def test_pilora_forward_uses_q_and_v(micro: Backbone, images: Tensor) -> None:
    g = golden("pilora_mammoth_forward_micro")
    swapped = {"q": "v", "v": "q"}
    plugs = {f"lora.0.{swapped[part]}.{side}": g[f"{side}_{part}_0"] for part in "qv" for side in "ab"}
    assert error(micro(images, plugs), g["feature_sum_upto_task0"]) > 1e-3


# ---------------------------------------------------------------- FPPL


def fppl_tree(g: Tree, seen: int = 3) -> Tree:
    """The official prompt tensor [T, block, 4, 5, D] as the method's state in task ``seen - 1``."""
    tree = {"fusion.key": g["psi"], "fusion.scale": g["sigma"][0]}
    for i in range(5):
        prompts = g["prompt"][:seen, i].flatten(1, 2)
        tree[f"prompt.{i}"] = prompts[-1]
        if seen > 1:
            tree[f"past.{i}"] = prompts[:-1]
    return tree


def fused(tree: Tree, query: Tensor, **options: object) -> Tensor:
    prompts = create_method("fppl", **options).fused_prompts(tree, query)
    return torch.stack([prompts[f"deep.{i}"] for i in range(5)], 1)


def test_fppl_fusion() -> None:
    g = golden("fppl_fusion")
    soft, hard, one = fused(fppl_tree(g), g["query"]), fused(fppl_tree(g), g["query"], fusion="hard"), fused(fppl_tree(g, 1), g["query"])
    assert error(soft, g["fused"]) < F64
    assert error(hard, g["fused_wo_fusion"]) < F64
    assert error(one, g["fused_task1"]) < F64
    assert error(hard, g["fused"]) > 1e-2
    assert error(soft, g["fused_wo_fusion"]) > 1e-2


def test_fppl_fusion_weights() -> None:
    """Read off through one-hot prompts: the fused value in column t is the weight of task t."""
    g = golden("fppl_fusion")
    marks = torch.eye(3, dtype=torch.float64)
    tree = {"fusion.key": g["psi"], "past.0": marks[:2, None], "prompt.0": marks[2:]}
    method = create_method("fppl", blocks=(0,), length=1)
    for scale, official in ((g["sigma"][0], "weights"), (torch.ones((), dtype=torch.float64), "weights_sigma1")):
        ours = method.fused_prompts({**tree, "fusion.scale": scale}, g["query"])["deep.0"][:, 0]
        assert error(ours, g[official][:, :3]) < F64
    assert not g["weights"][:, 3:].any()
    assert error(g["weights_sigma1"], g["weights"]) > 1e-2  # so the scale is a factor, and is applied
    inverted = method.fused_prompts({**tree, "fusion.scale": 1 / g["sigma"][0]}, g["query"])["deep.0"][:, 0]
    assert error(inverted, g["weights"][:, :3]) > 1e-2


def test_fppl_forward(micro: Backbone, images: Tensor) -> None:
    g = golden("fppl_forward_micro")
    method, tree = create_method("fppl"), fppl_tree(g)
    tree |= {"head.weight": g["fc_weight"], "head.bias": g["fc_bias"]}
    assert error(micro(images), g["query"]) < F64
    assert error(fused(tree, g["query"]), g["fused"]) < F64
    features = micro(images, method.fused_prompts(tree, g["query"]))
    assert error(features, g["features"]) < F64
    batch = Batch(images, torch.zeros(4, dtype=torch.int64), torch.ones(4, dtype=torch.float64), g["query"])
    assert error(method.predict(micro, tree, batch, Task(2, 8, 12, 12, 5)), g["logits"]) < F64
    assert method.predict(micro, tree, batch, Task(1, 4, 8, 12, 5)).shape == (4, 8)


def test_fppl_forward_tells_readings_apart(micro: Backbone, images: Tensor) -> None:
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


class Contrast:
    """12 features of classes 4 to 7; prototypes of classes 0 to 7 are known."""

    def __init__(self) -> None:
        self.g = g = golden("fppl_unified_full")
        assert g["cur_classes"].tolist() == [4, 5, 6, 7] and g["proto_mask"][4:8].all()
        self.task = Task(1, 4, 8, 12, 3)
        self.context = self.known(g["protos"][4:8])

    def known(self, prototypes: Tensor) -> Context:
        return Context(self.task, 1, 5, {"prototype.mean": prototypes, "prototype.known": torch.ones(4, dtype=torch.float64)})

    def loss(self, features: Tensor, **options: object) -> Tensor:
        return create_method("fppl", **options).contrast(features, whole_batch(features, self.g["labels"]), self.context)


def test_fppl_unified_loss() -> None:
    c = Contrast()
    g = c.g
    features, logits = g["features"].clone().requires_grad_(), g["logits"].clone().requires_grad_()
    contrast, entropy = c.loss(features), task_cross_entropy(logits, whole_batch(features, g["labels"]), c.task)
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
        one = whole_batch(c.g["features"][i : i + 1], c.g["labels"][i : i + 1])
        assert error(create_method("fppl").contrast(one.x, one, c.context), c.g["per_sample"][i]) < F64


def test_fppl_contrast_tells_readings_apart() -> None:
    c = Contrast()
    g, task = c.g, Task(0, 0, 8, 12, 3)
    assert error(c.loss(g["features"], temperature=5.0), g["loss_ur"]) > 1e-2  # tau as a factor
    assert error(c.loss(g["features"], temperature=1.0), g["loss_ur"]) > 1e-2
    old_too = Context(task, 1, 5, {"prototype.mean": g["protos"][:8], "prototype.known": torch.ones(8, dtype=torch.float64)})
    negatives = create_method("fppl").contrast(g["features"], whole_batch(g["features"], g["labels"]), old_too)
    assert error(negatives, g["loss_ur"]) > 1e-2  # old prototypes as negatives
    assert error(F.cross_entropy(g["logits"], g["labels"]), g["loss_ce"]) > 1e-2  # all classes in the cross-entropy


STATISTICS = {
    "classes a client": lambda counts: (counts > 0).sum(1).mean(),
    "largest share of a class": lambda counts: (counts.max(0) / counts.sum(0)).mean(),
    "spread of client sizes": lambda counts: counts.sum(1).std(),
}


def split_statistics(counts: np.ndarray) -> np.ndarray:
    """[runs, statistics] of counts [runs, client, class]."""
    return np.array([[statistic(run) for statistic in STATISTICS.values()] for run in counts.astype(float)])


def standard_errors_apart(ours: np.ndarray, official: np.ndarray) -> np.ndarray:
    a, b = split_statistics(ours), split_statistics(official)
    return np.abs(a.mean(0) - b.mean(0)) / np.sqrt(a.var(0, ddof=1) / len(a) + b.var(0, ddof=1) / len(b))


def our_splits(beta: float, cap: bool = True) -> np.ndarray:
    labels = np.repeat(np.arange(10), 100)
    partitioner = Dirichlet(beta, draw="split", cap=cap, min_size=10, max_tries=10_000)
    runs = [partitioner(labels, 10, numpy_stream("golden", seed)) for seed in range(40)]
    return np.array([[np.bincount(labels[part], minlength=10) for part in parts] for parts in runs])


@pytest.mark.parametrize("beta", [0.1, 0.5, 1.0])
def test_fppl_partition(beta: float) -> None:
    official = golden("partition_fppl")[f"dirichlet_beta{beta}_counts"].numpy()
    apart = standard_errors_apart(our_splits(beta), official)
    assert (apart < 3).all(), dict(zip(STATISTICS, apart, strict=True))
    assert (standard_errors_apart(our_splits({0.1: 0.5, 0.5: 1.0, 1.0: 0.5}[beta]), official) > 3).any()
    assert standard_errors_apart(our_splits(beta, cap=False), official)[2] > 3  # the cap holds sizes together


def test_fppl_partition_over_the_data_set() -> None:
    """The released split is drawn once and cut into tasks afterwards: added up over five tasks it is the recorded one."""
    labels, cut = np.repeat(np.arange(10), 100), tuple(Task(t, 2 * t, 2 * t + 2, 10, 5) for t in range(5))
    images = Images(np.zeros((1000, 1, 1, 3), np.uint8), labels)
    stream = Stream("toy", images, images, np.arange(1000), tuple(range(10)), tuple("abcdefghij"), cut)
    spec = "dirichlet:0.5,scope=dataset,cap=on,min_size=10,max_tries=10000"
    owned = [[np.concatenate(c) for c in zip(*make_partition(stream, spec, 10, seed).tasks, strict=True)] for seed in range(40)]
    ours = np.array([[np.bincount(labels[part], minlength=10) for part in parts] for parts in owned])
    official = golden("partition_fppl")["dirichlet_beta0.5_counts"].numpy()
    assert (standard_errors_apart(ours, official) < 3).all()


# ---------------------------------------------------------------- HGP


def prefixes(prompt: Tensor, k: slice, v: slice) -> Tree:
    return {f"prefix.{i}.{part}": rows[where] for i, rows in enumerate(prompt) for part, where in (("k", k), ("v", v))}


FIRST, SECOND = slice(0, 20), slice(20, 40)


def test_hgp_forward(micro: Backbone, images: Tensor) -> None:
    g = golden("hgp_forward_micro")
    plugs = prefixes(g["prompt"], FIRST, SECOND)
    assert error(micro(images, plugs), g["features"]) < F64
    assert error(micro(images, {k: torch.zeros_like(v) for k, v in plugs.items()}), g["features_zero_prompt"]) < F64
    assert error(micro(images), g["features_no_prompt"]) < F64
    state = {**plugs, "head.weight": g["last_weight"], "head.bias": g["last_bias"]}
    batch = whole_batch(images, torch.zeros(4, dtype=torch.int64))
    assert error(create_method("hgp").predict(micro, state, batch, Task(2, 8, 12, 12, 3)), g["logits"]) < F64


def test_hgp_forward_tells_readings_apart(micro: Backbone, images: Tensor) -> None:
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
    assert error(g["features_zero_prompt"], g["features_no_prompt"]) > 1e-3  # zero rows still take attention


def test_hgp_gaussians() -> None:
    """Official: classes 4, 6, 7 of the task 4..7; class 5 has one image and is dropped there, but kept here."""
    g = golden("hgp_stats_diag")
    method, task = create_method("hgp"), Task(1, 4, 8, 8, 2)
    context = Context(task, 0, 1, {})
    sums = method.stats(Identity(), {}, whole_batch(g["features"], g["labels"]), context)
    ours = method.pack({}, sums, context)
    assert ours["gauss.label"].tolist() == [4, 5, 6, 7] and g["classes"].tolist() == [4, 6, 7]
    assert ours["gauss.count"].tolist() == [40, 1, 17, 2] and g["counts"].tolist() == [40, 17, 2]
    several = [0, 2, 3]
    assert error(ours["gauss.mean"][several], g["means"]) < F32
    assert error(ours["gauss.var"][several], g["variances"]) < F32
    assert error(ours["gauss.mean"][1], g["features"][g["labels"] == 5][0]) < F32
    assert error(ours["gauss.var"][1], g["variances"].mean(0)) < F32
    biased = g["variances"] * ((g["counts"] - 1) / g["counts"])[:, None]
    assert error(biased, g["variances"]) > 1e-2  # so n instead of n - 1 would show


def test_hgp_rebalance_loss() -> None:
    g, seen = golden("hgp_rebalance_loss"), 8
    assert int(g["n_seen"]) == seen
    for logits, target, loss, grad in zip(g["logits"], g["targets"], g["loss"], g["grad_logits"], strict=True):
        leaf = logits.clone().requires_grad_()
        ours = normalised_cross_entropy(leaf[:, :seen], target, create_method("hgp").logit_norm)
        ours.backward()
        assert error(ours, loss) < F32
        assert error(leaf.grad, grad) < F32
        assert not leaf.grad[:, seen:].any()
        for wrong in (None, 10.0, 1.0):
            assert error(normalised_cross_entropy(logits[:, :seen], target, wrong), loss) > 1e-2
        assert error(normalised_cross_entropy(logits, target, 0.1), loss) > 1e-3  # norm and softmax over unseen classes, too


# ---------------------------------------------------------------- prefix attention


def one_block(g: Tree) -> Backbone:
    """A backbone whose only block has the recorded attention; everything else is zero."""
    config = ViTConfig("one", image_size=8, patch_size=8, dim=24, depth=1, heads=int(g["in.heads"]), mlp_dim=8)
    weights = {name: torch.zeros(shape) for name, shape in config.shapes().items()}
    for layer in ("qkv", "proj"):
        weights[f"blocks.0.attn.{layer}.weight"], weights[f"blocks.0.attn.{layer}.bias"] = g[f"in.{layer}_w"], g[f"in.{layer}_b"]
    return Backbone(config, weights)


def test_prefix_attention_of_the_backbone() -> None:
    g = golden("prefix_attention")
    backbone, everything = one_block(g), slice(0, 5)

    def run(plugs: Tree) -> Tensor:
        return backbone._attention(g["in.x"], 0, everything, plugs)

    assert error(run({}), g["out.y_no_prefix"]) < F32
    assert error(run({"prefix.0.k": g["in.pk"], "prefix.0.v": g["in.pv"]}), g["out.y"]) < F32
    assert error(run({"prefix.0.k": g["in.pv"], "prefix.0.v": g["in.pk"]}), g["out.y"]) > 1e-2  # swapped
    assert error(run({"prefix.0.k": g["in.pk"][:1].expand(3, -1, -1), "prefix.0.v": g["in.pv"]}), g["out.y"]) > 1e-2  # not the sample's own
    assert error(run({}), g["out.y"]) > 1e-2


def test_prefix_attention_by_concatenation() -> None:
    """The same from the formula: rows in front of projected keys and values, each head a slice of the width."""
    g = golden("prefix_attention")
    query, key, value = F.linear(g["in.x"], g["in.qkv_w"], g["in.qkv_b"]).chunk(3, -1)

    def heads(rows: Tensor) -> Tensor:
        return rows.unflatten(-1, (int(g["in.heads"]), -1)).transpose(1, 2)

    mixed = attend(heads(query), heads(torch.cat([g["in.pk"], key], 1)), heads(torch.cat([g["in.pv"], value], 1)))
    assert error(F.linear(mixed.transpose(1, 2).flatten(2), g["in.proj_w"], g["in.proj_b"]), g["out.y"]) < F32
