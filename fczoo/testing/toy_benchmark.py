"""Toy benchmark: a benchmark on which a method runs in a second.

It has a random ViT, seven separable classes and three clients of different sizes. The checks of
``fczoo.testing`` use it; tests of methods can use it, too::

    bench = toy_bench(rounds=1)
    result = bench.run(small_method("fedprox"))

The three tasks have 3, 2 and 2 classes. One client has no image in the second task, another client
a single image in the third. Numbers are float64, for tight tolerances, and equal in every process.
"""

import math
import re
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch

from fczoo.core.backbone import Backbone
from fczoo.core.method import Method
from fczoo.core.registry import METHODS, create_method
from fczoo.core.tree import Tree
from fczoo.core.types import Task
from fczoo.core.vit_config import Rope, ViTConfig
from fczoo.data.client_index import ClientIndex
from fczoo.data.dataset import Images
from fczoo.data.partition import Partition, make_partition
from fczoo.data.stream import Stream
from fczoo.data.views import ImageStore
from fczoo.federation.benchmark import Benchmark
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
FAMILIES = {
    "dinov2": replace(CONFIG, layer_scale=True, register_tokens=2, position="patches"),
    "dinov3": replace(
        CONFIG,
        layer_scale=True,
        register_tokens=2,
        position="none",
        rope=Rope(100.0, centred=True, halves=True),
    ),
    "clip": replace(CONFIG, pre_norm=True, activation="quick_gelu"),
    "siglip": replace(CONFIG, class_token=False, pool="attention", activation="gelu_tanh"),
    "eva02": replace(
        CONFIG,
        rope=Rope(reference=4),
        swiglu=True,
        mlp_norm=True,
        pool="mean",
        norm_after_pool=True,
    ),
}
"""Networks of the same size, with the architecture of other families of vision transformers."""
TASKS = (Task(0, 0, 3, CLASSES, 3), Task(1, 3, 5, CLASSES, 3), Task(2, 5, 7, CLASSES, 3))
IMAGE_COUNTS = ((13, 10, 7), (12, 8, 0), (5, 1, 14))  # training images [task][client]
TRAIN, TEST = 10, 3  # images per class
TIMES = 40  # random cases per check


def random_weights(config: ViTConfig, seed: int = 0) -> Tree:
    """Draw weights of a ViT for which every layer has an effect and attention does not saturate.

    Args:
        config: Architecture, with names and shapes of the weights.
        seed: Seed of the draw.

    Returns:
        Float32 tensors by name.
    """
    rng = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in config.shapes().items():
        noise = torch.randn(shape, generator=rng)
        if "norm" in name:
            weights[name] = 0.2 * noise + float(name.endswith("weight"))
        else:
            weights[name] = noise * (
                math.prod(shape[1:]) ** -0.5 if name.endswith("weight") else 0.3
            )
    return weights


def random_images(per_class: int, seed: int) -> Images:
    """Draw images of seven classes in random order: one pattern of squares per class, plus noise.

    The patterns do not depend on ``seed``, so images of different seeds have the same classes.

    Args:
        per_class: Number of images per class.
        seed: Seed of order and noise.

    Returns:
        uint8 images [7 * per_class, 16, 16, 3] and their labels.
    """
    patterns = np.random.default_rng(0).integers(30, 226, (CLASSES, 4, 4, 3))
    labels = np.repeat(np.arange(CLASSES), per_class)
    rng = np.random.default_rng(seed)
    labels = rng.permutation(labels)
    pixels = patterns[labels].repeat(4, 1).repeat(4, 2)
    pixels = pixels + rng.integers(-25, 26, (len(labels), SIDE, SIDE, 3))
    return Images(pixels.astype(np.uint8), labels)


@cache
def toy_backbone(dtype: torch.dtype = torch.float64) -> Backbone:
    """Create a random ViT of six blocks, width 32 and four patches.

    Args:
        dtype: Number type of the weights.

    Returns:
        The backbone; all calls return the same object.
    """
    return Backbone(CONFIG, random_weights(CONFIG)).to(dtype=dtype)


@cache
def toy_stream() -> Stream:
    """Create a stream with ten training and three test images per class.

    Its positions in the original data are odd numbers from 3, to differ from those in the stream.
    """
    train, test = random_images(TRAIN, 1), random_images(TEST, 2)
    train_index = 3 + 2 * np.arange(len(train.labels))
    return Stream("toy", train, test, train_index, tuple(range(CLASSES)), tuple("abcdefg"), TASKS)


@cache
def toy_domains() -> Stream:
    """Create a stream of two domains, both with all classes, from the images of the toy stream.

    Images at even positions are of the first domain, the others of the second.
    """
    stream = toy_stream()
    train, test = (
        im._replace(domains=np.arange(len(im.labels)) % 2) for im in (stream.train, stream.test)
    )
    tasks = tuple(Task(t, 0, CLASSES, CLASSES, 2) for t in range(2))
    return replace(stream, train=train, test=test, tasks=tasks)


