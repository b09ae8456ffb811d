"""Scalars that are uploaded and stored, counted in real trees, equal the papers' printed numbers.

Counts are of scalars by group of tensors. As in the papers, these are not counted: FPPL's
scalar ``fusion.scale``, class labels and client numbers, the sample counts of PILoRA's class means,
and the usage counts of FCILPT's pools (which its clients apply before they upload, while here the
server does).
"""

from dataclasses import replace

import pytest
import torch

from fczoo import Batch, Context, Method, Task, Tree, create_method
from fczoo.core.backbone import Backbone
from fczoo.core.seeds import torch_stream
from fczoo.core.tree import drop, select
from fczoo.core.vit_config import ViTConfig

WIDTH = 768


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    """Return a backbone with ViT-B's width and enough blocks for every prompt.

    All else is as small as it can be.
    """
    config = ViTConfig(
        "wide", image_size=16, patch_size=16, dim=WIDTH, depth=5, heads=12, mlp_dim=1
    )
    return Backbone(config, {name: torch.zeros(shape) for name, shape in config.shapes().items()})


def schedule(classes: int, tasks: int) -> list[Task]:
    size = classes // tasks
    return [Task(t, t * size, (t + 1) * size, classes, tasks) for t in range(tasks)]


def states(method: Method, backbone: Backbone, tasks: list[Task]) -> list[Tree]:
    """Return the server's state as each task begins, without training."""
    state: Tree = {}
    trees = []
    for task in tasks:
        state = method.begin_task(state, task, backbone, torch_stream("counts", task.index))
        trees.append(state)
    return trees


def sums(task: Task, held: int) -> Tree:
    """Return the sums of a client with two images of each of ``held`` classes."""
    count = torch.zeros(task.size)
    count[:held] = 2
    rows = torch.ones(task.size, WIDTH) * count[:, None]
    return {"class.count": count, "class.sum": rows, "class.squares": rows}


def upload(method: Method, state: Tree, task: Task, held: int) -> Tree:
    return method.make_upload(
        select(state, *method.training().optims), sums(task, held), Context(task, 0, 1, state)
    )


def size(tree: Tree, *prefixes: str) -> int:
    """Count the scalars in some groups, or in all."""
    return sum(v.numel() for v in (select(tree, *prefixes) if prefixes else tree).values())


# ---------------------------------------------------------------- FPPL


@pytest.mark.parametrize(
    ("classes", "tasks", "comm", "estg", "param"),
    [(100, 10, 169_060, 768_000, 84_480), (200, 20, 253_640, 1_536_000, 92_160)],
)
def test_fppl_counts_match_paper(
    backbone: Backbone, classes: int, tasks: int, comm: int, estg: int, param: int
) -> None:
    method, plan = create_method("fppl"), schedule(classes, tasks)
    for state, task in (
        (s, t)
        for s, t in zip(states(method, backbone, plan), plan, strict=True)
        if t.index in (0, tasks - 1)
    ):
        payload = upload(method, state, task, held=task.size)
        groups = {
            "prompt.": 5 * 20 * WIDTH,
            "fusion.key": tasks * WIDTH,
            "head.": classes * (WIDTH + 1),
            "local.mean": classes // tasks * WIDTH,
        }
        assert {g: size(payload, g) for g in groups} == groups
        assert (
            sum(groups.values()) == size(drop(payload, "fusion.scale", "local.label")) == comm
        )  # COMM
        assert size(payload, "fusion.scale") == 1
        assert size(payload, "local.label") == task.size
        assert (
            size(payload, "prompt.", "fusion.key") == param
        )  # PARAM: trainable without the classifier
    assert size(state, "prompt.", "past.") == estg  # ESTG: prompts of all tasks, at the end


def test_fppl_sends_prototypes_of_held_classes_only(backbone: Backbone) -> None:
    method, (task, *_) = create_method("fppl"), schedule(100, 10)
    (state,) = states(method, backbone, [task])
    full, part = (upload(method, state, task, classes) for classes in (10, 3))
    assert size(full, "local.mean") - size(part, "local.mean") == 7 * WIDTH
    assert size(drop(full, "local.")) == size(drop(part, "local."))


