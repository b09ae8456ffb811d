"""Provide the toy benchmark of ``fczoo.testing``, watched runs, golden inputs and run folders."""

import compileall
import gc
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fczoo import Benchmark, Method, create_method
from fczoo.core.backbone import Backbone
from fczoo.core.types import Batch, Task
from fczoo.core.vit_config import ViTConfig
from fczoo.data.partition import Partition
from fczoo.data.stream import Stream
from fczoo.testing.method_under_test import MethodUnderTest, Record, batch_of, record_run
from fczoo.testing.toy_benchmark import (
    TASKS,
    small_method,
    toy_backbone,
    toy_bench,
    toy_partition,
    toy_stream,
)
from helpers_golden import LARGEST, golden
from helpers_runs import write_run

ROOT = Path(__file__).parents[1]
MEMORY = Path("/dev/shm")  # files in memory, on Linux
ROOM = 4 * 10**9  # bytes: the tests write less


def pytest_configure(config: pytest.Config) -> None:
    """Write temporary files to memory: a disk may need milliseconds for each file it removes."""
    if hasattr(config, "workerinput") or "TMPDIR" in os.environ or not MEMORY.is_dir():
        return
    if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > ROOM:
        os.environ.setdefault("RAY_TMPDIR", tempfile.gettempdir())  # Ray leaves its logs there
        os.environ["TMPDIR"] = tempfile.tempdir = str(MEMORY)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--differences",
        action="store_true",
        help="print the largest difference to each file of recorded outputs (with -n 0)",
    )


def pytest_sessionstart(session: pytest.Session) -> None:
    """Compile fczoo once: many processes import it, some with ``PYTHONDONTWRITEBYTECODE``."""
    if not hasattr(session.config, "workerinput"):
        for package in ("fczoo", "methods", "baselines", "datasets"):
            compileall.compile_dir(ROOT / package, quiet=2, workers=0)


def pytest_collection_finish() -> None:
    """Exempt modules and collected tests from garbage collection: they last for the session.

    Later objects are collected rarely, which saves time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if terminalreporter.config.getoption("--differences"):
        terminalreporter.section("largest max |a - b| / max |b| by recorded file")
        for case, value in sorted(LARGEST.items()):
            terminalreporter.write_line(f"{case}  {value:.1e}")


@pytest.fixture(scope="session", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the tests out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FCZOO_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(scope="session", autouse=True)
def unsynced_disk() -> Iterator[None]:
    """Do not wait for the disk: a small run waits longer for it than it computes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Limit the tests and the processes that they start to one thread.

    Tensors this small are slower on two threads.
    """
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


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
def make_bench() -> Callable[..., Benchmark]:
    return toy_bench


@pytest.fixture(scope="session", name="small_method")
def small_method_() -> Callable[..., Method]:
    return small_method


@pytest.fixture(scope="session", name="watch")
def watch_() -> Callable[..., Record]:
    return record_run


@lru_cache(4)  # tests of a method follow each other; all of them would take gigabytes
def subject_of(name: str) -> MethodUnderTest:
    return MethodUnderTest(small_method(name))


@pytest.fixture(scope="session")
def record() -> Callable[..., Record]:
    """Return ``record(name, dtype, together, seed)``: one watched run of a small method.

    Each run is made once per process.
    """
    return lambda name, *rest, **more: subject_of(name).run(*rest, **more)


@pytest.fixture(scope="session", name="batch_of")
def batch_of_() -> Callable[..., Batch]:
    return batch_of


@pytest.fixture
def images_batch(make_bench, batch_of):
    """Return six test images with query features."""
    return batch_of(create_method("fcilpt"), make_bench().test, torch.arange(6))


# Inputs of the recorded outputs (tests/methods/golden/README.md).
@pytest.fixture(scope="module")
def micro() -> Backbone:
    config = ViTConfig(
        "micro", image_size=32, patch_size=8, dim=48, depth=6, heads=4, mlp_dim=96, eps=1e-6
    )
    return Backbone(config, golden("common_micro_vit")).to(dtype=torch.float64)


@pytest.fixture(scope="module")
def images() -> Tensor:
    return golden("common_images")["micro_images"].double()


@pytest.fixture
def rng() -> Iterator[torch.Generator]:
    yield torch.Generator().manual_seed(0)


@pytest.fixture(scope="session")
def make_run() -> Callable[..., Path]:
    """Return ``make_run(folder, methods, options, backbone, **settings)``.

    It writes a run folder by hand, see ``write_run``.
    """
    return write_run


@pytest.fixture
def noise(rng: torch.Generator) -> Callable[..., Tensor]:
    """Return ``noise(*shape)``: standard normal numbers in float64."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    return draw
