"""Test dry runs on shapes: same bytes and operations as real tensors, without backbone passes."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fczoo import Settings, create_method
from fczoo.cli.app import main
from fczoo.core.backbone import Backbone
from fczoo.core.registry import METHODS
from fczoo.core.tree import nbytes
from fczoo.runner import cost
from fczoo.runner.cost import FirstRound, first_round, measure
from fczoo.runner.outline import MAX_ELEMENTS, Outlines
from fczoo.runner.timing import StepTimer

SMALL = {
    "glfc": {"perturb_steps": 1},
    "lga": {"perturb_steps": 1},
    "fisheravg": {"fisher": "weighted"},  # equal bytes
}


@pytest.mark.parametrize("name", METHODS.names())
def test_byte_counts_match_real_tensors(name: str) -> None:
    """Compare byte counts of shapes with real tensors.

    Every client has all ten classes of the one digits task.
    """
    method, settings = create_method(name, **SMALL.get(name, {})), Settings(tasks=1)
    real, outline = measure(method, settings), first_round(method, settings)
    uploads = real.first_task_uploads
    payloads = [uploads["round"]] if "round" in uploads else uploads.values()
    assert outline.upload_bytes == sum(nbytes(upload.tensors) for upload in payloads)
    assert nbytes(outline.broadcast) == nbytes(real.broadcast)
    assert nbytes(outline.trained_tensors) == nbytes(real.trained_tensors)


@pytest.mark.parametrize("name", METHODS.names())
def test_upload_size_is_extrapolated_from_few_classes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Extrapolate the upload size of 10 classes from 2 and 4 classes."""
    method, settings = create_method(name, **SMALL.get(name, {})), Settings(tasks=1)
    byte_count = first_round(method, settings).upload_bytes
    monkeypatch.setattr(cost, "MAX_FULL_CLASSES", 5)
    assert first_round(method, settings).upload_bytes == byte_count


