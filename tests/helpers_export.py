"""Comparison of the exports of kept models with the models."""

from collections.abc import Callable

import torch
from torch import Tensor

from fczoo.models.classifier import Classifier

Models = Callable[[str], Classifier]


def export_images(count: int = 5) -> Tensor:
    """Return random images of the bundled backbone's size."""
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def assert_same_logits(network: Callable[[Tensor], Tensor], model: Classifier) -> None:
    """Check that a network gives the logits of a model, which depend on the image."""
    with torch.no_grad():
        expected = model(export_images())
        torch.testing.assert_close(
            network(export_images()), expected, rtol=1e-4, atol=1e-4, check_dtype=False
        )
    assert expected[:, 0].std() > 1e-4
