"""Three sites in one process, each with its own images of the toy world and nothing else."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from fczoo import Bench, Method
from fczoo.data.dataset import Images
from fczoo.data.views import ImageStore
from fczoo.federation.observer import Silent
from fczoo.federation.rounds import Run
from fczoo.federation.world import World
from fczoo.sites.server import Sites, SitesRun, begin
from fczoo.sites.site import Site
from fczoo.sites.worlds import site_world

NAMES = ("paris", "rome", "lyon")


def own_world(bench: Bench, number: int) -> World:
    """One site's world: the images that a client has in a simulation, in their order."""
    stream = bench.stream
    owned = np.sort(np.concatenate([own[number] for own in bench.partition.tasks]))
    index = np.searchsorted(stream.train_index, owned)
    train = Images(stream.train.pixels[index], stream.train.labels[index])
    none = Images(stream.test.pixels[:0], stream.test.labels[:0])
    alone = replace(stream, train=train, test=none, train_index=np.arange(len(index)))
    return site_world(bench.settings, alone, bench.backbone, ImageStore(train, bench.backbone), number)


class Here:
    """The way between server and sites that are objects; keeps all that has passed."""

    def __init__(self, sites: Mapping[int, Site]):
        self.sites = dict(sites)
        self.passed: list[tuple[int, bytes, bytes]] = []  # site, question, answer

    def __call__(self, questions: Mapping[int, bytes], /) -> Mapping[int, bytes]:
        answers = {}
        for number, question in questions.items():
            answers[number] = self.sites[number].answer(question)
            self.passed.append((number, question, answers[number]))
        return answers


def sites_of(bench: Bench, method: Method, folder: Path) -> dict[int, Site]:
    """A site for each client of a bench."""
    sites = {}
    for number in range(bench.partition.clients):
        place = folder / str(number)
        place.mkdir(parents=True, exist_ok=True)
        sites[number] = Site(own_world(bench, number), method, 0, number, place)
    return sites


def server_of(
    bench: Bench, method: Method, way: Here, run: str = "a run", folder: Path | None = None
) -> SitesRun:
    """The server of a bench, which has the test images alone."""
    stream = bench.stream
    none = Images(stream.train.pixels[:0], stream.train.labels[:0])
    known = replace(stream, train=none, train_index=np.arange(0))
    return begin(bench.settings, known, bench.backbone, bench.test, method, 0, Sites(NAMES, way, run), folder)


def simulated(bench: Bench, method: Method) -> Run:
    """The same clients in one process."""
    return Run(bench, method, 0, Silent(), None, None)
