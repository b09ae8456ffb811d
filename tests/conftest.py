"""Fixtures: the toy world of ``fczoo.testing``, watched runs in it, inputs of the recorded outputs, run
folders."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from fczoo import Bench, Context, Method, Result, Tree, create_method
from fczoo.core.backbone import Backbone, ViTConfig
from fczoo.core.payload import Payload
from fczoo.core.types import Batch, Task
from fczoo.data.partition import Partition
from fczoo.data.stream import Stream
from fczoo.data.views import ImageStore
from fczoo.federation.batches import Client, view_batches
from fczoo.federation.engine import Engine
from fczoo.testing.world import TASKS, small_method, toy_backbone, toy_bench, toy_partition, toy_stream
from helpers_golden import golden
from helpers_runs import write_run


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)  # tensors this small are slower on two


@pytest.fixture(scope="session")
def tasks() -> tuple[Task, ...]:
    return TASKS


@pytest.fixture(scope="session")
def backbone() -> Backbone:
    return toy_backbone()


@pytest.fixture(scope="session")
def stream() -> Stream:
    return toy_stream()


@pytest.fixture(scope="session")
def partition() -> Partition:
    return toy_partition()


@pytest.fixture(scope="session")
def make_bench() -> Callable[..., Bench]:
    return toy_bench


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
    payloads: list[Payload]
    kept: list[Payload]  # the payloads' very tensors, which the server has used by the end of the run


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
        work: Callable[[], list[Payload]],
    ) -> list[Payload]:
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
                [p.holding(copied(p.tensors)) for p in payloads],
                payloads,
            )
        )
        return payloads

    def noted_train(
        self: Engine, state: Tree, clients: list[Client], ctx: Context, *rest: Any
    ) -> list[Payload]:
        return noted("train", self, state, clients, ctx, lambda: train(self, state, clients, ctx, *rest))

    def noted_survey(
        self: Engine, moment: str, state: Tree, clients: list[Client], ctx: Context
    ) -> list[Payload]:
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
def record() -> Callable[..., Record]:
    """``record(name, dtype, together, seed, copy)``: one watched run of a small method, made once a session."""
    known: dict[tuple, Record] = {}

    def get(
        name: str, dtype: torch.dtype = torch.float64, together: int = 1, seed: int = 0, copy: int = 0
    ) -> Record:
        key = (name, dtype, together, seed, copy)
        if key not in known:
            known[key] = watch(toy_bench(dtype, together=together), small_method(name), seed)
        return known[key]

    return get


@pytest.fixture(scope="session")
def batch_of() -> Callable[..., Batch]:
    """``batch_of(method, store, index)``: images and query features as ``method`` asks for them, test view."""

    def build(method: Method, store: ImageStore, index: Tensor) -> Batch:
        (batch,) = view_batches(method, store, index, len(index))
        return batch

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


@pytest.fixture(scope="session")
def make_run() -> Callable[..., Path]:
    """``make_run(folder, methods, options, backbone, **settings)``: a run folder written by hand."""
    return write_run


@pytest.fixture
def noise(rng: torch.Generator) -> Callable[..., Tensor]:
    """``noise(*shape)``: standard normal numbers in float64."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    return draw
