"""Test the inversion of uploads: errors, class means and the targets of each method."""

import pytest
import torch

from fczoo.core.payload import Payload, per_class, rows, whole_tensors
from fczoo.core.types import Task
from fczoo.runner import inversion_attack
from fczoo.runner.inversion_attack import (
    class_means,
    descend,
    inversion_grid,
    inversion_rows,
    invert_uploads,
    mean_squared_errors,
    signal_to_noise,
)

SECOND = Task(1, 3, 5, 7, 3)  # classes 3 and 4


def test_errors_match_hand_calculation():
    """Compare with hand-computed errors.

    All pixels 0.1 off give 0.01 (20 dB); half of the pixels 0.2 off give 0.02.
    """
    image = torch.full((1, 3, 2, 2), 0.5)
    half = image.clone()
    half[..., 0] += 0.2
    errors = mean_squared_errors(image, torch.cat([image + 0.1, half]))
    assert errors.tolist() == [pytest.approx([0.01, 0.02])]
    assert signal_to_noise(0.01) == pytest.approx(20)
    assert signal_to_noise(0.02) == pytest.approx(16.9897, abs=1e-4)
    assert signal_to_noise(0.0) == float("inf")


def test_class_means_match_hand_calculation():
    means = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    sums = Payload({"class.sum": means * 2, "class.count": torch.tensor([2, 0])})
    recovered = class_means(sums, {"class.": per_class("count", "sum")}, SECOND)
    assert {c: mean.tolist() for c, mean in recovered.items()} == {3: [1, 2]}  # no image of class 4
    listed = Payload({"gauss.mean": means, "gauss.label": torch.tensor([4, 0])})
    recovered = class_means(listed, {"gauss.": rows("mean")}, SECOND)
    assert {c: mean.tolist() for c, mean in recovered.items()} == {4: [1, 2], 0: [3, 4]}
    assert class_means(listed, {"gauss.": rows("mean", projected=True)}, SECOND) == {}
    gram = Payload({"gram": torch.eye(2)})
    assert class_means(gram, {"gram": whole_tensors("second moments")}, SECOND) == {}


def test_descent_recovers_image_from_feature():
    """Recover two flat images, whose feature is the image itself."""
    target = torch.tensor([0.2, 0.9]).view(2, 1, 1, 1).expand(2, 3, 4, 4)
    images = descend(lambda x: (x - target).square().mean(), target[:1], 2, 200)
    assert (images - target).abs().max() < 0.06  # grey images are 0.4 away


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("hgp", ["feature", "prototype", "update"]),
        ("pilora", ["feature", "prototype", "update"]),
        ("fcilpt", ["feature", "update"]),
        ("fedncm", ["feature", "prototype"]),
    ],
)
def test_inversion_targets_uploaded_statistics(name, targets, make_bench, small_method):
    bench, method = make_bench(), small_method(name)
    inversions = invert_uploads(bench, method, steps=2)
    assert [i.target for i in inversions] == targets
    for i in inversions:
        assert len(i.images) == len(i.nearest_images) == len(i.classes) > 0
        assert 0 < i.error < 1
        assert 0 < i.mean_image_error < 1
        assert i.distance > 0
    grid = inversion_grid("AppD", name, inversions)
    assert grid.rows[0] == "image" and len(grid.pixels) == len(grid.rows) == 2 * len(targets)
    assert [row[:2] for row in inversion_rows({name: inversions})] == [(name, t) for t in targets]


def test_exact_reconstruction_has_zero_error(make_bench, small_method, monkeypatch):
    """Report zero error if the attack returns the images of the client."""
    bench, method = make_bench(), small_method("fedncm")
    attack = inversion_attack._Attack(bench, method, 1)
    originals = attack.pixels(attack.examples)
    monkeypatch.setattr(inversion_attack, "descend", lambda *_: originals)
    feature, prototype = invert_uploads(bench, method)
    assert feature.error == prototype.error == 0 < feature.mean_image_error
    assert torch.equal(feature.nearest_images, originals)
    assert torch.equal(prototype.nearest_images, originals)
    assert feature.distance < 1e-6
