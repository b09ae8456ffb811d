"""Cost of a method on random weights: trained tensors, and a client's bytes and operations."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from fczoo.backbones.load import configuration
from fczoo.core.backbone import Backbone
from fczoo.core.errors import FczooError
from fczoo.core.method import Method, task_exchanges
from fczoo.core.options import with_fewest_steps
from fczoo.core.payload import Payload, unpack_factors, unpack_symmetric
from fczoo.core.registry import DATASETS
from fczoo.core.tree import Tree, drop, nbytes, select
from fczoo.core.types import Batch, Boundary, Context, EndsTasks, HasTeacher, ServerContext, Task
from fczoo.core.vit_config import ViTConfig
from fczoo.data.dataset import Images
from fczoo.data.views import Augment, ImageStore, get_augment
from fczoo.federation.batches import Client, Rows, image_draws, stack_batch
from fczoo.federation.client_engine import ClientEngine
from fczoo.federation.compression import Compression, encoded_form, make_compression
from fczoo.federation.data_setup import tasks_of
from fczoo.federation.device import Plan
from fczoo.federation.local_rules import CONTROL, ControlVariates, make_local_training
from fczoo.federation.local_trainer import skip_steps
from fczoo.federation.server import broadcast
from fczoo.federation.settings import Settings
from fczoo.federation.uplink import sum_or_stack
from fczoo.runner.outline import Outlines, outline_backbone, outline_weights

CLIENT_PHASES = {
    "task_start": "as statistics at the start of a task",
    "round": "in a round",
    "before_exemplars": "as statistics after the rounds",
    "after_rounds": "after the rounds, when clients update their memory",
    "balanced": "in an extra round on exemplars only",
    "task_end": "as statistics at the end of a task",
}
"""Phases of a task in which clients act, in their order, with their descriptions."""


def simulate_task(
    engine: ClientEngine,
    client: Client,
    task: Task,
    state: Tree,
    rng: torch.Generator,
    compression: Compression | None = None,
    first_round_only: bool = False,
) -> tuple[dict[str, Payload], Tree]:
    """Return one client's uploads in a task of one round, by phase, and the server's final state.

    ``state`` is the server's state after ``begin_task``. In a phase that a method uses only to
    update its memory, the upload is empty. With ``compression`` the codes of an upload have no
    values. With ``first_round_only`` the task ends after its round; a method without rounds runs
    all its phases.
    """
    simulation = _TaskSimulation(engine, client, task, state, rng, compression)
    simulation.run(first_round_only)
    return simulation.uploads, simulation.state


@dataclass
class _TaskSimulation:
    engine: ClientEngine
    client: Client
    task: Task
    state: Tree  # current state of the server
    rng: torch.Generator
    compression: Compression | None = None
    uploads: dict[str, Payload] = field(default_factory=dict)  # uploads by phase

    def run(self, first_round_only: bool) -> None:
        """Run the exchanges of the task in order: all, or those up to the first round."""
        client = self.client
        for exchange in task_exchanges(self.engine.method, self.task, 1):
            if exchange.boundary == "after_rounds":
                client = self._end_task()
            elif exchange.boundary:
                self._collect(exchange.boundary, client)
            elif exchange.balanced:
                exemplars = self.engine.exemplars(client)
                if len(exemplars):
                    self._run_round("balanced", 1, replace(client, index=exemplars))
            else:
                self._run_round("round", 0, client)
                if first_round_only:
                    return

    def _collect(self, phase: Boundary, client: Client) -> None:
        method = self.engine.method
        number = 0 if phase == "task_start" else 1
        (upload,) = self.engine.collect(phase, self._broadcast, [client], self._context(number))
        self.uploads[phase] = upload
        self.state = method.update_from(
            phase, self.state, self._sum_upload(upload), self._server_context(number)
        )

    def _run_round(self, phase: str, number: int, client: Client) -> None:
        """Record an untrained upload; the server's state stays as it is."""
        ctx = self._context(number)
        (upload,) = self.engine.train(self._broadcast, [client], ctx)
        optims = self.engine.method.training().active_optims(self.task, ctx.round, ctx.balanced)
        start = select(self._broadcast, *optims)
        self.uploads[phase] = encoded_form(self.compression, upload, start)

    def _end_task(self) -> Client:
        """Return the client with its images of the task and its exemplars."""
        method = self.engine.method
        assert isinstance(method, EndsTasks)
        (upload,) = self.engine.end_task_client([self.client], self._context(1))
        self.uploads["after_rounds"] = upload
        if upload:
            sums, ctx = self._sum_upload(upload), self._server_context(1)
            self.state = method.update_from("after_rounds", self.state, sums, ctx)
        return self.engine.with_exemplars(self.client)

    @property
    def _broadcast(self) -> Tree:
        return broadcast(self.engine.method, self.state)

    def _sum_upload(self, upload: Payload) -> Tree:
        training = self.engine.method.training()
        upload = unpack_factors(upload, training.uploads, upload)
        sums = sum_or_stack([upload], training.per_client_statistics)
        return unpack_symmetric(sums, training.uploads)

    def _context(self, number: int) -> Context:
        return Context(self.task, number, 1, self._broadcast)

    def _server_context(self, number: int) -> ServerContext:
        backbone = self.engine.backbone
        images, senders = len(self.client.index), (self.client.number,)
        return ServerContext(self.task, number, 1, 1, 1, images, backbone, self.rng, senders)


