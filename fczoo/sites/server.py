"""The server's end of a run between sites: the rounds of a simulation, whose clients are elsewhere."""

import logging
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from fczoo.core.backbone import Backbone
from fczoo.core.errors import FczooError, first_line
from fczoo.core.method import Method
from fczoo.core.payload import Payload
from fczoo.core.tree import Tree
from fczoo.core.types import Context, Moment
from fczoo.data.stream import Stream
from fczoo.data.views import ImageStore
from fczoo.federation.batches import Client
from fczoo.federation.carried import Kept
from fczoo.federation.checkpoint import Checkpoint
from fczoo.federation.client_side import Answer, Asked
from fczoo.federation.device import reproducible
from fczoo.federation.engine import Engine
from fczoo.federation.observer import Silent
from fczoo.federation.plan import Plan
from fczoo.federation.result import Result
from fczoo.federation.rounds import Run
from fczoo.federation.settings import Settings
from fczoo.federation.spread import question_of
from fczoo.federation.wire import seal_of
from fczoo.sites.begun import Beginning, Begun
from fczoo.sites.messages import (
    CALL,
    ENROLMENT,
    UPLOAD,
    About,
    Call,
    Damaged,
    Enrolment,
    placed,
    read,
    refused,
    written,
)
from fczoo.sites.terms import check_sites, terms_of
from fczoo.sites.worlds import Known, server_world

log = logging.getLogger("fczoo")


class Way(Protocol):
    """What carries bytes to sites and back."""

    def __call__(self, questions: Mapping[int, bytes], /) -> Mapping[int, bytes]:
        """Answers by the number of the site; one that is not heard of is left out."""


@dataclass(frozen=True)
class Sites:
    """The sites of one run, as the server reaches them."""

    names: Sequence[str]
    way: Way
    run: str = field(default_factory=lambda: secrets.token_hex(16))

    def enrolled(self, terms: Mapping[str, Any], stream: Stream, goes_on: bool) -> list[Enrolment]:
        """What sites say as they enrol for a run on the tasks of ``stream``, or for one that goes on.

        Raises FczooError naming one that refuses, is silent or says what cannot be.
        """
        call = written(CALL, Call(self.run, dict(terms), goes_on))
        answers, found = self.way(dict.fromkeys(range(len(self.names)), call)), []
        for number, name in enumerate(self.names):
            if number not in answers:
                raise FczooError(f"site {name} did not answer; start it and begin the run anew")
            try:
                self._check(number, answers[number])
                enrolment, _ = read(ENROLMENT, answers[number], Enrolment)
            except Damaged as error:
                raise FczooError(f"site {name} sent no enrolment: {first_line(error)}") from error
            known = range(len(stream.classes))
            if len(enrolment.images) != len(stream.tasks) or not {*(enrolment.classes or ())} <= {*known}:
                raise FczooError(f"site {name} enrols with tasks or classes that the schedule does not have")
            found.append(enrolment)
        return found

    def uploads(self, numbers: Sequence[int], question: bytes) -> Iterator[tuple[About, Tree] | None]:
        """What sites upload, one after another; None for one that is not heard of or sends something else.

        Raises FczooError naming one that refuses.
        """
        answers = self.way(dict.fromkeys(numbers, question))
        for number in numbers:
            yield self._upload(number, answers[number], question) if number in answers else None

    def _upload(self, number: int, answer: bytes, question: bytes) -> tuple[About, Tree] | None:
        try:
            self._check(number, answer)
            about, tensors = read(UPLOAD, answer, About)
            if about.question != seal_of(question):
                raise Damaged("it answers another question")
            return about, tensors
        except Damaged as error:
            log.warning("site %s sent no upload: %s", self.names[number], first_line(error))
            return None

    def _check(self, number: int, answer: bytes) -> None:
        if reason := refused(answer):
            raise FczooError(f"site {self.names[number]}: {reason}")


