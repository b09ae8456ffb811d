"""A protocol for a look: minutes on a CPU, any data set, the bundled backbone."""

import json
from functools import cache
from importlib.resources import files
from typing import Any, get_args, get_type_hints

from fczoo.backbones.names import BUNDLED_NAME
from fczoo.core.registry import METHODS, register_protocol
from fczoo.papers.protocol import Protocol, Stated, same
from fczoo.reports.contamination import shared_classes

SEARCHED = {
    "dataset": "cifar100",
    "backbone": "vit_tiny_patch16_224.augreg_in21k_ft_in1k",
    "image_size": 112,
    "train_per_class": 10,
    "clients": 10,
    "tasks": 10,
    "rounds": 2,
    "epochs": 2,
    "batch_size": 8,
}
"""Settings of the search that found the values of ``assets/quick.json``."""
SEARCH = (
    f"fczoo tune: CIFAR-100, ViT-Ti/16 at {SEARCHED['image_size']} px, "
    f"{SEARCHED['train_per_class']} images per class, {SEARCHED['rounds']} rounds x "
    f"{SEARCHED['epochs']} epochs, 12 trials"
)
IMAGENET = f"fczoo: the bundled {BUNDLED_NAME} was trained with labels of these classes"


@register_protocol("quick")
class Quick(Protocol):
    """Shows that all works, not which method is best; on digits, what bench does without a protocol.

    Minutes do not train a head from nothing, so that a method would be measured by its head's start: here
    heads and prototypes start at class means, prompt methods read the class token, and a method that trains
    has the values that ``fczoo tune`` found for it in as few steps. Heads of joint training and SS-IL start
    at zero, where these ended higher.
    """

    paper = "none: fczoo's own"
    proposes = ("pilora", "hgp", "fppl")
    seeds = Stated((0,), "fczoo")
    settings = same(
        "fczoo",
        backbone=BUNDLED_NAME,
        partition="dirichlet:0.5",
        rounds=3,
        epochs=2,
        batch_size=16,
        augment="none",
        train_per_class=20,
        test_per_class=20,
    )
    datasets = {
        "digits": same(
            "fczoo: the data set's own",
            tasks=5,
            clients=5,
            rounds=2,
            epochs=1,
            batch_size=8,
            train_per_class=None,
            test_per_class=None,
        )
    }
    any_dataset = True
    replaces_backbone = True
    imagenet = {
        **same(IMAGENET, backbone="vit_tiny_patch16_224.augreg_in21k_ft_in1k"),
        **same(
            "fczoo: for minutes with a larger backbone",
            image_size=64,
            train_per_class=10,
            test_per_class=10,
            rounds=2,
        ),
    }
    """Settings on data sets with labels that the bundled backbone was trained with."""
    starts = same("fczoo", head_init="means", head_tune=True, pooled="cls")
    """What any method with an option of that name takes, but on digits."""
    zeros = frozenset({"joint", "ssil"})
    """Methods whose head starts at zero instead."""
    notes = (
        "It replaces the data set's backbone by the bundled one, which was trained on Tiny-ImageNet.",
        "On Tiny-ImageNet, mini-ImageNet and subsets of ImageNet it takes a ViT-Ti/16 with ImageNet "
        "weights, as papers do, at 64 pixels: the bundled one was trained with labels of these classes.",
    )

    @classmethod
    def stated(cls, dataset: str) -> dict[str, Stated]:
        known = {"all", "some"} & set(shared_classes(dataset, BUNDLED_NAME).values())
        return {**super().stated(dataset), **(cls.imagenet if known else {})}

    @classmethod
    def hyperparameters(cls, method: str, dataset: str) -> dict[str, Stated]:
        if cls.resolve(dataset) == "digits" or method not in METHODS.names():
            return {}
        hints = get_type_hints(METHODS.get(method))
        starts = {n: s for n, s in cls.starts.items() if n in hints and _fits(s.value, hints[n])}
        if method in cls.zeros:
            starts |= same("fczoo", head_init="zeros")
        found = searched().get(method, {}).items()
        return {**starts, **{n: Stated(v, SEARCH, chosen_for=SEARCHED) for n, v in found}}


def _fits(value: Any, hint: Any) -> bool:
    """Whether an option takes a value: another package may mean something else by its name."""
    return isinstance(value, bool) if hint is bool else value in get_args(hint)


@cache
def searched() -> dict[str, dict[str, Any]]:
    """By method that trains: what was found, to three digits."""
    values = (files("fczoo.assets") / "quick.json").read_text(encoding="utf-8")
    found: dict[str, dict[str, Any]] = json.loads(values)
    return found
