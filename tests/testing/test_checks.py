"""Checks of ``fczoo.testing`` reject parts that are broken on purpose with one sentence."""

import builtins
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fczoo import FczooError
from fczoo.core.registry import ATTACKS, DATASETS, PARTITIONERS
from fczoo.data.dataset import Dataset, Defaults, ImageData, Images
from fczoo.partitioners.iid import iid
from fczoo.security.attacks import Attack
from fczoo.testing import check_attack, check_dataset, check_partitioner
from fczoo.testing.toy_benchmark import random_images

# ---------------------------------------------------------------- partitioners


def divide_labels(labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
    return iid(labels, clients, rng)


def seed_ignored(labels, clients, rng):
    return divide_labels(labels, clients, np.random.default_rng(0))


def unseeded_draws(labels, clients, rng):
    return divide_labels(labels, clients, np.random.default_rng())


def missing_part(labels, clients, rng):
    return divide_labels(labels, clients, rng)[1:]


def missing_image(labels, clients, rng):
    first, *others = divide_labels(labels, clients, rng)
    return [first[1:], *others]


def repeated_image(labels, clients, rng):
    first, *others = divide_labels(labels, clients, rng)
    return [np.append(first, first[:1]), *others]


def invalid_position(labels, clients, rng):
    first, *others = divide_labels(labels, clients, rng)
    return [np.append(first, len(labels)), *others]


def parts_as_lists(labels, clients, rng):
    return [part.tolist() for part in divide_labels(labels, clients, rng)]


def changed_labels(labels, clients, rng):
    labels.sort()
    return divide_labels(labels, clients, rng)


def every_request_refused(labels, clients, rng):
    raise FczooError("not today")


def empty_message(labels, clients, rng):
    raise FczooError("")


@pytest.mark.parametrize(
    ("split", "says"),
    [
        (seed_ignored, "returns the same parts for different seeds; draw from rng"),
        (unseeded_draws, "returns different parts for the same rng"),
        (missing_part, r"returns \d parts for \d clients; return one per client"),
        (missing_image, "set the attribute disjoint = False"),
        (repeated_image, "assigns the same image to a client twice"),
        (invalid_position, "returns positions outside labels"),
        (parts_as_lists, "not a 1-D integer array"),
        (changed_labels, "modifies its argument `labels` in place"),
        (every_request_refused, "cannot split 200 images of 5 classes among 8 clients"),
        (empty_message, r"raises an error with message ''; raise FczooError with one line"),
    ],
)
def test_broken_partitioner_is_rejected(monkeypatch, split: Callable, says: str) -> None:
    @dataclass(frozen=True)
    class Broken:
        """Broken on purpose."""

        def __call__(self, labels, clients, rng):
            return split(labels, clients, rng)

    monkeypatch.setitem(PARTITIONERS._entries, "broken", Broken)
    with pytest.raises(AssertionError, match=f"broken .*{says}"):
        check_partitioner("broken")


def test_check_partitioner_compares_refusals() -> None:
    with pytest.raises(AssertionError, match=r"quantity:2 refuses .*, which it should split"):
        check_partitioner("quantity:2", refuses=lambda images, classes, clients: False)
    with pytest.raises(AssertionError, match=r"iid splits .*, which it should refuse"):
        check_partitioner("iid", refuses=lambda images, classes, clients: clients > 1)


def test_missing_descriptions_are_rejected(monkeypatch) -> None:
    @dataclass(frozen=True)
    class Callback:
        """Equal shares."""

        beta: float = 1.0

        __call__ = staticmethod(iid)

    monkeypatch.setitem(PARTITIONERS._entries, "silent", Callback)
    with pytest.raises(
        AssertionError, match=r"silent does not describe beta; declare it with fczoo.option"
    ):
        check_partitioner("silent")
    Callback.__doc__ = "Callback(beta: float = 1.0)"
    with pytest.raises(AssertionError, match="silent has no description; write a docstring"):
        check_partitioner("silent")


def test_checks_work_without_hypothesis(monkeypatch) -> None:
    original = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("hypothesis"):
            raise ImportError(name)
        return original(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    check_partitioner("iid")
    with pytest.raises(AssertionError, match="which it should refuse"):
        check_partitioner("iid", refuses=lambda images, classes, clients: clients > 1)


# ---------------------------------------------------------------- attacks


@pytest.mark.parametrize(
    ("forge", "says"),
    [
        (lambda change, rng: change, "has no effect on a run"),
        (lambda change, rng: change.sum(), r"turns torch.float\d+ .* into torch.float\d+ \[\];"),
        (lambda change, rng: change.double().half(), "into torch.float16"),
        (lambda change, rng: change / 0, "returns values that are not finite"),
        (lambda change, rng: change.neg_(), "modifies the honest change in place"),
        (lambda change, rng: torch.rand_like(change), "returns different values for the same rng"),
    ],
)
def test_broken_attack_is_rejected(monkeypatch, forge: Callable, says: str) -> None:
    class Broken(Attack):
        """Broken on purpose."""

        def forge(self, change, rng):
            return forge(change, rng)

    monkeypatch.setitem(ATTACKS._entries, "broken", Broken)
    with pytest.raises(AssertionError, match=f"broken .*{says}"):
        check_attack("broken")


# ---------------------------------------------------------------- data sets


class Toy(Dataset):
    """Seven patterns of squares."""

    classes = 7
    about = "seven patterns of squares"
    defaults = Defaults(tasks=3)

    def load(self, root: Path) -> ImageData:
        return ImageData(random_images(4, 0), random_images(2, 1), tuple("abcdefg"))


def load_floats(self, root):
    data = Toy.load(self, root)
    return data._replace(train=Images(data.train.pixels.astype(np.float32), data.train.labels))


def load_extra_label(self, root):
    data = Toy.load(self, root)
    return data._replace(test=Images(data.test.pixels, data.test.labels + 1))


def load_shuffled(self, root):
    data, order = Toy.load(self, root), np.random.default_rng().permutation(28)
    return data._replace(train=Images(data.train.pixels[order], data.train.labels[order]))


def load_blank(self, root):
    data = Toy.load(self, root)
    return data._replace(test=Images(np.zeros_like(data.test.pixels), data.test.labels))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, ""),
        ({"about": "two\nlines"}, "about must be one line"),
        ({"classes": 8}, "returns 7 class names, but toy_set.classes is 8"),
        ({"defaults": Defaults(tasks=9)}, "has 9 tasks for 7 classes; choose 1 to 7"),
        (
            {"defaults": Defaults(tasks=2, partition="zipf")},
            "defaults cannot be used: no partitioner is called",
        ),
        (
            {"defaults": Defaults(tasks=2, augment="blur")},
            "defaults cannot be used: no augmentation is called",
        ),
        ({"folder": "toy"}, "does not declare source, layout, licence"),
        (
            {"folder": "toy", "source": "here", "layout": "*", "licence": "MIT"},
            "returns data for an empty folder",
        ),
        ({"load": load_floats}, r"has pixels float32 \[28, 16, 16, 3\]"),
        ({"load": load_extra_label}, "must have an image of each of the labels 0 to 6"),
        ({"load": load_shuffled}, "differs from the first load"),
        ({"load": load_blank}, "has only equal pixels"),
        (
            {"load": lambda self, root: Toy.load(self, root)._replace(classes=tuple("aacdefg"))},
            "returns a class name twice",
        ),
        ({"load": lambda self, root: None}, "returns a NoneType; return an ImageData"),
    ],
)
def test_broken_data_set_is_rejected(monkeypatch, changes: dict, says: str) -> None:
    broken = type("Broken", (Toy,), {"__doc__": "Broken on purpose.", "name": "toy_set", **changes})
    monkeypatch.setitem(DATASETS._entries, "toy_set", broken)
    if not says:
        check_dataset("toy_set")
        check_dataset(broken)
        return
    with pytest.raises(AssertionError, match=f"toy_set.*{says}") as caught:
        check_dataset(broken)
    assert re.fullmatch(".+", str(caught.value))


def test_unregistered_data_set_is_rejected() -> None:
    with pytest.raises(
        AssertionError, match=r"not a registered data set; put @register_dataset\(NAME\) above it"
    ):
        check_dataset(Toy)
