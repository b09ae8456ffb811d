"""Estimates of a run's duration, from a few timed steps."""

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fczoo.backbones.load import configuration
from fczoo.core.backbone import Backbone
from fczoo.core.method import Method
from fczoo.core.options import with_fewest_steps
from fczoo.core.tree import Tree, select
from fczoo.core.types import Context
from fczoo.core.vit_config import ViTConfig
from fczoo.data.dataset import Images
from fczoo.data.views import ConstantFeatures, ImageStore, get_augment
from fczoo.federation.batches import Client, view_batches
from fczoo.federation.client_engine import ClientEngine
from fczoo.federation.data_setup import tasks_of
from fczoo.federation.device import DTYPES, Plan, pick_device
from fczoo.federation.server import broadcast
from fczoo.federation.settings import Settings
from fczoo.runner.cost import FirstRound, first_tasks, random_backbone, with_random_weights
from fczoo.runner.outline import Outlines, outline_weights

STEPS = 3  # timed steps
SHORT_STEP_SECONDS = 0.02  # up to which a step is timed instead of estimated from its operations
MEASUREMENT_SECONDS = 0.5  # that one measurement of the speed may take
BLOCKS = 2  # timed blocks of the backbone; all blocks do the same work
SLOW_STEP_SECONDS = 5.0  # of a first step, above which no further step is timed


class StepTimer:
    """Estimate the duration of a run's training on its device.

    Short steps are timed. For other steps the number of operations is divided by the backbone's
    speed, which is measured on as many images as ``MEASUREMENT_SECONDS`` allows: one on a slow
    device.
    """

    def __init__(self, settings: Settings, classes: int = 0, config: ViTConfig | None = None):
        self.settings, self.classes, self.device = settings, classes, pick_device(settings.device)
        self.task = first_tasks(settings, classes)[0]
        self.config = config or configuration(settings.backbone, settings.image_size, settings.pool)

    def seconds(self, method: Method, cost: FirstRound, image_steps: float, images: int) -> float:
        """Return the seconds of ``image_steps`` plus those of query features of ``images``."""
        if not self.trains(method):
            return 0.0
        queries, size = cost.query_flops * images / self.speed, self.settings.batch_size
        step_seconds = cost.flops * size / self.speed
        if step_seconds <= SHORT_STEP_SECONDS:
            step_seconds = seconds_per_step(
                with_fewest_steps(method), self.settings, self.classes, self.backbone
            )
        return queries + step_seconds * image_steps / size

    @cached_property
    def backbone(self) -> Backbone:
        """Return the run's backbone with random weights."""
        return self._place_backbone(self.config)

    @cached_property
    def speed(self) -> float:
        """Return the operations per second of the backbone's forward and backward."""
        images, speed = 1, 0.0
        while True:
            seconds = min(self._time_pass(self._shallow_backbone, images) for _ in thread_counts())
            speed = max(speed, self._operations * images / seconds)
            if images >= self.settings.batch_size or 4 * seconds > MEASUREMENT_SECONDS:
                return speed
            images = min(4 * images, self.settings.batch_size)

    def trains(self, method: Method) -> bool:
        """Return whether clients train in the first round.

        Args:
            method: The method.
        """
        return bool(method.training().active_optims(self.task, 0))

    def forward_seconds(self, images: int) -> float:
        """Estimate the seconds of forward passes through all blocks.

        A forward pass is assumed to take half of the operations of forward and backward.

        Args:
            images: Number of images.
        """
        blocks = self.config.depth / self._shallow_backbone.config.depth
        return images * blocks * self._operations / 2 / self.speed

    @cached_property
    def _shallow_backbone(self) -> Backbone:
        return self._place_backbone(replace(self.config, depth=min(self.config.depth, BLOCKS)))

    @cached_property
    def _operations(self) -> float:
        """Return the operations of an image's forward and backward through ``BLOCKS`` blocks."""
        with FlopCounterMode(display=False) as counter:  # also a warm-up before steps are timed
            self._run_pass(self._shallow_backbone, 1)
        return float(counter.get_total_flops())

    def _place_backbone(self, config: ViTConfig) -> Backbone:
        return with_random_weights(config).to(self.device, DTYPES[self.settings.precision])

    def _time_pass(self, backbone: Backbone, images: int) -> float:
        begin = time.perf_counter()
        self._run_pass(backbone, images)
        return time.perf_counter() - begin

    def _run_pass(self, backbone: Backbone, images: int) -> None:
        side = backbone.config.image_size
        x = torch.rand(images, 3, side, side, device=self.device).to(backbone.dtype)
        tokens = torch.zeros(1, backbone.token_dim, device=self.device, requires_grad=True)
        backbone(x, {"tokens": tokens}).square().sum().backward()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def thread_counts() -> Iterator[int]:
    """Set PyTorch to all its threads, then to one, for a measurement with each.

    The number of threads is restored at the end. On a busy machine one thread may be faster,
    because several threads wait for one another in every operation.
    """
    threads = torch.get_num_threads()
    try:
        for count in (threads, 1):
            torch.set_num_threads(count)
            yield count
    finally:
        torch.set_num_threads(threads)


