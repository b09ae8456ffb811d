"""A small world in which a method runs in a second: a random ViT, seven separable classes, three uneven
clients.

What the checks of ``fczoo.testing`` use, and what the tests of a method of your own can use::

    bench = toy_bench(rounds=1)
    result = bench.run(small_method("fedprox"))

The three tasks have 3, 2 and 2 classes. One client has nothing in the second task, another one a single
image in the third. Everything is held in float64, so that tolerances can be tight, and is the same in every
process.
"""

import math
from dataclasses import fields, replace
from functools import cache
from typing import Any

import numpy as np
import torch

from fczoo.core.backbone import Backbone, ViTConfig
from fczoo.core.method import Method
from fczoo.core.registry import METHODS, create_method
from fczoo.core.tree import Tree
from fczoo.core.types import Task
from fczoo.data.dataset import Images
from fczoo.data.owned import Owned
from fczoo.data.partition import Partition, make_partition
from fczoo.data.stream import Stream
from fczoo.data.views import ImageStore
from fczoo.federation.benchmark import Bench
from fczoo.federation.settings import Settings

CLASSES, SIDE = 7, 16  # SIDE: pixels of an image
CONFIG = ViTConfig(
    "vit_test",
    image_size=SIDE,
    patch_size=8,
    dim=32,
    depth=6,
    heads=4,
    mlp_dim=64,
    mean=(0.4, 0.5, 0.6),
    std=(0.2, 0.25, 0.3),
)
TASKS = (Task(0, 0, 3, CLASSES, 3), Task(1, 3, 5, CLASSES, 3), Task(2, 5, 7, CLASSES, 3))
OWNED = ((13, 10, 7), (12, 8, 0), (5, 1, 14))  # training images of each client, task by task
TRAIN, TEST = 10, 3  # images of each class


def random_weights(config: ViTConfig, seed: int = 0) -> Tree:
    """Random weights of a ViT: large enough for every layer to matter, small enough for attention not to
    saturate."""
    rng = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in config.shapes().items():
        noise = torch.randn(shape, generator=rng)
        if "norm" in name:
            weights[name] = 0.2 * noise + float(name.endswith("weight"))
        else:
            weights[name] = noise * (math.prod(shape[1:]) ** -0.5 if name.endswith("weight") else 0.3)
    return weights


def random_images(per_class: int, seed: int) -> Images:
    """Images of seven classes in random order: each class is a pattern of coloured squares, plus noise."""
    patterns = np.random.default_rng(0).integers(30, 226, (CLASSES, 4, 4, 3))
    labels = np.repeat(np.arange(CLASSES), per_class)
    rng = np.random.default_rng(seed)
    labels = rng.permutation(labels)
    pixels = patterns[labels].repeat(4, 1).repeat(4, 2)
    pixels = pixels + rng.integers(-25, 26, (len(labels), SIDE, SIDE, 3))
    return Images(pixels.astype(np.uint8), labels)


@cache
def toy_backbone(dtype: torch.dtype = torch.float64) -> Backbone:
    """A random ViT of six blocks, width 32 and four patches."""
    return Backbone(CONFIG, random_weights(CONFIG)).to(dtype=dtype)


@cache
def toy_stream() -> Stream:
    """Ten training and three test images of each class, as if every second image of the original had been
    kept."""
    train, test = random_images(TRAIN, 1), random_images(TEST, 2)
    where = 3 + 2 * np.arange(len(train.labels))
    return Stream("toy", train, test, where, tuple(range(CLASSES)), tuple("abcdefg"), TASKS)


@cache
def toy_domains() -> Stream:
    """The toy stream's images as two domains, two tasks with all classes: even positions, then odd ones."""
    stream = toy_stream()
    train, test = (im._replace(domains=np.arange(len(im.labels)) % 2) for im in (stream.train, stream.test))
    tasks = tuple(Task(t, 0, CLASSES, CLASSES, 2) for t in range(2))
    return replace(stream, train=train, test=test, tasks=tasks)


@cache
def toy_partition() -> Partition:
    """The toy stream's training images over three clients, ``OWNED`` of them each."""
    stream, rng, parts = toy_stream(), np.random.default_rng(3), []
    for task, owned in zip(stream.tasks, OWNED, strict=True):
        here = rng.permutation(stream.train_index[stream.positions(stream.train, task)])
        parts.append(Owned(np.sort(part) for part in np.split(here, np.cumsum(owned)[:-1])))
    return Partition(stream.name, "by hand", 0, stream.class_order, tuple(parts))


def toy_bench(dtype: torch.dtype = torch.float64, domains: bool = False, **settings: Any) -> Bench:
    """A benchmark on the toy world: two rounds of two epochs a task in batches of four, on the CPU.

    With ``domains`` its tasks are the two of ``toy_domains``, their images shared out at random.

    ``settings`` are fields of ``Settings`` that replace these. The clients are trained one after another
    unless ``together`` says otherwise.
    """
    small = {
        "tasks": 3,
        "clients": 3,
        "rounds": 2,
        "epochs": 2,
        "batch_size": 4,
        "together": 1,
        "device": "cpu",
    }
    stream = toy_domains() if domains else toy_stream()
    partition = make_partition(stream, "iid", 3) if domains else toy_partition()
    backbone = Backbone(CONFIG, toy_backbone(dtype).weights)
    stores = (ImageStore(stream.train, backbone), ImageStore(stream.test, backbone))
    return Bench(Settings(dataset="toy", **{**small, **settings}), stream, partition, backbone, *stores)


def small_method(name: str, **options: Any) -> Method:
    """A method by name whose whole numbers are replaced by their roots, which is fast and keeps their order.

    Numbers of steps are replaced by the roots of these.
    ``options`` are set as given. Raises FczooError for an unknown method or option.
    """
    roots = {
        f.name: max(_root(f.name, f.default), f.metadata.get("low") or 0)
        for f in fields(METHODS.get(name))
        if type(f.default) is int
    }
    return create_method(name, **{**roots, **options})


def _root(option: str, default: int) -> int:
    root = math.isqrt(default)
    return math.isqrt(root) if "steps" in option else root
