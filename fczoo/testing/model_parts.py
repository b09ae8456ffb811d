"""Checks of backbones, augmentations and metrics."""

import copy
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fczoo.backbones.load import configuration, load_backbone
from fczoo.backbones.names import BACKBONES, registered_backbone
from fczoo.backbones.pretraining_overlap import TITLES
from fczoo.core.errors import FczooError
from fczoo.core.metrics import USER_METRICS, user_metrics
from fczoo.core.registry import AUGMENTATIONS, Registry
from fczoo.data.dataset import Images
from fczoo.data.views import Augment, ImageStore, get_augment
from fczoo.reports.tables import column_of
from fczoo.testing.method_under_test import need_same
from fczoo.testing.toy_benchmark import need, need_documented, toy_backbone

# accuracies [T][i] in percent and test images per task; in the last one a task has no images
MATRICES = (
    ([[50.0]], [4]),
    ([[90.0], [70.0, 80.0]], [10, 10]),
    ([[100.0], [0.0, 100.0], [50.0, 25.0, 75.0]], [10, 20, 4]),
    ([[60.0], [55.0, math.nan], [50.0, math.nan, 100.0]], [10, 0, 5]),
)


def check_backbone(name: str) -> None:
    """Check that a registered backbone follows all rules; a broken one raises AssertionError.

    Docstring, licence and pre-training data are declared; configuration and weights match; weights
    are the same at every load; features are finite, and differ between images.

    Args:
        name: Registered name.

    Raises:
        AssertionError: A rule is broken.
    """
    cls = _registered(BACKBONES, name)
    need(
        isinstance(getattr(cls, "licence", None), str),
        f"{name} has no licence; set the class attribute licence to a text",
    )
    unknown = set(getattr(cls, "pretraining", ("",))) - TITLES.keys()
    need(
        not unknown,
        f"{name}.pretraining must be a tuple of these data sets: {', '.join(TITLES)}; write () if "
        "they are unknown",
    )
    try:
        registered_backbone(name)
        config, first, second = configuration(name), load_backbone(name), load_backbone(name)
    except FczooError as error:
        raise AssertionError(f"{name} cannot be loaded: {error}") from error
    need_same(
        first.weights, second.weights, f"{name}.weights() returns different weights at each call"
    )
    rng, side = torch.Generator().manual_seed(0), config.image_size
    features = first(torch.randn(2, 3, side, side, generator=rng))
    need(
        features.isfinite().all(),
        f"{name} returns features that are not finite; check its layer norms",
    )
    need(
        not torch.allclose(features[0], features[1]),
        f"{name} returns the same feature for any image; check its weights",
    )


def check_augmentation(spec: str) -> None:
    """Check that an augmentation follows all rules; a broken one raises AssertionError.

    Views have the shape of images and values in [0, 1]. A view depends only on its image and its
    random numbers. The class and its options have descriptions.

    Args:
        spec: Registered name with its options, such as ``grey:0.5``.

    Raises:
        AssertionError: A rule is broken.
    """
    _registered(AUGMENTATIONS, spec.partition(":")[0])
    augment, pixels = get_augment(spec), np.random.default_rng(0).integers(0, 256, (6, 16, 16, 3))
    images = Images(pixels.astype(np.uint8), np.zeros(6, np.int64))
    store = ImageStore(images, toy_backbone())
    draws = torch.rand(6, augment.draws, generator=torch.Generator().manual_seed(0))
    index = torch.arange(6)
    views = _view(store, index, augment, draws)
    config = store.backbone.config
    means, stds = (torch.tensor(x).view(3, 1, 1) for x in (config.mean, config.std))
    values = views * stds + means
    need(
        ((values > -1e-6) & (values < 1 + 1e-6)).all(),
        f"{spec} returns values outside [0, 1] or NaN; clamp the result of change",
    )
    need(
        torch.equal(views, _view(store, index, augment, draws)),
        f"{spec} returns different views for the same draws; use no other random numbers",
    )
    parts = [_view(store, index[i : i + 1], augment, draws[i : i + 1]) for i in range(6)]
    need(
        torch.allclose(torch.cat(parts), views, atol=1e-6),
        f"{spec} mixes images of a batch; view i may depend only on image i and draws[i]",
    )


def check_metric(name: str) -> None:
    """Check that a registered metric follows all rules; a broken one raises AssertionError.

    It has a description and a unique name. It returns the same number each time, for one task,
    several tasks and a task without test images, and does not modify its inputs.

    Args:
        name: Registered name.

    Raises:
        AssertionError: A rule is broken.
    """
    metric = _registered(USER_METRICS, name)
    better = ("high", "low", "")
    need(metric.better in better, f"{name} has better={metric.better!r}; write one of {better}")
    for accuracies, counts in MATRICES:
        given = copy.deepcopy((accuracies, counts))
        try:
            first, second = (user_metrics()[name](*given) for _ in range(2))
            column_of(name)
        except FczooError as error:
            raise AssertionError(str(error)) from error
        need(repr(given) == repr((accuracies, counts)), f"{name} changes its input; copy it first")
        need(repr(first) == repr(second), f"{name} returns {first} and {second} for the same run")
        need(not math.isinf(first), f"{name} is infinite for {accuracies}; return nan instead")


def _registered(registry: Registry[Any], name: str) -> Any:
    """Return the registered entry of a name; check that it is documented."""
    try:
        entry = registry.get(name)
    except FczooError as error:
        raise AssertionError(str(error)) from error
    need_documented(entry, name)
    return entry


def _view(store: ImageStore, index: Tensor, augment: Augment, draws: Tensor) -> Tensor:
    try:
        return store.training_view(index, augment, draws.clone())
    except FczooError as error:
        raise AssertionError(str(error)) from error