@dataclass(frozen=True)
class MeasuredCost:
    """Measured cost of a client with two images of every class of the first two tasks."""

    backbone: str
    trained_tensors: Tree  # in the first task
    first_task_uploads: Mapping[str, Payload]  # by phase; see ``CLIENT_PHASES``
    second_task_uploads: Mapping[str, Payload]
    client_memory: Tree  # state that the client stores after the first task
    stored_broadcast: Tree  # untrained part of the second task's broadcast
    broadcast: Tree  # broadcast at the start of the first task; empty with own models


# largest number of classes per task for which a client has images of all of them
MAX_FULL_CLASSES = 20
# with more classes: numbers of classes of the two clients to extrapolate from
EXTRAPOLATION_CLASSES = (2, 4)


@dataclass(frozen=True)
class FirstRound:
    """Computation and traffic of a client's first round, from shapes only."""

    trained_tensors: Tree
    upload_bytes: int  # in the round; without rounds, of its uploads in all phases
    broadcast: Tree  # broadcast at the start of the first task; empty with own models
    weight_bytes: int  # bytes of the frozen backbone in float32
    # of one image in one training step
    flops: int  # operations of inputs, forward and backward
    activation_bytes: int  # bytes that the step stores for its backward, in float32
    query_flops: int  # of its query feature if that is computed once per run, else 0


def first_tasks(settings: Settings, classes: int = 0) -> tuple[Task, ...]:
    """Return the first two tasks, or the only one; ``classes`` as for ``measure``.

    Raises FczooError if the number of classes is unknown.
    """
    if not classes and not DATASETS.get(settings.dataset).classes:
        raise FczooError(
            f"the number of classes of {settings.dataset} depends on its folder; name another data "
            "set, or run `fczoo bench --dry-run`"
        )
    return tasks_of(settings, classes)[:2]