@cache
def toy_partition() -> Partition:
    """Split the training images of the toy stream over three clients, as in ``IMAGE_COUNTS``."""
    stream, rng, parts = toy_stream(), np.random.default_rng(3), []
    for task, counts in zip(stream.tasks, IMAGE_COUNTS, strict=True):
        task_indices = rng.permutation(stream.train_index[stream.positions(stream.train, task)])
        parts.append(
            ClientIndex(np.sort(part) for part in np.split(task_indices, np.cumsum(counts)[:-1]))
        )
    return Partition(stream.name, "by hand", 0, stream.class_order, tuple(parts))


def toy_bench(
    dtype: torch.dtype = torch.float64, domains: bool = False, family: str = "", **settings: Any
) -> Benchmark:
    """Create a benchmark on the toy benchmark, on the CPU.

    It runs two rounds of two epochs per task with batches of four.

    Args:
        dtype: Number type of the backbone.
        domains: Use the two tasks of ``toy_domains``, with images split at random (``iid``).
        family: Key of ``FAMILIES`` for another backbone; empty: that of ``toy_backbone``.
        settings: Fields of ``Settings`` that replace these. Without ``partition`` the images are
            split as in ``toy_partition``; otherwise image i has group i modulo 3. Without
            ``together`` the clients are trained one after another.

    Returns:
        The benchmark, ready to run.
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
    partition = toy_partition()
    if domains or "partition" in settings:
        stream = replace(stream, groups=np.arange(len(stream.train.labels)) % 3)
        clients = settings.get("clients", 3)
        partition = make_partition(stream, settings.get("partition", "iid"), clients)
    config, weights = CONFIG, toy_backbone(dtype).weights
    if family:
        config = FAMILIES[family]
        weights = {k: v.to(dtype) for k, v in random_weights(config).items()}
    backbone = Backbone(config, weights)
    stores = (ImageStore(stream.train, backbone), ImageStore(stream.test, backbone))
    return Benchmark(
        Settings(dataset="toy", **{**small, **settings}), stream, partition, backbone, *stores
    )


def small_method(name: str, **options: Any) -> Method:
    """Create a method with small integer options, which runs fast.

    The default of each integer option is replaced by its square root, that of a number of steps by
    its fourth root, rounded down but not below the option's lower limit.

    Args:
        name: Registered name of the method.
        options: Options with other values.

    Returns:
        The method.

    Raises:
        FczooError: The method or an option is unknown.
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


Draw = Callable[[int, int], int]
"""``draw(low, high)`` returns an integer; both ends are included."""


def need(holds: Any, sentence: str) -> None:
    """Raise AssertionError unless a condition is true; unlike ``assert`` also with ``python -O``.

    Args:
        holds: The condition.
        sentence: What is wrong and what to do.

    Raises:
        AssertionError: ``holds`` is false.
    """
    if not holds:
        raise AssertionError(sentence)


def check_random_cases(
    check: Callable[[Draw], None], times: int = TIMES, seed: int | None = None
) -> None:
    """Call a check on many random cases.

    hypothesis chooses them and shrinks a failing case. If it is not installed, the cases are drawn
    with the seeds 0, 1, 2, ...

    Args:
        check: Function of ``draw`` that raises AssertionError if a case fails.
        times: Number of cases.
        seed: Seed of the cases. None: hypothesis chooses other cases each time.

    Raises:
        AssertionError: A case fails.
    """
    try:
        from hypothesis import HealthCheck, given, settings
        from hypothesis import seed as fix_seed
        from hypothesis import strategies as st
        from hypothesis.errors import Flaky
    except ImportError:
        for case in range(times):
            check(_draws(np.random.default_rng([seed or 0, case])))
        return

    @settings(
        max_examples=times,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def attempt(data: Any) -> None:
        try:
            check(lambda low, high: data.draw(st.integers(low, high)))
        except AssertionError as error:
            failures.append(error)
            raise

    failures: list[AssertionError] = []
    try:
        (attempt if seed is None else fix_seed(seed)(attempt))()
    except Flaky:  # a case that failed once and passed at its repetition
        raise failures[-1] from None


def _draws(rng: np.random.Generator) -> Draw:
    return lambda low, high: int(rng.integers(low, high + 1))


def need_documented(cls: Any, label: str) -> None:
    """Raise AssertionError unless a registered entry and each of its options have a description.

    Args:
        cls: Registered class or function.
        label: Its name in messages.

    Raises:
        AssertionError: A docstring or the meaning of an option is missing.
    """
    need(
        cls.__doc__
        and not cls.__doc__.startswith(
            f"{cls.__name__}("
        ),  # not the docstring that dataclass generates
        f"{label} has no description; write a docstring",
    )
    options = fields(cls) if is_dataclass(cls) else ()
    undocumented = [f.name for f in options if not f.metadata.get("meaning")]
    need(
        not undocumented,
        f"{label} does not describe {', '.join(undocumented)}; declare it with fczoo.option",
    )


def need_one_line(error: Exception, label: str) -> None:
    """Raise AssertionError unless an error's message is a single line of text.

    Args:
        error: The error.
        label: Name of the entry that raised it.

    Raises:
        AssertionError: The message is empty or has several lines.
    """
    need(
        re.fullmatch(r".*\S.*", str(error)),
        f"{label} raises an error with message {str(error)!r}; raise FczooError with one line",
    )
