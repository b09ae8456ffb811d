"""A protocol for a first look: minutes on a CPU, any data set, the bundled backbone."""

import json
from functools import cache
from importlib.resources import files
from typing import Any, get_args, get_type_hints

from fczoo.backbones.names import BUNDLED_NAME
from fczoo.core.registry import METHODS, register_protocol
from fczoo.papers.protocol import Protocol, Statement, state
from fczoo.reports.contamination import shared_classes

SEARCH_SETTINGS = {
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
    f"fczoo tune: CIFAR-100, ViT-Ti/16 at {SEARCH_SETTINGS['image_size']} px, "
    f"{SEARCH_SETTINGS['train_per_class']} images per class, {SEARCH_SETTINGS['rounds']} rounds x "
    f"{SEARCH_SETTINGS['epochs']} epochs, 12 trials"
)
IMAGENET = f"fczoo: the bundled {BUNDLED_NAME} was trained with labels of these classes"


@register_protocol("quick")
class Quick(Protocol):
    """Shows that all works, not which method is best; on digits, what bench does without a
    protocol.

    Minutes do not train a head from nothing, so that a method would be measured by its head's
    start: here heads and prototypes start at class means, prompt methods read the class token, and
    a method that trains has the values that ``fczoo tune`` found for it in as few steps. Heads of
    joint training and SS-IL start at zero, where these ended higher.
    """

    paper = "none: fczoo's own"
    proposes = ("pilora", "hgp", "fppl")
    seeds = Statement((0,), "fczoo")
    settings = state(
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
        "digits": state(
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
        **state(IMAGENET, backbone="vit_tiny_patch16_224.augreg_in21k_ft_in1k"),
        **state(
            "fczoo: for minutes with a larger backbone",
            image_size=64,
            train_per_class=10,
            test_per_class=10,
            rounds=2,
        ),
    }
    """Settings on data sets with labels that the bundled backbone was trained with."""
    starts = state("fczoo", head_init="means", head_tune=True, pooled="cls")
    """Values of any method with an option of that name, except on digits."""
    zeros = frozenset({"joint", "ssil"})
    """Methods whose head starts at zero instead."""
    notes = (
        "It replaces the data set's backbone by the bundled one, which was trained on "
        "Tiny-ImageNet.",
        "On Tiny-ImageNet, mini-ImageNet and subsets of ImageNet it takes a ViT-Ti/16 with "
        "ImageNet "
        "weights, as papers do, at 64 pixels: the bundled one was trained with labels of these "
        "classes.",
    )

    @classmethod
    def settings_on(cls, dataset: str) -> dict[str, Statement]:
        """Return the settings on a data set; some data sets take the ImageNet backbone instead.

        Args:
            dataset: Name of the data set.

        Raises:
            FczooError: The data set is unknown.
        """
        overlap_degrees = {"all", "some"} & set(shared_classes(dataset, BUNDLED_NAME).values())
        return {**super().settings_on(dataset), **(cls.imagenet if overlap_degrees else {})}

    @classmethod
    def hyperparameters(cls, method: str, dataset: str) -> dict[str, Statement]:
        """Return the head's start and the tuned values of a method; empty on digits.

        Args:
            method: Name of the method; empty values for one that is not installed.
            dataset: Name of the data set.

        Raises:
            FczooError: The data set is unknown.
        """
        if cls.resolve(dataset) == "digits" or method not in METHODS.names():
            return {}
        hints = get_type_hints(METHODS.get(method))
        starts = {n: s for n, s in cls.starts.items() if n in hints and _fits(s.value, hints[n])}
        if method in cls.zeros:
            starts |= state("fczoo", head_init="zeros")
        search_values = tuned_values().get(method, {}).items()
        return {
            **starts,
            **{n: Statement(v, SEARCH, chosen_for=SEARCH_SETTINGS) for n, v in search_values},
        }


def _fits(value: Any, hint: Any) -> bool:
    """Return whether an option accepts a value; plug-ins may use the name differently."""
    return isinstance(value, bool) if hint is bool else value in get_args(hint)


@cache
def tuned_values() -> dict[str, dict[str, Any]]:
    """Return the tuned values by method, to three digits."""
    values = (files("fczoo.assets") / "quick.json").read_text(encoding="utf-8")
    options_by_method: dict[str, dict[str, Any]] = json.loads(values)
    return options_by_method
