"""Checks of ``fczoo.testing`` on parts that are broken on purpose: one sentence refuses each."""

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
from fczoo.partitioners.iid import IID
from fczoo.security.attacks import Attack
from fczoo.testing import check_attack, check_dataset, check_partitioner
from fczoo.testing.world import random_images

# ---------------------------------------------------------------- partitioners


def divide_labels(labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
    return IID()(labels, clients, rng)


def always_the_same(labels, clients, rng):
    return divide_labels(labels, clients, np.random.default_rng(0))


def never_the_same(labels, clients, rng):
    return divide_labels(labels, clients, np.random.default_rng())


def one_too_few(labels, clients, rng):
    return divide_labels(labels, clients, rng)[1:]


def one_image_lost(labels, clients, rng):
    first, *others = divide_labels(labels, clients, rng)
    return [first[1:], *others]


def one_image_twice(labels, clients, rng):
    first, *others = divide_labels(labels, clients, rng)
    return [np.append(first, first[:1]), *others]


def beyond_the_end(labels, clients, rng):
    first, *others = divide_labels(labels, clients, rng)
    return [np.append(first, len(labels)), *others]


def as_lists(labels, clients, rng):
    return [part.tolist() for part in divide_labels(labels, clients, rng)]


def labels_sorted(labels, clients, rng):
    labels.sort()
    return divide_labels(labels, clients, rng)


def always_refused(labels, clients, rng):
    raise FczooError("not today")


def refused_without_words(labels, clients, rng):
    raise FczooError("")


@pytest.mark.parametrize(
    ("split", "says"),
    [
        (always_the_same, "gives the same parts from different seeds; draw from rng"),
        (never_the_same, "gives other parts from the same generator"),
        (one_too_few, r"gives \d parts for \d clients; give each client one"),
        (one_image_lost, "set disjoint = False in the class"),
        (one_image_twice, "gives a client the same image twice"),
        (beyond_the_end, "names positions outside of the"),
        (as_lists, "not an array of whole numbers"),
        (labels_sorted, "changes the labels that it is given"),
        (always_refused, "refuses even 200 images of 5 classes for 8 clients"),
        (refused_without_words, r"raises an error with message ''; raise FczooError with one line"),
    ],
)
def test_a_broken_partitioner_is_refused(monkeypatch, split: Callable, says: str) -> None:
    @dataclass(frozen=True)
    class Broken:
        """Broken on purpose."""

        def __call__(self, labels, clients, rng):
            return split(labels, clients, rng)

    monkeypatch.setitem(PARTITIONERS._entries, "broken", Broken)
    with pytest.raises(AssertionError, match=f"broken .*{says}"):
        check_partitioner("broken")


def test_what_a_partitioner_refuses_is_what_it_says() -> None:
    with pytest.raises(AssertionError, match=r"quantity:2 refuses .*, which it should split"):
        check_partitioner("quantity:2", refuses=lambda images, classes, clients: False)
    with pytest.raises(AssertionError, match=r"iid splits .*, which it should refuse"):
        check_partitioner("iid", refuses=lambda images, classes, clients: clients > 1)


def test_options_and_classes_are_explained(monkeypatch) -> None:
    @dataclass(frozen=True)
    class Callback:
        """Equal shares."""

        beta: float = 1.0

        __call__ = IID.__call__

    monkeypatch.setitem(PARTITIONERS._entries, "silent", Callback)
    with pytest.raises(
        AssertionError, match=r"silent does not describe beta; declare it with fczoo.option"
    ):
        check_partitioner("silent")
    Callback.__doc__ = "Callback(beta: float = 1.0)"
    with pytest.raises(AssertionError, match="silent has no description; write a docstring"):
        check_partitioner("silent")


def test_the_checks_need_no_hypothesis(monkeypatch) -> None:
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
        (lambda change, rng: change, "changes nothing in a run"),
        (lambda change, rng: change.sum(), r"makes torch.float\d+ \[\] of"),
        (lambda change, rng: change.double().half(), "makes torch.float16"),
        (lambda change, rng: change / 0, "forges values that are not finite"),
        (lambda change, rng: change.neg_(), "changes the honest change in place"),
        (lambda change, rng: torch.rand_like(change), "forges differently from the same generator"),
    ],
)
def test_a_broken_attack_is_refused(monkeypatch, forge: Callable, says: str) -> None:
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


def other_types(self, root):
    data = Toy.load(self, root)
    return data._replace(train=Images(data.train.pixels.astype(np.float32), data.train.labels))


def a_label_too_many(self, root):
    data = Toy.load(self, root)
    return data._replace(test=Images(data.test.pixels, data.test.labels + 1))


def another_order(self, root):
    data, order = Toy.load(self, root), np.random.default_rng().permutation(28)
    return data._replace(train=Images(data.train.pixels[order], data.train.labels[order]))


def blank(self, root):
    data = Toy.load(self, root)
    return data._replace(test=Images(np.zeros_like(data.test.pixels), data.test.labels))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, ""),
        ({"about": "two\nlines"}, "about must be one line"),
        ({"classes": 8}, "names 7 classes, but toy_set.classes is 8"),
        ({"defaults": Defaults(tasks=9)}, "has 9 tasks for 7 classes; choose 1 to 7"),
        (
            {"defaults": Defaults(tasks=2, partition="zipf")},
            "defaults cannot be used: no partitioner is called",
        ),
        (
            {"defaults": Defaults(tasks=2, augment="blur")},
            "defaults cannot be used: no augmentation is called",
        ),
        ({"folder": "toy"}, "does not say its source, layout, licence"),
        (
            {"folder": "toy", "source": "here", "layout": "*", "licence": "MIT"},
            "finds something in an empty folder",
        ),
        ({"load": other_types}, r"has pixels float32 \[28, 16, 16, 3\]"),
        ({"load": a_label_too_many}, "must have an image of each of the labels 0 to 6"),
        ({"load": another_order}, "differs from the first load"),
        ({"load": blank}, "has images of one grey throughout"),
        (
            {"load": lambda self, root: Toy.load(self, root)._replace(classes=tuple("aacdefg"))},
            "names a class twice",
        ),
        ({"load": lambda self, root: None}, "returns a NoneType; return an ImageData"),
    ],
)
def test_a_broken_data_set_is_refused(monkeypatch, changes: dict, says: str) -> None:
    broken = type("Broken", (Toy,), {"__doc__": "Broken on purpose.", "name": "toy_set", **changes})
    monkeypatch.setitem(DATASETS._entries, "toy_set", broken)
    if not says:
        check_dataset("toy_set")
        check_dataset(broken)
        return
    with pytest.raises(AssertionError, match=f"toy_set.*{says}") as caught:
        check_dataset(broken)
    assert re.fullmatch(".+", str(caught.value))


def test_a_data_set_that_is_not_registered_is_named() -> None:
    with pytest.raises(
        AssertionError, match=r"not a registered data set; put @register_dataset\(NAME\) above it"
    ):
        check_dataset(Toy)