def seconds_per_step(
    method: Method, settings: Settings, classes: int = 0, backbone: Backbone | None = None
) -> float:
    """Measure the seconds of one client's step on a full batch of the first task on the device.

    Weights are random, or those of ``backbone``; ``classes`` as for ``cost.measure``. The result is
    0 if the method trains nothing.
    """
    size, device = settings.batch_size, pick_device(settings.device)
    task = first_tasks(settings, classes)[0]
    backbone = backbone or random_backbone(settings).to(device, DTYPES[settings.precision])
    images = Images(np.zeros((size, 8, 8, 3), np.uint8), np.arange(size) % task.size)
    store = ConstantFeatures(images, backbone)
    state = method.begin_task({}, task, backbone, torch.Generator().manual_seed(0))
    state = {name: value.to(device) for name, value in state.items()}
    if not select(state, *method.training().active_optims(task, 0)):
        return 0.0
    context = Context(task, 0, 1, broadcast(method, state))

    def seconds(steps: int) -> float:
        plan = Plan(
            steps, size, get_augment(settings.augment), 0, cache_queries=settings.cache_queries
        )
        begin = time.perf_counter()
        ClientEngine(method, backbone, store, plan).train(
            state, [Client(0, torch.arange(size))], context
        )
        return time.perf_counter() - begin

    first = seconds(1)  # includes imports and first allocations
    if first > SLOW_STEP_SECONDS:
        return first
    single_step, several_steps = [], []  # both include a client's work before and after its steps
    for _ in thread_counts():
        single_step.append(seconds(1))
        several_steps.append(seconds(1 + STEPS))
    shortest = min(several_steps)
    if shortest <= min(single_step):  # the machine was busy: only an upper bound is known
        return shortest / (1 + STEPS)
    return (shortest - min(single_step)) / STEPS


def duration_text(seconds: float) -> str:
    """Format seconds: ``90`` -> ``2 min``."""
    for unit, length in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 1.5 * length:
            return f"{seconds / length:,.0f} {unit}"
    return f"{seconds:,.0f} s"


def inference_operations(method: Method, settings: Settings) -> float:
    """Count the operations of predicting one image after the last task, from shapes only.

    They include the image's query feature if the method needs one.
    """
    config = configuration(settings.backbone, settings.image_size, settings.pool)
    rng, state, tasks = torch.Generator().manual_seed(0), Tree(), tasks_of(settings, 0)
    # the operations of fused attention are not counted on a CPU
    with sdpa_kernel(SDPBackend.MATH), Outlines() as outlines:
        backbone = Backbone(config, outline_weights(config), copy=False)
        for task in tasks:
            state = method.begin_task(state, task, backbone, rng)
        pixels = np.zeros((1, config.image_size, config.image_size, 3), np.uint8)
        images = Images(pixels, np.zeros(1, np.int64))
        store, start = ImageStore(images, backbone), outlines.flops
        (batch,) = view_batches(method, store, torch.zeros(1, dtype=torch.int64), 1)
        method.predict(backbone, state, batch, tasks[-1])
        return float(outlines.flops - start)
