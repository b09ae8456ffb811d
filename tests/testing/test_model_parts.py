"""Backbones, augmentations and metrics of users: valid ones, and one-line errors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from fczoo import FczooError, load_backbone
from fczoo.backbones.names import BACKBONES
from fczoo.backbones.pretraining_overlap import contamination, identify_weights
from fczoo.backbones.weights import weights_to_download
from fczoo.cli.app import main
from fczoo.core.metrics import USER_METRICS, all_metrics, register_metric
from fczoo.core.registry import AUGMENTATIONS
from fczoo.core.vit_config import ViTConfig
from fczoo.data.views import Augment
from fczoo.testing import check_augmentation, check_backbone, check_metric
from fczoo.testing.toy_benchmark import random_weights
from helpers_cli import TINY

CONFIG = ViTConfig("else", image_size=16, patch_size=8, dim=32, depth=1, heads=2, mlp_dim=32)


class Mine:
    """A ViT of one block."""

    config = CONFIG
    licence = "MIT"
    pretraining = ("tinyimagenet",)

    def weights(self):
        return random_weights(CONFIG)


def register_mine(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Register ``mine``: the class ``Mine`` with these attributes changed."""
    monkeypatch.setattr(BACKBONES, "_entries", {})
    BACKBONES.register("mine")(type("Mine", (Mine,), {"__doc__": Mine.__doc__, **changes}))


def bench_error(*arguments: str, out: Path) -> str:
    """Return the error line of a rejected run."""
    words = ["bench", "--methods", "fedncm", *arguments, *TINY, "--out", str(out)]
    outcome = CliRunner().invoke(main, words)
    assert outcome.exit_code == 1, outcome.output
    assert outcome.stderr.count("\n") == 1 and not out.exists()
    return outcome.stderr


def test_backbone_loads_by_name_and_declares_pretraining(monkeypatch) -> None:
    register_mine(monkeypatch)
    check_backbone("mine")
    backbone = load_backbone("MINE", image_size=24, pool="mean")
    assert backbone.config.name == "mine"
    assert backbone.weights["pos_embed"].shape == (1, 10, 32)  # 3 x 3 patches and a class token
    assert weights_to_download("mine") == ""
    assert identify_weights("mine") == "mine"
    assert "Tiny-ImageNet" in contamination("tinyimagenet", "mine")


def missing_file(self):
    raise FileNotFoundError("mine.safetensors")


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"config": None}, "backbone mine in .* has no config; set the class attribute config"),
        (
            {"weights": missing_file},
            "the weights of backbone mine in .*: FileNotFoundError: mine.s",
        ),
        ({"weights": lambda self: {"norm.bias": 0}}, "weight norm.bias of .* is not a tensor"),
        ({"weights": lambda self: {}}, "weights do not fit mine: .* is missing"),
    ],
)
def test_broken_backbone_is_rejected(monkeypatch, tmp_path, changes: dict, error: str) -> None:
    register_mine(monkeypatch, **changes)
    with pytest.raises(AssertionError, match=error):
        check_backbone("mine")
    with pytest.raises(FczooError, match=error):
        load_backbone("mine")


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"__doc__": ""}, "mine has no description"),
        ({"licence": None}, "mine has no licence"),
        ({"pretraining": ("photos",)}, "mine.pretraining must be a tuple of these data sets: tiny"),
        (
            {"weights": lambda self: {k: v + torch.rand(1) for k, v in Mine().weights().items()}},
            "mine.weights\\(\\) returns different weights at each call",
        ),
        (
            {"weights": lambda self: {k: 0 * v for k, v in Mine().weights().items()}},
            "mine returns the same feature for any image",
        ),
    ],
)
def test_check_backbone_reports_fault(monkeypatch, changes: dict, error: str) -> None:
    register_mine(monkeypatch, **changes)
    with pytest.raises(AssertionError, match=error):
        check_backbone("mine")


@pytest.mark.parametrize("name", ["vit_nano_32", "ViT-Tiny_patch16_224"])
def test_duplicate_backbone_name_is_rejected(monkeypatch, name: str) -> None:
    other = type("Other", (Mine,), {"__doc__": Mine.__doc__, "name": name})
    monkeypatch.setattr(BACKBONES, "_entries", {name: other})
    with pytest.raises(AssertionError, match=f"'{name}' in .* has the name of a backbone of fczoo"):
        check_backbone(name)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda images, draws: images[:, :1], "Broken.change returned shape"),
        (lambda images, draws: images + 1, r"broken returns values outside \[0, 1\]"),
        (lambda images, draws: images * torch.rand(1), "different views for the same draws"),
        (lambda images, draws: images - images.amin(0) / 2, "mixes images of a batch"),
    ],
)
def test_broken_augmentation_is_rejected(monkeypatch, change: Callable, error: str) -> None:
    class Broken(Augment):
        """Broken on purpose."""

        def change(self, images, draws):
            return change(images, draws)

    monkeypatch.setitem(AUGMENTATIONS._entries, "broken", Broken)
    with pytest.raises(AssertionError, match=error):
        check_augmentation("broken")


def test_augmentation_must_subclass_augment(monkeypatch, tmp_path) -> None:
    monkeypatch.setitem(AUGMENTATIONS._entries, "odd", lambda images: images)
    error = bench_error("--augment", "odd", out=tmp_path / "run")
    assert "augmentation odd is not a subclass of fczoo.data.views.Augment; derive it" in error


@pytest.fixture
def no_metrics(monkeypatch) -> None:
    monkeypatch.setattr(USER_METRICS, "_entries", {})


def last_drop(a, n):
    """Drop of the first task in the last one."""
    return a[0][0] - a[-1][0]


def test_metric_is_computed_and_listed(no_metrics) -> None:
    register_metric("last_drop", better="low")(last_drop)
    check_metric("last_drop")
    assert all_metrics([[90.0], [70.0, 80.0]], [10, 10])["last_drop"] == 20.0
    output = CliRunner().invoke(main, ["list", "metrics"]).stdout
    assert "last_drop  " in output and "Drop of the first task in the last one\n" in output


@pytest.mark.parametrize(
    ("metric", "error"),
    [
        (lambda a, n: a[1][0], "metric mine in .* fails: IndexError: list index out of range"),
        (lambda a, n: None, "metric mine in .* fails: TypeError"),
    ],
)
def test_failing_metric_is_rejected_before_run(
    no_metrics, tmp_path, metric: Callable, error: str
) -> None:
    metric.__doc__ = "Broken on purpose."
    register_metric("mine")(metric)
    with pytest.raises(AssertionError, match=error):
        check_metric("mine")
    assert "return a number for every run" in bench_error(out=tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "metric", "error"),
    [
        ("faa", last_drop, "metric faa in .* has the name of the column FAA; rename it"),
        ("A_N", last_drop, "metric A_N in .* has the name of a metric of fczoo; rename it"),
        ("mine", lambda a, n: n.append(1) or 1, "mine changes its input; copy it first"),
        ("mine", lambda a, n: float("inf"), "mine is infinite for"),
    ],
)
def test_check_metric_reports_fault(no_metrics, name: str, metric: Callable, error: str) -> None:
    metric.__doc__ = metric.__doc__ or "Broken on purpose."
    register_metric(name)(metric)
    with pytest.raises(AssertionError, match=error):
        check_metric(name)