def test_fppl_state_grows_by_one_prompt_per_task(backbone: Backbone) -> None:
    sizes = [
        size(s, "prompt.", "past.")
        for s in states(create_method("fppl"), backbone, schedule(100, 10))
    ]
    assert sizes == [76_800 * (t + 1) for t in range(10)]


# ---------------------------------------------------------------- PILoRA


def test_pilora_counts_match_paper(backbone: Backbone) -> None:
    method, plan = create_method("pilora"), schedule(100, 10)
    for state, task in zip(states(method, backbone, plan), plan, strict=True):
        payload = upload(method, state, task, held=10)
        assert size(payload, "lora.") == 12_288  # 4 matrices of 4 x 768
        assert size(payload, "prototype") == size(payload, "class.mean") == 10 * WIDTH
        assert size(drop(payload, "class.count")) == 27_648
        assert size(payload, "class.count") == 10
        assert size(state, "past.") == 12_288 * task.index
        assert (
            size(state, "prototype", "frozen.") == 100 * WIDTH
        )  # the released code prints 76,800 for its prototypes


def test_pilora_upload_scales_with_rank_and_blocks(backbone: Backbone) -> None:
    method, (task, *_) = create_method("pilora", rank=8, blocks=(0, 2, 4)), schedule(100, 10)
    (state,) = states(method, backbone, [task])
    assert size(upload(method, state, task, held=10), "lora.") == 2 * 3 * 12_288


# ---------------------------------------------------------------- HGP


@pytest.mark.parametrize(("classes", "tasks"), [(100, 10), (200, 10)])
@pytest.mark.parametrize("held", [10, 4, 1])
def test_hgp_counts_match_paper(backbone: Backbone, classes: int, tasks: int, held: int) -> None:
    method, (task, *_) = create_method("hgp"), schedule(classes, tasks)
    (state,) = states(method, backbone, [task])
    payload = upload(method, state, task, held)
    head = {100: 76_900, 200: 153_800}[classes]
    assert size(payload, "prefix.") == 768_000
    assert size(payload, "head.") == head == classes * (WIDTH + 1)
    assert size(payload, "gauss.count", "gauss.mean", "gauss.var") == held * (2 * WIDTH + 1)
    assert size(drop(payload, "gauss.label")) == 768_000 + head + held * 1537
    assert size(payload, "gauss.label") == held


def test_hgp_with_200_rows_doubles_prefix_size(backbone: Backbone) -> None:
    """Use 200 rows for keys and 200 for values, as the paper can be read."""
    (state,) = states(create_method("hgp", prefix_len=200), backbone, schedule(100, 10)[:1])
    assert size(state, "prefix.") == 1_536_000


def test_hgp_state_size_is_constant(backbone: Backbone) -> None:
    trees = states(create_method("hgp"), backbone, schedule(100, 10))
    assert {size(s, "prefix.", "head.") for s in trees} == {768_000 + 76_900}


# ---------------------------------------------------------------- FCILPT


@pytest.mark.parametrize(
    ("dataset", "classes", "pool"),
    [
        ("cifar100", 100, 49_920),  # 10 (1 + 5) + 5 = 65 rows
        ("miniimagenet", 100, 105_984),  # 19 (1 + 6) + 5 = 138 rows
        ("tinyimagenet", 200, 111_360),  # 24 (1 + 5) + 1 = 145 rows
    ],
)
def test_fcilpt_counts_match_paper(
    backbone: Backbone, dataset: str, classes: int, pool: int
) -> None:
    method, (task, *_) = create_method("fcilpt", dataset), schedule(classes, 10)
    (state,) = states(method, backbone, [task])
    payload = method.make_upload(
        select(state, *method.training().optims),
        {"usage": torch.zeros(method.size)},
        Context(task, 0, 1, state),
    )
    assert size(payload, "pool.", "common") == pool
    assert size(payload, "head.") == classes * (WIDTH + 1)
    assert size(drop(payload, "usage")) == pool + classes * (WIDTH + 1)
    assert size(payload, "usage") == method.size


# ---------------------------------------------------------------- baselines


