"""What a method trains, sends and computes, measured from one client's step on random weights."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fczoo.backbones.load import configuration
from fczoo.core.backbone import Backbone
from fczoo.core.errors import FczooError
from fczoo.core.method import Distils, Method
from fczoo.core.payload import Payload
from fczoo.core.registry import DATASETS
from fczoo.core.tree import Tree, drop, nbytes, select
from fczoo.core.types import Batch, Context, Task
from fczoo.data.dataset import Images
from fczoo.data.stream import make_tasks
from fczoo.data.views import DRAWS, Augment, ImageStore, get_augment
from fczoo.federation.batches import Client, Rows, image_draws, stacked_batch
from fczoo.federation.controls import Controls
from fczoo.federation.downlink import broadcast
from fczoo.federation.engine import Engine
from fczoo.federation.local_training import CONTROL, make_local_training
from fczoo.federation.optimizers import Still
from fczoo.federation.plan import Plan
from fczoo.federation.settings import Settings
from fczoo.runner.moments import uploads


@dataclass(frozen=True)
class Measured:
    """Of a client that holds two images of every class of the first two tasks."""

    backbone: str
    trained: Tree  # in the first task
    sent: Mapping[str, Payload]  # moment -> upload, in the first task; see ``moments``
    later: Mapping[str, Payload]  # the same in the second
    remembered: Tree  # what it remembers from the first task
    held: Tree  # what it keeps of the broadcast in the second task besides what it trains
    received: Tree  # the whole broadcast as the first task begins
    weights: int  # bytes of the frozen backbone in float32
    flops: int  # of one image in one training step: inputs, forward and backward
    activations: int  # bytes that this step keeps for its backward, in float32


def first_tasks(settings: Settings, classes: int = 0) -> tuple[Task, ...]:
    """The first two tasks, or the one there is; ``classes`` as for ``measure``.

    Raises FczooError where nobody says how many classes there are.
    """
    if not (classes := classes or DATASETS.get(settings.dataset).classes):
        raise FczooError(
            f"{settings.dataset} has as many classes as its folder; name another data set to see what is "
            "trained and sent there, or see `fczoo bench --dry-run`"
        )
    return make_tasks(settings.dataset, classes, settings.tasks)[:2]


def measure(method: Method, settings: Settings, work: bool = False, classes: int = 0) -> Measured:
    """Measure a method in the first two tasks of a run.

    ``work`` also counts operations and activations, else 0; ``classes`` is how many classes a data set has
    that does not know it without its images.
    """
    task, *further = first_tasks(settings, classes)
    labels = np.concatenate([np.arange(t.start, t.stop).repeat(2) for t in (task, *further)])
    first, second = torch.arange(len(labels)).tensor_split([2 * task.size])
    rng, backbone = torch.Generator().manual_seed(0), random_backbone(settings)
    store = ImageStore(Images(np.zeros((len(labels), 8, 8, 3), np.uint8), labels), backbone)
    controls = Controls(make_local_training(settings.local))
    plan = Plan(1, task.size, Augment(), seed=0)
    engine = Engine(method, backbone, store, plan, controls=controls, make_steps=Still)
    state = method.begin_task({}, task, backbone, rng)
    optims = method.training().optims
    trained, received = select(state, *optims), broadcast(method, state)
    flops = activations = 0
    if trained and work:
        flops, activations = _one_step(method, store, trained, Context(task, 0, 1, received), settings)
    sent, state = uploads(engine, Client(0, first), task, state, rng)
    remembered, later, held = engine.memories.get(0, {}), dict[str, Payload](), Tree()
    if further:
        engine.taught.clear()
        controls.clear()
        state = method.begin_task(state, further[0], backbone, rng)
        held = drop(broadcast(method, state), *optims)
        later, _ = uploads(engine, Client(0, second, lambda: first), further[0], state, rng)
    return Measured(
        backbone.config.name,
        trained,
        sent,
        later,
        remembered,
        held,
        {**received, **select(sent.get("round", Payload({})).tensors, CONTROL)},
        nbytes(backbone.weights),
        flops,
        activations,
    )


def random_backbone(settings: Settings) -> Backbone:
    """The run's backbone with random weights, which need not be here."""
    config, rng = configuration(settings.backbone, settings.image_size), torch.Generator().manual_seed(0)
    return Backbone(config, {k: 0.02 * torch.randn(s, generator=rng) for k, s in config.shapes().items()})


def _one_step(
    method: Method, store: ImageStore, trained: Tree, ctx: Context, settings: Settings
) -> tuple[int, int]:
    from torch.utils.flop_counter import FlopCounterMode  # takes a second

    index, augment = torch.zeros(1, dtype=torch.int64), get_augment(settings.augment)
    draws = None if augment.fixed else torch.full((1, DRAWS), 0.5)
    if draws is None or settings.cache_queries:
        store.query(index)  # computed once a run, so not part of a step
    leaves = {k: v.detach().clone().requires_grad_() for k, v in trained.items()}
    kept = _Kept({**store.backbone.weights, **leaves, **ctx.shared})
    with FlopCounterMode(display=False) as counter:
        rows = Rows(index, draws, image_draws(method.training(), len(store.labels), index, "cost"))
        stacked = stacked_batch(method, store, [rows], augment, settings.cache_queries)
        batch = Batch(*(v[0] for v in stacked))
        if isinstance(method, Distils):
            with torch.no_grad():
                batch = batch._replace(teacher=method.teach(store.backbone, ctx.shared, batch, ctx.task))
        with torch.autograd.graph.saved_tensors_hooks(kept.note, lambda tensor: tensor):
            loss, _ = method.loss(store.backbone, leaves, batch, ctx)
        loss.backward()
    return counter.get_total_flops(), sum(kept.sizes.values())


class _Kept:
    """Sizes of the storages that a backward keeps, each once, without those that are there anyway."""

    def __init__(self, known: Mapping[str, Tensor]):
        self.known = {v.untyped_storage().data_ptr() for v in known.values()}
        self.sizes: dict[int, int] = {}

    def note(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.known:
            self.sizes[storage.data_ptr()] = storage.nbytes()
        return tensor