def measure(method: Method, settings: Settings, classes: int = 0) -> MeasuredCost:
    """Measure a method in the first two tasks of a run.

    ``classes`` is the number of classes, for data sets that know it only from their images.
    """
    task, *further = first_tasks(settings, classes)
    labels = np.concatenate([np.arange(t.start, t.stop).repeat(2) for t in (task, *further)])
    first, second = torch.arange(len(labels)).tensor_split([2 * task.size])
    rng, backbone = torch.Generator().manual_seed(0), random_backbone(settings)
    store = ImageStore(Images(np.zeros((len(labels), 8, 8, 3), np.uint8), labels), backbone)
    controls = ControlVariates(make_local_training(settings.local))
    plan = Plan(1, task.size, Augment(), seed=0)
    engine = ClientEngine(
        method, backbone, store, plan, controls=controls, make_optimizers=skip_steps
    )
    state = method.begin_task({}, task, backbone, rng)
    optims = method.training().optims
    trained_tensors, broadcast_tree = select(state, *optims), broadcast(method, state)
    compression = make_compression(settings.compress)
    first_payloads, state = simulate_task(engine, Client(0, first), task, state, rng, compression)
    memory = engine.memories.get(0, {})
    second_payloads, untrained_tensors = dict[str, Payload](), Tree()
    if further:
        engine.teacher_outputs.clear()
        controls.clear()
        state = method.begin_task(state, further[0], backbone, rng)
        untrained_tensors = drop(broadcast(method, state), *optims)
        client = Client(0, second, lambda: first)
        second_payloads, _ = simulate_task(engine, client, further[0], state, rng, compression)
    return MeasuredCost(
        backbone.config.name,
        trained_tensors,
        first_payloads,
        second_payloads,
        memory,
        untrained_tensors,
        {}
        if method.training().own_models
        else {
            **broadcast_tree,
            **select(first_payloads.get("round", Payload({})).tensors, CONTROL),
        },
    )


def first_round(
    method: Method, settings: Settings, classes: int = 0, config: ViTConfig | None = None
) -> FirstRound:
    """Count the operations and bytes of a client's first round, with every class of the first task.

    Large tensors are not computed. Every class adds the same to an upload, so the upload of a
    client with many classes is extrapolated from two clients with few. ``classes`` as for
    ``measure``; ``config`` is the backbone's configuration, if it is known already.
    """
    task, config = first_tasks(settings, classes)[0], config or _configuration(settings)
    with Outlines() as outlines:
        backbone = outline_backbone(config)
        state = method.begin_task({}, task, backbone, torch.Generator().manual_seed(0))

        def uploads_of(class_count: int) -> dict[str, Payload]:
            return _client_uploads(
                with_fewest_steps(method), settings, task, state, backbone, class_count
            )

        trained_tensors, broadcast_tree = (
            select(state, *method.training().optims),
            broadcast(method, state),
        )
        few, many = EXTRAPOLATION_CLASSES
        payloads = uploads_of(task.size if task.size <= MAX_FULL_CLASSES else few)
        upload_bytes, in_round = _upload_bytes(payloads), payloads.get("round", Payload({})).tensors
        whole_trained = {k: v for k, v in trained_tensors.items() if k in in_round}
        same_for_any = bool(in_round) and _shapes(in_round) == _shapes(whole_trained)
        if task.size > MAX_FULL_CLASSES and not same_for_any:
            upload_bytes += (
                (_upload_bytes(uploads_of(many)) - upload_bytes) // (many - few) * (task.size - few)
            )
        step_cost = 0, 0, 0
        if trained_tensors:
            full_backbone = Backbone(config, outline_weights(config), copy=False)
            store, context = (
                ImageStore(_two_images_per_class(task, 1), full_backbone),
                Context(task, 0, 1, broadcast_tree),
            )
            step_cost = _measure_step(method, store, trained_tensors, context, settings, outlines)
    broadcast_tree = {**broadcast_tree, **select(in_round, CONTROL)}
    if method.training().own_models:
        broadcast_tree = {}
    return FirstRound(
        trained_tensors, upload_bytes, broadcast_tree, nbytes(backbone.weights), *step_cost
    )


def _two_images_per_class(task: Task, classes: int) -> Images:
    """Return two images of each of the task's first classes."""
    labels = np.arange(task.start, task.start + classes).repeat(2)
    return Images(np.zeros((len(labels), 8, 8, 3), np.uint8), labels)


def client_tensors(method: Method, settings: Settings) -> dict[str, Tree]:
    """Return the tensors that a client trains and sends, and the server's state, as shapes only.

    ``trained``, and an entry per phase of ``CLIENT_PHASES``, belong to a client with every class of
    the first task; ``state`` is the server's state at the start of the last task.
    """
    (task, *later_tasks), rng = tasks_of(settings, 0), torch.Generator().manual_seed(0)
    with Outlines():
        backbone = outline_backbone(_configuration(settings))
        state = method.begin_task({}, task, backbone, rng)
        trained_tensors = select(state, *method.training().optims)
        fast = with_fewest_steps(method)
        uploads = _client_uploads(fast, settings, task, state, backbone, task.size, whole_task=True)
        for task in later_tasks:
            state = method.begin_task(state, task, backbone, rng)
    tensors = {phase: dict(upload.tensors) for phase, upload in uploads.items()}
    return {"trained": trained_tensors, "state": state, **tensors}


