"""How long a run may take, from a few steps that are taken."""

import time

import numpy as np
import torch

from fczoo.core.method import Method
from fczoo.core.tree import select
from fczoo.core.types import Context
from fczoo.data.dataset import Images
from fczoo.data.views import ImageStore, get_augment
from fczoo.federation.batches import Client
from fczoo.federation.device import DTYPES, pick_device
from fczoo.federation.downlink import broadcast
from fczoo.federation.engine import Engine
from fczoo.federation.plan import Plan
from fczoo.federation.settings import Settings
from fczoo.runner.cost import first_tasks, random_backbone

STEPS = 3  # that are timed
SLOW = 5.0  # seconds of a first step after which no other one is taken


def seconds_a_step(method: Method, settings: Settings, classes: int = 0) -> float:
    """Seconds of one client's step on a full batch in the first task, on the run's device.

    Weights are random; ``classes`` as for ``measure``. 0 where the method trains nothing.
    """
    size, device = settings.batch_size, pick_device(settings.device)
    task = first_tasks(settings, classes)[0]
    backbone = random_backbone(settings).to(device, DTYPES[settings.precision])
    images = Images(np.zeros((size, 8, 8, 3), np.uint8), np.arange(size) % task.size)
    store = ImageStore(images, backbone)
    state = method.begin_task({}, task, backbone, torch.Generator().manual_seed(0))
    state = {name: value.to(device) for name, value in state.items()}
    if not select(state, *method.training().active_optims(task, 0)):
        return 0.0
    context = Context(task, 0, 1, broadcast(method, state))

    def seconds(steps: int) -> float:
        plan = Plan(steps, size, get_augment(settings.augment), 0, cache_queries=settings.cache_queries)
        begin = time.perf_counter()
        Engine(method, backbone, store, plan).train(state, [Client(0, torch.arange(size))], context)
        return time.perf_counter() - begin

    first = seconds(1)  # with what is imported and allocated once
    if first > SLOW:
        return first
    alone, several = seconds(1), seconds(1 + STEPS)  # both with what a client does besides its steps
    if several <= alone:  # the machine was busy with other work: no less can be told
        return several / (1 + STEPS)
    return (several - alone) / STEPS


def worded(seconds: float) -> str:
    """``90`` -> ``2 min``."""
    for unit, length in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 1.5 * length:
            return f"{seconds / length:,.0f} {unit}"
    return f"{seconds:,.0f} s"
