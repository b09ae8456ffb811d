"""Three sites in one process, each with its own images of the toy benchmark."""

import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from fczoo import Benchmark, Method
from fczoo.data.dataset import Images
from fczoo.data.views import ImageStore
from fczoo.federation.callbacks import Callback
from fczoo.federation.run import FederatedRun
from fczoo.federation.scenario import Scenario
from fczoo.sites.server import Sites, SitesRun, start_run
from fczoo.sites.site import Site
from fczoo.sites.site_data import site_scenario

NAMES = ("paris", "rome", "lyon")


def own_scenario(bench: Benchmark, number: int) -> Scenario:
    """Build one site's scenario: the images that a client has in a simulation, in their order."""
    stream = bench.stream
    positions = np.sort(
        np.concatenate([task_parts[number] for task_parts in bench.partition.tasks])
    )
    index = np.searchsorted(stream.train_index, positions)
    train = Images(stream.train.pixels[index], stream.train.labels[index])
    none = Images(stream.test.pixels[:0], stream.test.labels[:0])
    site_stream = replace(stream, train=train, test=none, train_index=np.arange(len(index)))
    return site_scenario(
        bench.settings, site_stream, bench.backbone, ImageStore(train, bench.backbone), number
    )


def free_port() -> int:
    """Return a port that no process of this machine uses."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class LocalConnection:
    """The connection between a server and sites that are objects; it stores every message."""

    def __init__(self, sites: Mapping[int, Site]):
        self.sites = dict(sites)
        self.passed: list[tuple[int, bytes, bytes]] = []  # site, question, answer

    def __call__(self, questions: Mapping[int, bytes], limit: int, /) -> Mapping[int, bytes]:
        answers = {}
        for number, question in questions.items():
            answers[number] = self.sites[number].answer(question)
            assert len(answers[number]) <= limit  # of every method
            self.passed.append((number, question, answers[number]))
        return answers


def sites_of(bench: Benchmark, method: Method, folder: Path) -> dict[int, Site]:
    """Make a site for each client of a bench."""
    sites = {}
    for number in range(bench.partition.clients):
        site_folder = folder / str(number)
        site_folder.mkdir(parents=True, exist_ok=True)
        sites[number] = Site(own_scenario(bench, number), method, 0, number, NAMES, site_folder)
    return sites


def server_of(
    bench: Benchmark,
    method: Method,
    connection: LocalConnection,
    run: str = "a run",
    folder: Path | None = None,
) -> SitesRun:
    """Start the server of a bench, which has only the test images.

    Args:
        bench: The benchmark.
        method: The method that runs.
        connection: The connection to the sites.
        run: Name of the run.
        folder: Folder of the server's files.
    """
    stream = bench.stream
    none = Images(stream.train.pixels[:0], stream.train.labels[:0])
    server_stream = replace(stream, train=none, train_index=np.arange(0))
    return start_run(
        bench.settings,
        server_stream,
        bench.backbone,
        bench.test,
        method,
        0,
        Sites(NAMES, connection, run=run),
        folder,
    )


def simulate(bench: Benchmark, method: Method) -> FederatedRun:
    """Start a run of the same clients in one process."""
    return FederatedRun(bench, method, 0, Callback(), None, None)