def _client_uploads(
    method: Method,
    settings: Settings,
    task: Task,
    state: Tree,
    backbone: Backbone,
    classes: int,
    whole_task: bool = False,
) -> dict[str, Payload]:
    """Return the uploads of a client with this many classes by phase, up to its first round.

    With ``whole_task`` all phases of the task are included.
    """
    plan = Plan(1, 2 * classes, Augment(), seed=0, pass_size=2 * classes)
    controls = ControlVariates(make_local_training(settings.local))
    store = ImageStore(_two_images_per_class(task, classes), backbone)
    engine = ClientEngine(
        method, backbone, store, plan, controls=controls, make_optimizers=skip_steps
    )
    client, rng = Client(0, torch.arange(2 * classes)), torch.Generator().manual_seed(0)
    compression = make_compression(settings.compress)
    uploads, _ = simulate_task(
        engine, client, task, state, rng, compression, first_round_only=not whole_task
    )
    return uploads


def _shapes(tree: Tree) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in tree.items()}


def _upload_bytes(uploads: Mapping[str, Payload]) -> int:
    payloads = [uploads["round"]] if "round" in uploads else uploads.values()
    return sum(nbytes(upload.tensors) for upload in payloads)


def _configuration(settings: Settings) -> ViTConfig:
    return configuration(settings.backbone, settings.image_size, settings.pool)


def random_backbone(settings: Settings) -> Backbone:
    """Return the run's backbone with random weights; no weight file is needed."""
    return with_random_weights(_configuration(settings))


def with_random_weights(config: ViTConfig) -> Backbone:
    """Return a backbone of this configuration with random weights."""
    rng = torch.Generator().manual_seed(0)
    return Backbone(
        config, {k: 0.02 * torch.randn(s, generator=rng) for k, s in config.shapes().items()}
    )


def _measure_step(
    method: Method,
    store: ImageStore,
    trained_tensors: Tree,
    ctx: Context,
    settings: Settings,
    outlines: Outlines,
) -> tuple[int, int, int]:
    """Return operations, bytes stored for the backward, and operations of the query feature."""
    index, augment = torch.zeros(1, dtype=torch.int64), get_augment(settings.augment)
    draws = None if augment.is_fixed else torch.full((1, augment.draws), 0.5)
    start_flops, query = outlines.flops, 0
    if "query" in method.training().inputs and (draws is None or settings.cache_queries):
        store.query(index)  # computed once per run, so not part of a step
        query = (outlines.flops - start_flops) // len(store.labels)
    leaves = {k: v.detach().clone().requires_grad_() for k, v in trained_tensors.items()}
    existing = {**store.backbone.weights, **leaves, **ctx.shared}.values()
    existing_addresses = {tensor.untyped_storage().data_ptr() for tensor in existing}
    sizes: dict[int, int] = {}  # bytes of storages kept for the backward, by address

    def note_size(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in existing_addresses:
            sizes[address] = outlines.bytes.get(address, storage.nbytes())
        return tensor

    start_flops = outlines.flops
    method_draws = image_draws(method.training(), len(store.labels), index, "cost")
    rows = Rows(index, draws, method_draws, 0)
    client_batch = stack_batch(method, store, [rows], augment, settings.cache_queries)
    batch = Batch(*(v[0] for v in client_batch))
    if isinstance(method, HasTeacher):
        with torch.no_grad():
            batch = batch._replace(
                teacher=method.teacher_outputs(store.backbone, ctx.shared, batch, ctx.task)
            )
    with torch.autograd.graph.saved_tensors_hooks(note_size, lambda tensor: tensor):
        loss, _ = method.loss(store.backbone, leaves, batch, ctx)
    loss.backward()
    return outlines.flops - start_flops, sum(sizes.values()), query
