"""Server side of a run between sites: the rounds of a simulation, with sites as clients."""

import logging
import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from fczoo.core.backbone import Backbone
from fczoo.core.errors import FczooError, first_line, printable
from fczoo.core.method import Method
from fczoo.core.payload import Payload
from fczoo.core.tree import Tree
from fczoo.core.types import Boundary, Context, Exchange, Task
from fczoo.data.stream import Stream
from fczoo.data.views import ImageStore
from fczoo.federation.batches import Client
from fczoo.federation.callbacks import Callback
from fczoo.federation.checkpoint import Checkpoint, ClientState, content_hash
from fczoo.federation.client import ClientRequest, ClientResponse, ClientRuntime
from fczoo.federation.client_engine import ClientEngine
from fczoo.federation.device import Plan, deterministic_operations
from fczoo.federation.remote import pack_request
from fczoo.federation.result import Result
from fczoo.federation.run import FederatedRun
from fczoo.federation.settings import Settings
from fczoo.federation.uplink import Arrival
from fczoo.models.storage import keep_model
from fczoo.security.upload_validation import DROPPED_OUT, have_diverged
from fczoo.sites.federation_config import (
    DEFAULT_IMAGES,
    ImageLimit,
    check_image_counts,
    check_sites,
    terms_of,
)
from fczoo.sites.messages import (
    CALL,
    ENROLMENT,
    UPLOAD,
    Call,
    Enrolment,
    InvalidMessage,
    UploadInfo,
    deserialize,
    move_to_device,
    refusal_reason,
    serialize,
    upload_limit,
)
from fczoo.sites.site_data import RunStart, ServerFolder, ServerView, server_scenario

log = logging.getLogger("fczoo")

ENROLMENT_BYTES = 4096  # largest size of an enrolment, per class and task
REFUSAL_BYTES = 2**14  # largest size of a refusal


SiteConnection = Callable[[Mapping[int, bytes], int], Mapping[int, bytes]]
"""The transport of bytes to sites and back.

It is a function of the requests by number of the site, and of the largest size of a response in
bytes (``upload_limit``). It returns the responses by number of the site, without sites that do not
respond.
"""


@dataclass(frozen=True)
class Sites:
    """Sites of one run, with the server's connection to them."""

    names: Sequence[str]
    connection: SiteConnection
    answer_mb: int | None = None  # largest upload in MB; None: as ``upload_limit`` estimates
    run: str = field(default_factory=lambda: secrets.token_hex(16))  # unique name of the run
    image_limit: ImageLimit = DEFAULT_IMAGES
    failures: dict[int, str] = field(default_factory=dict)  # reason for a missing upload, by site

    def enrol_all(self, terms: Mapping[str, Any], stream: Stream, resumes: bool) -> list[Enrolment]:
        """Call all sites to enrol in a new or resumed run.

        Args:
            terms: Terms of the server, from ``terms_of``.
            stream: Classes and tasks of the run.
            resumes: Whether the run is resumed.

        Returns:
            Enrolments in the order of ``names``.

        Raises:
            FczooError: A site refuses, does not respond, or sends an invalid enrolment; the message
                names it.
        """
        call = serialize(CALL, Call(self.run, dict(terms), resumes))
        limit = ENROLMENT_BYTES * (1 + len(stream.tasks) + len(stream.classes))
        answers = self.connection(dict.fromkeys(range(len(self.names)), call), limit)
        enrolments = []
        for number, name in enumerate(self.names):
            if number not in answers:
                raise FczooError(
                    f"site {name} did not answer; start all sites, then the server again"
                )
            try:
                if (reason := refusal_reason(answers[number])) is not None:
                    raise FczooError(f"site {name}: {printable(reason)}")
                enrolment, _ = deserialize(ENROLMENT, answers[number], Enrolment)
            except InvalidMessage as error:
                raise FczooError(
                    f"site {name} sent an invalid enrolment: {first_line(error)}"
                ) from error
            class_numbers = range(len(stream.classes))
            if len(enrolment.images) != len(stream.tasks) or not {*(enrolment.classes or ())} <= {
                *class_numbers
            }:
                raise FczooError(
                    f"site {name} enrolled with tasks or classes that are not in the schedule; "
                    "give server and sites the same agreement"
                )
            check_image_counts(name, enrolment.images, self.image_limit)
            enrolments.append(enrolment)
        return enrolments

    def uploads(
        self, numbers: Sequence[int], question: bytes, limit: int
    ) -> Iterator[tuple[UploadInfo, Tree] | None]:
        """Yield the sites' uploads in order; None for a site without a valid response.

        Args:
            numbers: Numbers of the sites.
            question: Request, as bytes.
            limit: Largest size of an upload in bytes; the agreement's ``answer_mb`` replaces it.

        Yields:
            Plain values and tensors of an upload, or None, with the reason in ``failures``.
        """
        if self.answer_mb is not None:
            limit = self.answer_mb * 1_000_000 + REFUSAL_BYTES
        answers = self.connection(dict.fromkeys(numbers, question), limit)
        for number in numbers:
            self.failures.pop(number, None)
            yield self._upload(number, answers.get(number), question)

    def _upload(
        self, number: int, answer: bytes | None, question: bytes
    ) -> tuple[UploadInfo, Tree] | None:
        problem = DROPPED_OUT
        try:
            if answer is not None and (reason := refusal_reason(answer)) is not None:
                problem = f"refused: {printable(reason)}"
            elif answer is not None:
                info, tensors = deserialize(UPLOAD, answer, UploadInfo)
                if info.question == content_hash(question):
                    return info, tensors
                problem = "sent the answer to another request"
        except InvalidMessage as error:
            problem = f"sent an invalid upload: {first_line(error)}"
        self.fail(number, problem)
        return None

    def fail(self, number: int, reason: str) -> None:
        """Record that an exchange continues without the upload of a site.

        Args:
            number: Number of the site.
            reason: Reason.
        """
        self.failures[number] = reason
        log.warning("site %s: %s; the round continues without it", self.names[number], reason)


