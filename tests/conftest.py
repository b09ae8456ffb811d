"""A small world for the tests: a random ViT, images of seven separable classes in three unequal tasks, uneven clients."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from fczoo import Bench, Context, Method, Result, Settings, Tree, create_method
from fczoo.core.backbone import Backbone, ViTConfig
from fczoo.core.files import write_json
from fczoo.core.metrics import all_metrics
from fczoo.core.registry import METHODS
from fczoo.core.types import Batch, Task
from fczoo.data.dataset import Images
from fczoo.data.partition import Partition
from fczoo.data.stream import Stream
from fczoo.data.views import Augment, ImageStore
from fczoo.federation.batches import Client, make_inputs
from fczoo.federation.engine import Engine
from helpers_golden import golden

CONFIG = ViTConfig(
    "vit_test",
    image_size=16,
    patch_size=8,
    dim=32,
    depth=6,
    heads=4,
    mlp_dim=64,
    mean=(0.4, 0.5, 0.6),
    std=(0.2, 0.25, 0.3),
)
TASKS = (Task(0, 0, 3, 7, 3), Task(1, 3, 5, 7, 3), Task(2, 5, 7, 7, 3))
OWNED = ((13, 10, 7), (12, 8, 0), (5, 1, 14))  # images of each client in each task
TRAIN, TEST = 10, 3  # images of each class


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)  # tensors this small are slower on two


def random_weights(config: ViTConfig, seed: int = 0) -> Tree:
    """Weights large enough for every layer to matter, small enough for attention not to saturate."""
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
    """Each class is a pattern of 4x4 coloured squares plus noise."""
    patterns = np.random.default_rng(0).integers(30, 226, (7, 4, 4, 3))
    labels = np.repeat(np.arange(7), per_class)
    rng = np.random.default_rng(seed)
    labels = rng.permutation(labels)
    pixels = patterns[labels].repeat(4, 1).repeat(4, 2) + rng.integers(-25, 26, (len(labels), 16, 16, 3))
    return Images(pixels.astype(np.uint8), labels)


@pytest.fixture(scope="session")
def tasks() -> tuple[Task, ...]:
    return TASKS


@pytest.fixture(scope="session")
def backbone() -> Backbone:
    """A random ViT with six blocks, held in float64 so that tolerances can be tight."""
    return Backbone(CONFIG, random_weights(CONFIG)).to(dtype=torch.float64)


@pytest.fixture(scope="session")
def stream() -> Stream:
    train, test = random_images(TRAIN, 1), random_images(TEST, 2)
    where = 3 + 2 * np.arange(len(train.labels))  # as if only every second image of the original were kept
    return Stream("toy", train, test, where, tuple(range(7)), tuple("abcdefg"), TASKS)


@pytest.fixture(scope="session")
def partition(stream: Stream) -> Partition:
    """One client has nothing in the second task and another one a single image in the third."""
    rng, parts = np.random.default_rng(3), []
    for task, owned in zip(stream.tasks, OWNED, strict=True):
        here = rng.permutation(stream.train_index[stream.positions(stream.train, task)])
        parts.append(tuple(np.sort(part) for part in np.split(here, np.cumsum(owned)[:-1])))
    return Partition(stream.name, "by hand", 0, stream.class_order, tuple(parts))


@pytest.fixture(scope="session")
def make_bench(stream: Stream, partition: Partition, backbone: Backbone) -> Callable[..., Bench]:
    """``make_bench(dtype, **settings)``: a benchmark on the toy images; float64, two rounds of two epochs a task."""

    def make(dtype: torch.dtype = torch.float64, **settings: Any) -> Bench:
        small = {
            "tasks": 3,
            "clients": 3,
            "rounds": 2,
            "epochs": 2,
            "batch_size": 4,
            "together": 1,
            "device": "cpu",
            **settings,
        }
        held = Backbone(backbone.config, backbone.to(dtype=dtype).weights)
        return Bench(
            Settings(dataset="toy", **small),
            stream,
            partition,
            held,
            ImageStore(stream.train, held),
            ImageStore(stream.test, held),
        )

    return make


def small_method(name: str, **options: Any) -> Method:
    """A method by name. Its whole numbers are replaced by their roots, which is fast and keeps their order (chosen <= size)."""
    numbers = {
        f.name: max(math.isqrt(f.default), f.metadata.get("low") or 0)
        for f in fields(METHODS.get(name))
        if type(f.default) is int
    }
    return create_method(name, **{**numbers, **options})


@pytest.fixture(scope="session", name="small_method")
def small_method_() -> Callable[..., Method]:
    return small_method


@dataclass
class Call:
    """One call of ``Engine.train`` or, at a moment, ``Engine.survey``. Trees are copies."""

    moment: str
    engine: Engine
    state: Tree
    after: Tree  # the same state once the clients are done
    clients: list[Client]
    ctx: Context
    payloads: list[Tree]
    kept: list[Tree]  # the payloads' very tensors, which the server has used by the end of the run


@dataclass
class Record:
    """What went over the wire in one run, and the states that were evaluated."""

    method: Method
    bench: Bench
    result: Result
    calls: list[Call] = field(default_factory=list)
    states: dict[int, Tree] = field(default_factory=dict)  # task -> state after it

    @property
    def rounds(self) -> list[Call]:
        return [call for call in self.calls if call.moment == "train"]


def copied(tree: Tree) -> Tree:
    return {k: v.detach().clone() for k, v in tree.items()}


def watch(bench: Bench, method: Method, seed: int = 0) -> Record:
    """Run ``method`` and note every use of the engine and every evaluated state."""
    calls: list[Call] = []
    states: dict[int, Tree] = {}
    train, survey, predict = Engine.train, Engine.survey, type(method).predict

    def noted(
        moment: str,
        engine: Engine,
        state: Tree,
        clients: list[Client],
        ctx: Context,
        work: Callable[[], list[Tree]],
    ) -> list[Tree]:
        before = copied(state)
        payloads = work()
        calls.append(
            Call(
                moment,
                engine,
                before,
                copied(state),
                list(clients),
                ctx,
                [copied(p) for p in payloads],
                payloads,
            )
        )
        return payloads

    def noted_train(self: Engine, state: Tree, clients: list[Client], ctx: Context, *rest: Any) -> list[Tree]:
        return noted("train", self, state, clients, ctx, lambda: train(self, state, clients, ctx, *rest))

    def noted_survey(
        self: Engine, moment: str, state: Tree, clients: list[Client], ctx: Context
    ) -> list[Tree]:
        return noted(moment, self, state, clients, ctx, lambda: survey(self, moment, state, clients, ctx))

    def noted_predict(self: Method, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tensor:
        states[task.index] = copied(state)
        return predict(self, backbone, state, batch, task)

    with (
        mock.patch.object(Engine, "train", noted_train),
        mock.patch.object(Engine, "survey", noted_survey),
        mock.patch.object(type(method), "predict", noted_predict),
    ):
        result = bench.run(method, seed)
    # what predict saw was copied in inference mode; a clone outside of it is an ordinary tensor
    return Record(method, bench, result, calls, {t: copied(s) for t, s in states.items()})


@pytest.fixture(scope="session", name="watch")
def watch_() -> Callable[..., Record]:
    return watch


@pytest.fixture(scope="session")
def record(make_bench: Callable[..., Bench]) -> Callable[..., Record]:
    """``record(name, dtype, together, seed, copy)``: one watched run of a small method, made once a session."""
    known: dict[tuple, Record] = {}

    def get(
        name: str, dtype: torch.dtype = torch.float64, together: int = 1, seed: int = 0, copy: int = 0
    ) -> Record:
        key = (name, dtype, together, seed, copy)
        if key not in known:
            known[key] = watch(make_bench(dtype, together=together), small_method(name), seed)
        return known[key]

    return get


@pytest.fixture(scope="session")
def batch_of() -> Callable[..., Batch]:
    """``batch_of(method, store, index)``: images and query features as ``method`` asks for them, test view."""

    def build(method: Method, store: ImageStore, index: Tensor) -> Batch:
        x, q = make_inputs(method, store, index, Augment())
        return Batch(x, store.labels[index], torch.ones(len(index), dtype=q.dtype), q)

    return build


@pytest.fixture
def images_batch(make_bench, batch_of):
    """Six test images with query features."""
    return batch_of(create_method("fcilpt"), make_bench().test, torch.arange(6))


# Inputs of the recorded outputs (tests/golden/README.md).
@pytest.fixture(scope="module")
def micro() -> Backbone:
    config = ViTConfig("micro", image_size=32, patch_size=8, dim=48, depth=6, heads=4, mlp_dim=96, eps=1e-6)
    return Backbone(config, golden("common_micro_vit")).to(dtype=torch.float64)


@pytest.fixture(scope="module")
def images() -> Tensor:
    return golden("common_images")["micro_images"].double()


@pytest.fixture
def rng() -> Iterator[torch.Generator]:
    yield torch.Generator().manual_seed(0)


COUNTS = [10, 10]
PARTITION = Partition(
    "digits",
    "iid",
    0,
    tuple(range(10)),
    tuple((np.arange(t * 4, t * 4 + 2), np.arange(t * 4 + 2, t * 4 + 4)) for t in range(2)),
)


def make_run_(
    folder: Path,
    methods: dict[str, dict[int, float]],
    options: dict | None = None,
    backbone: str = "vit_nano_32",
    **settings: Any,
) -> Path:
    """A run folder: ``methods`` gives each one's accuracy on the first task at the end, by seed."""
    values = (
        Settings.for_dataset("digits").portable() | {"tasks": 2, "clients": 2, "partition": "iid"} | settings
    )
    about_backbone = {"name": backbone, "sha256": "b" * 64}
    split = {"spec": values["partition"], "sha256": PARTITION.sha256}
    seeds = sorted({s for runs in methods.values() for s in runs})
    folder.mkdir(parents=True)
    PARTITION.save(folder / "partition.json")
    about = {
        "methods": {m: options or {} for m in methods},
        "seeds": seeds,
        "settings": values,
        "backbone": about_backbone,
        "partition": split,
    }
    about |= {
        "device": "cpu",
        "versions": {"torch": "2"},
        "command": ["fczoo", "bench", "--methods", ",".join(methods)],
    }
    write_json(folder / "bench.json", about)
    for method, runs in methods.items():
        for seed, last in runs.items():
            matrix = [[90.0], [last, 80.0]]
            result = Result(
                method,
                options or {},
                values,
                seed,
                about_backbone,
                split,
                list(range(10)),
                [5, 5],
                COUNTS,
                12,
                accuracy=matrix,
            )
            result.metrics = all_metrics(matrix, COUNTS)
            result.bytes_up, result.bytes_down, result.client_rounds, result.seconds = (
                4_000_000,
                2_000_000,
                2,
                1.5,
            )
            result.uploaded = {"parameters": 3_000_000, "counts": 1_000_000}
            result.phases, result.client_storage, result.peak_memory = (
                {"training": 1.0, "evaluation": 0.5},
                3_000_000,
                {"process": 5_000_000},
            )
            place = folder / method / f"seed{seed}"
            place.mkdir(parents=True)
            write_json(place / "result.json", {"finished": True, **asdict(result)})
            rounds = [
                {
                    "task": t,
                    "round": 0,
                    "clients": [0, 1],
                    "loss": 1.0 - t / 2,
                    "bytes_up": 2_000_000,
                    "bytes_down": 0,
                }
                for t in range(2)
            ]
            (place / "rounds.jsonl").write_text(
                "".join(json.dumps({**r, "seconds": 0.5}) + "\n" for r in rounds)
            )
    return folder


@pytest.fixture(scope="session")
def make_run() -> Callable[..., Path]:
    """``make_run(folder, methods, options, backbone, **settings)``: a run folder written by hand."""
    return make_run_


@pytest.fixture
def noise(rng: torch.Generator) -> Callable[..., Tensor]:
    """``noise(*shape)``: standard normal numbers in float64."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    return draw