@dataclass(frozen=True, kw_only=True)
class AtSites(Engine):
    """An engine whose clients are sites: what they keep stays there, but for how many exemplars that is."""

    sites: Sites
    world: Known

    def survey_form(self, moment: Moment, state: Tree, client: Client, ctx: Context) -> Payload:
        """What uploads of a survey look like, from one of the server's own images."""
        own = torch.from_numpy(self.world.stream.positions(self.world.stream.test, ctx.task))
        side = replace(self.side, store=self.world.test)
        return side.survey_form(self._surveying(moment, state, ctx), replace(client, index=own))

    def _groups(self, clients: Sequence[Client], ctx: Context) -> list[list[int]]:
        """Nobody shares a forward with another institution."""
        return [[place] for place in range(len(clients))]

    def _answers(self, asked: Asked, groups: Sequence[Sequence[Client]]) -> Iterator[Answer]:
        numbers = [client.number for (client,) in groups]
        uploads = self.sites.uploads(numbers, question_of(asked, run=self.sites.run))
        for number, upload in zip(numbers, uploads, strict=True):
            if upload is None:  # as from a client that drops out
                yield Answer([Payload({}, number)], Kept({}, {}, {}), {})
                continue
            about, tensors = upload
            payload = Payload(placed(tensors, self.backbone.device), number, about.images)
            losses = {} if about.loss is None else {number: (about.loss, torch.empty(0))}
            yield Answer([payload], Kept({number: self._counted(number, about)}, {}, {}), losses)

    def _counted(self, number: int, about: About) -> Tree:
        """In place of a site's memory: as many of the server's blank images as it keeps exemplars."""
        name = self.method.training().exemplars
        if not name:
            return {}
        owned = (own[number] for own in self.world.partition.tasks)
        kept = [torch.from_numpy(own[:count]) for own, count in zip(owned, about.exemplars, strict=False)]
        return {name: torch.cat(kept)}


class SitesRun(Run):
    """The rounds of a run between sites."""

    def __init__(self, world: Known, method: Method, seed: int, sites: Sites, checkpoint: Checkpoint | None):
        super().__init__(world, method, seed, Silent(), checkpoint, None)
        self.known, self.sites = world, sites

    def run(self) -> Result:
        """All tasks that are left. Raises FczooError where a site refuses, and where too few answer."""
        with reproducible(self.settings.deterministic):
            return super().run()

    def run_to(self, outcome: Path) -> None:
        """As ``run``, with the result in a file; after that no saved round is needed any more."""
        self.run().save(outcome)
        if self.checkpoint:
            self.checkpoint.remove()

    def _engine(self, plan: Plan) -> Engine:
        given = self.method, self.backbone, self.train, plan, self.memories, self.taught, self.controls
        return AtSites(*given, sites=self.sites, world=self.known)

    def _note_storage(self, shared: Tree, clients: Sequence[Client]) -> None:
        """What a site holds is not the server's to know."""


def begin(
    settings: Settings,
    stream: Stream,
    backbone: Backbone,
    test: ImageStore,
    method: Method,
    seed: int,
    sites: Sites,
    folder: Path | None = None,
) -> SitesRun:
    """A run for which all sites have enrolled.

    Of ``stream`` the classes, the tasks and the test images count; the server has no training images. In
    ``folder`` the run is saved after every round, and goes on from there if it ends before it is over.
    Raises FczooError where a site refuses or is silent, and where what goes on is not what began.
    """
    check_sites(settings, method)
    terms = terms_of(settings, stream, backbone, method, seed)
    beginning = Beginning(folder) if folder else None
    begun = beginning.run(terms) if beginning else None
    if begun:
        sites = replace(sites, run=begun)
    enrolments = sites.enrolled(terms, stream, goes_on=bool(begun))
    if beginning:
        beginning.enrolled(sites.names, Begun(sites.run, dict(terms), enrolments), goes_on=bool(begun))
    world = server_world(settings, stream, backbone, test, enrolments)
    checkpoint = beginning.checkpoint if beginning else None
    return SitesRun(world, method, seed, sites, checkpoint)