@dataclass(frozen=True, kw_only=True)
class SitesEngine(ClientEngine):
    """Engine whose clients are sites.

    Client state stays at the sites; the server knows only the number of exemplars.
    """

    sites: Sites
    scenario: ServerView

    def statistics_form(
        self, phase: Boundary, state: Tree, client: Client, ctx: Context
    ) -> Payload:
        """Return a template of a statistics upload, see ``upload_form``."""
        form = self.upload_form(self._statistics_request(phase, state, ctx))
        return form or Payload({}, client.number)

    def upload_form(self, request: ClientRequest) -> Payload | None:
        """Return a template of an upload, whose names, shapes and types a site's upload must have.

        It is the upload of a client that has one test image of the task and trains one epoch. None:
        such a client sends nothing, and the form of the majority of uploads is valid.
        """
        stream, task = self.scenario.stream, request.ctx.task
        index = torch.from_numpy(stream.positions(stream.test, task)[:1])
        plan, none = replace(self.plan, epochs=1), ClientState({}, {}, {}, {})
        trainer = replace(self.trainer, store=self.scenario.test, plan=plan)
        runtime = ClientRuntime(trainer, self.uplink)
        client = Client(0, index, lambda: index[:0])
        return next(filter(None, runtime.answer(request, [client], none).payloads), None)

    def _groups(self, clients: Sequence[Client], ctx: Context) -> list[list[int]]:
        """Return one group per client; a batched forward over institutions is impossible."""
        return [[position] for position in range(len(clients))]

    def _responses(
        self, request: ClientRequest, groups: Sequence[Sequence[Client]]
    ) -> Iterator[ClientResponse]:
        numbers = [client.number for (client,) in groups]
        question = pack_request(request, run=self.sites.run)
        limit = upload_limit(request, len(question), self.method, self.backbone.dim)
        uploads = self.sites.uploads(numbers, question, limit)
        tasks = self.scenario.partition.tasks
        for number, upload in zip(numbers, uploads, strict=True):
            if upload and len(upload[0].exemplars) != len(tasks):
                counts = f"exemplar counts of {len(upload[0].exemplars)} tasks"
                self.sites.fail(number, f"sent {counts}, expected {len(tasks)}")
                upload = None
            if upload is None:  # same as a client that drops out
                yield ClientResponse([Payload({}, number)], ClientState({}, {}, {}, {}), {})
                continue
            info, tensors = upload
            payload = Payload(move_to_device(tensors, self.backbone.device), number, info.images)
            # JSON has no NaN; after training, an upload is empty only if the training diverged
            diverged = request.boundary is None and not tensors
            loss = math.nan if diverged else info.loss
            losses = {} if loss is None else {number: (loss, torch.empty(0))}
            yield ClientResponse(
                [payload],
                ClientState({number: self._blank_memory(number, info)}, {}, {}, {}),
                losses,
            )

    def _blank_memory(self, number: int, info: UploadInfo) -> Tree:
        """Return indices of blank images in place of a site's exemplars, equally many."""
        name = self.method.training().exemplars
        if not name:
            return {}
        site_indices = (indices[number] for indices in self.scenario.partition.tasks)
        exemplar_indices = [
            torch.from_numpy(indices[:count])
            for indices, count in zip(site_indices, info.exemplars, strict=True)
        ]
        return {name: torch.cat(exemplar_indices)}