def test_fedavg_counts_match_tune_option(backbone: Backbone) -> None:
    (task, *_) = schedule(100, 10)
    method = create_method("fedavg")
    weights = sum(w.numel() for w in backbone.weights.values())
    for tune, slow in (("head", 0), ("lora", 12_288), ("full", weights)):
        variant = replace(method, tune=tune)
        (state,) = states(variant, backbone, [task])
        payload = variant.make_upload(
            select(state, *variant.training().optims), {}, Context(task, 0, 1, state)
        )
        assert size(payload) == slow + 76_900


def test_fedncm_uploads_class_sums_without_training(backbone: Backbone) -> None:
    method, (task, *_) = create_method("fedncm"), schedule(100, 10)
    (state,) = states(method, backbone, [task])
    batch = Batch(torch.empty(4, 0), torch.arange(4), torch.ones(4), torch.ones(4, WIDTH))
    sums = method.collect("task_start", backbone, state, batch, Context(task, 0, 1, state))
    assert size(sums) == 10 * (WIDTH + 1) and not method.training().optims


# --- the six figures of FPPL's table, 200 classes in 20 tasks

HEAD = 200 * (WIDTH + 1)
FULL = 85_798_656 + HEAD  # ViT-B/16 and the head


@pytest.fixture(scope="module")
def vit_base() -> Backbone:
    """Return ViT-B/16 on the meta device, without values."""
    config = ViTConfig(
        "vit_base_patch16_224",
        image_size=224,
        patch_size=16,
        dim=WIDTH,
        depth=12,
        heads=12,
        mlp_dim=3072,
    )
    return Backbone(
        config, {name: torch.empty(shape, device="meta") for name, shape in config.shapes().items()}
    )


@pytest.mark.parametrize("name", ["fedavg", "ewc", "lwf", "fedproto"])
def test_full_fine_tuning_uploads_whole_network(vit_base: Backbone, name: str) -> None:
    method, (task, *_) = create_method(name), schedule(200, 20)
    (state,) = states(method, vit_base, [task])
    payload = upload(method, state, task, held=task.size)
    assert size(payload, "full.", "head.") == FULL == 85_952_456


def test_glfc_uploads_one_gradient_per_new_class(vit_base: Backbone) -> None:
    method, (task, *_) = create_method("glfc"), schedule(200, 20)
    (state,) = states(method, vit_base, [task])
    gradients = {
        f"image_gradient.{k}": v.expand(task.size, *v.shape)
        for k, v in select(state, "lenet.").items()
    }
    assert (
        size(
            {**upload(method, state, task, held=10), **gradients},
            "full.",
            "head.",
            "image_gradient.",
        )
        == 87_571_816
    )


def test_ccvr_uploads_mean_and_covariance_per_new_class(vit_base: Backbone) -> None:
    """Match the count of FPPL's paper for SLCA with CCVR's Gaussians of each round."""
    method, (task, *_) = create_method("ccvr", calibrate="each_round"), schedule(200, 20)
    (state,) = states(method, vit_base, [task])
    sums = {
        "class.count": torch.full((10,), 2.0),
        "class.sum": torch.ones(10, WIDTH),
        "class.products": torch.ones(10, WIDTH, WIDTH),
    }
    payload = method.make_upload(
        select(state, *method.training().optims), sums, Context(task, 0, 1, state)
    )
    assert size(payload, "full.", "head.", "gauss.mean", "gauss.cov") == 91_858_376


@pytest.mark.parametrize(
    ("name", "comm", "extra"),
    [("l2p", 199_880, 0), ("dualprompt", 261_320, WIDTH), ("codap", 345_800, 0)],
)
def test_prompt_methods_upload_current_slice_only(
    backbone: Backbone, name: str, comm: int, extra: int
) -> None:
    """Match FPPL's counts, which leave DualPrompt's key out."""
    method, plan = create_method(name), schedule(200, 20)
    for state, task in zip(states(method, backbone, plan), plan, strict=True):
        assert (
            size(
                method.make_upload(
                    select(state, *method.training().optims), {}, Context(task, 0, 1, state)
                )
            )
            == comm + extra
        )