@pytest.mark.parametrize("name", METHODS.names())
def test_dry_run_on_vit_b_needs_few_operations(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit the operations of a dry run on a ViT-B at 224 pixels.

    It processes one image with its teacher and the passes of one loss.
    """
    passes, forward = Counter[str](), Backbone._forward

    def counting_forward(self: Backbone, images: Tensor, *more: Any) -> Tensor:
        passes["images"] += len(images)
        assert self.weights["blocks.0.mlp.fc1.weight"].untyped_storage().nbytes() == 4  # an outline
        return forward(self, images, *more)

    monkeypatch.setattr(Backbone, "_forward", counting_forward)
    settings = Settings(
        backbone="vit_base_patch16_224.augreg_in21k_ft_in1k", dataset="cifar100", tasks=10
    )
    config = cost._configuration(settings)
    dispatches, original = Counter[str](), Outlines.__torch_dispatch__

    def dispatch(self: Outlines, *given: Any) -> Any:
        dispatches["operations"] += 1
        return original(self, *given)

    monkeypatch.setattr(Outlines, "__torch_dispatch__", dispatch)
    first_round(create_method(name, "cifar100"), settings, config=config)
    gradients = 280_000 if torch.__version__.startswith("2.6.") else 240_000  # per image and class
    most = gradients if name == "fisheravg" else 60_000
    assert passes["images"] <= 24
    assert dispatches["operations"] <= most


def test_dry_run_computes_no_full_vit_b_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Never run a pass with the weights of a whole ViT-B.

    GLFC has 50 perturbation steps, and FedNCM passes over all images.
    """
    forward = Backbone._forward

    def limited_forward(self: Backbone, *given: Any) -> Tensor:
        weight_bytes = sum(v.untyped_storage().nbytes() for v in self.weights.values())
        assert self.depth <= 2 or weight_bytes < 1_000_000, "a pass of the whole backbone"
        return forward(self, *given)

    monkeypatch.setattr(Backbone, "_forward", limited_forward)
    vit_b = "vit_base_patch16_224.augreg_in21k_ft_in1k"
    words = [
        "--methods",
        "hgp,fedncm,glfc",
        "--dataset",
        "cifar100",
        "--backbone",
        vit_b,
        "--device",
        "cpu",
    ]
    result = CliRunner().invoke(main, ["bench", *words, "--dry-run"])
    assert result.exit_code == 0, result.exception or result.output
    row = next(line.split() for line in result.stdout.splitlines() if line.startswith("glfc  "))
    assert row[1:4] == ["85,875,556", "346.904", "343.842"]


def test_query_features_are_counted_once_per_image() -> None:
    """Count query features once per image, as torch counts the frozen forward.

    The 3 channels resized from 8 to 32 pixels count as well; 0 where each step computes the
    features.
    """
    frozen = cost.random_backbone(Settings())
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        frozen(torch.zeros(1, 3, 32, 32))
    head, resize_flops = create_method("fedavg", tune="head"), 2 * 3 * (32 * 8 * 8 + 32 * 32 * 8)
    cache = first_round(head, Settings(augment="none"))
    assert cache.query_flops == counter.get_total_flops() + resize_flops
    assert cache.flops == 2 * 2 * 128 * 10
    moving = first_round(head, Settings(augment="flip", cache_queries=False))
    assert moving.query_flops == 0 and moving.flops > counter.get_total_flops()


def test_long_step_time_follows_from_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimate the time of long steps by their operations.

    1 GFLOP per second: 20 image-steps of 3 GFLOP and 5 query features of 2 GFLOP take 70 s.
    """
    timer = StepTimer(Settings())
    monkeypatch.setitem(vars(timer), "speed", 1e9)
    cost_of_step = {"flops": 3 * 10**9, "activation_bytes": 0, "query_flops": 2 * 10**9}
    round_cost = FirstRound(
        trained_tensors={}, upload_bytes=0, broadcast={}, weight_bytes=0, **cost_of_step
    )
    seconds = timer.seconds(create_method("hgp"), round_cost, image_steps=20, images=5)
    assert seconds == pytest.approx(70)
    assert timer.seconds(create_method("fedncm"), round_cost, image_steps=20, images=5) == 0


def test_outline_stores_one_row_with_full_shape() -> None:
    """Store one row of a large tensor and report the full shape.

    A product of two outlines costs nothing and counts its operations. Small results stay real.
    """
    with Outlines() as outlines:
        large = torch.zeros(1000, MAX_ELEMENTS)
        product = large @ large.mT
        labels = torch.arange(3)
    assert large.shape == (1000, MAX_ELEMENTS)
    assert large.untyped_storage().nbytes() == 4 * MAX_ELEMENTS
    assert product.shape == (1000, 1000) and outlines.flops == 2 * 1000 * 1000 * MAX_ELEMENTS
    assert labels.tolist() == [0, 1, 2]
    assert outlines.bytes[large.untyped_storage().data_ptr()] == 4 * 1000 * MAX_ELEMENTS


def test_operation_count_matches_torch() -> None:
    """Compare with the operations that torch counts for a real forward and backward pass."""
    settings = Settings()
    backbone = cost.random_backbone(settings)
    x, tokens = torch.zeros(1, 3, 32, 32), torch.zeros(1, backbone.dim, requires_grad=True)
    with FlopCounterMode(display=False) as theirs:
        backbone(x, {"tokens": tokens}).sum().backward()
    tokens = tokens.detach().requires_grad_()
    with Outlines() as ours:
        backbone(x, {"tokens": tokens}).sum().backward()
    assert ours.flops == theirs.get_total_flops() > 0


def test_with_fewest_steps_sets_minimum() -> None:
    from fczoo.core.options import with_fewest_steps

    method: Any = create_method("glfc", perturb_steps=7)
    assert with_fewest_steps(method) == replace(method, perturb_steps=0)