class SitesRun(FederatedRun):
    """Run between sites, as the server executes it."""

    def __init__(
        self,
        scenario: ServerView,
        method: Method,
        seed: int,
        sites: Sites,
        checkpoint: Checkpoint | None,
    ):
        super().__init__(scenario, method, seed, Callback(), checkpoint, None)
        self.server_view, self.sites = scenario, sites
        self.site_failures: dict[int, str] = {}  # reason by site whose latest upload was invalid
        self.merged = False  # whether uploads of a round were merged

    def run(self) -> Result:
        """Run all remaining tasks.

        Returns:
            The result.

        Raises:
            FczooError: The latest uploads of all sites are invalid, see ``_receive``.
        """
        with deterministic_operations(self.settings.deterministic):
            return super().run()

    def _receive(self, arrival: Arrival, exchange: Exchange) -> list[Payload]:
        """Return the uploads to merge: none if too few are valid, as one site must not end a run.

        Raises FczooError if the latest uploads of all sites are invalid. The exception: after a
        merge, at least half of the sites respond, but their training diverged. One hostile site can
        cause this, and must not end the run.
        """
        failures = self.sites.failures
        rejected = [
            {**r, "reason": failures.get(r["client"], r["reason"])} for r in arrival.rejected
        ]
        uploads = super()._receive(arrival._replace(rejected=rejected), exchange)
        valid = {upload.client for upload in arrival.payloads}
        self.site_failures |= {r["client"]: r["reason"] for r in rejected}
        self.site_failures = {
            k: reason for k, reason in self.site_failures.items() if k not in valid
        }
        self.merged = self.merged or (exchange.is_training_round and bool(uploads))
        responding_sites = self.site_failures.keys() - failures
        training_diverged = self.merged and 2 * len(responding_sites) >= len(self.site_failures)
        if len(self.site_failures) == len(self.sites.names) and not training_diverged:
            advice = "start the sites, then the server to resume"
            if have_diverged(self.site_failures.values()):
                advice = "agree on lower learning rates and start a new run"
            reasons = [
                f"site {self.sites.names[k]}: {self.site_failures[k]}" for k in self.site_failures
            ]
            raise FczooError(
                f"no site sends valid uploads in {exchange}; {'; '.join(reasons[:3])}; {advice}"
            )
        return uploads

    def _restore(self) -> tuple[int, int]:
        finished = super()._restore()
        self.merged = any(finished)
        return finished

    def _end_task(
        self, engine: ClientEngine, clients: Sequence[Client], task: Task
    ) -> list[Client]:
        """Let every site store its memory; record failures as in other exchanges."""
        self.sites.failures.clear()
        holders = super()._end_task(engine, clients, task)
        exchange_info = {"task": task.index, "moment": "after_rounds"}
        for number, reason in self.sites.failures.items():
            self.result.rejected.append({**exchange_info, "client": number, "reason": reason})
        self.site_failures |= self.sites.failures
        return holders

    def run_to(self, outcome: Path) -> None:
        """Run all remaining tasks, write model and result, and remove the checkpoint.

        Args:
            outcome: File of the result; the model is written to the folder ``model`` next to it.
        """
        result = self.run()
        keep_model(outcome.parent / "model", self, "final", server_state=True)
        result.save(outcome)
        if self.checkpoint:
            self.checkpoint.remove()

    def _engine(self, plan: Plan) -> ClientEngine:
        parts = (self.method, self.backbone, self.train, plan, self.memories, self.teacher_cache)
        controls = self.server.controls
        return SitesEngine(
            *parts, controls, self.residuals, sites=self.sites, scenario=self.server_view
        )


def start_run(
    settings: Settings,
    stream: Stream,
    backbone: Backbone,
    test: ImageStore,
    method: Method,
    seed: int,
    sites: Sites,
    folder: Path | None = None,
) -> SitesRun:
    """Start a new or resumed run after enrolling all sites.

    Args:
        settings: Settings of the run.
        stream: Classes, tasks and test images; the server has no training images.
        backbone: Frozen backbone.
        test: Test images.
        method: Method of the run.
        seed: Seed of the run.
        sites: Sites and the connection to them.
        folder: Folder of checkpoints, written after every round, from which a run resumes. None: no
            checkpoints.

    Returns:
        The run.

    Raises:
        FczooError: A site refuses or does not respond, or a resumed run has other terms or images
            than at its start.
    """
    check_sites(settings, method)
    terms = terms_of(settings, stream, backbone, method, seed, sites.names)
    server_folder = ServerFolder(folder) if folder else None
    resumed_run = server_folder.run(terms) if server_folder else None
    if resumed_run:
        sites = replace(sites, run=resumed_run)
    enrolments = sites.enrol_all(terms, stream, resumes=bool(resumed_run))
    if server_folder:
        server_folder.check_enrolments(
            sites.names, RunStart(sites.run, dict(terms), enrolments), resumes=bool(resumed_run)
        )
    scenario = server_scenario(settings, stream, backbone, test, enrolments)
    checkpoint = server_folder.checkpoint if server_folder else None
    return SitesRun(scenario, method, seed, sites, checkpoint)
