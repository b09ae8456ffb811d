"""Site of a federation: one institution with its images, and its state between requests."""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from fczoo.core.errors import FczooError, first_line
from fczoo.core.files import content_sha256, write_safely
from fczoo.core.method import Method, task_exchanges
from fczoo.core.payload import Payload
from fczoo.core.tree import Tree
from fczoo.core.types import EndsTasks
from fczoo.federation.batches import Client
from fczoo.federation.checkpoint import ClientState, content_hash, pack, unpack
from fczoo.federation.client import ClientRequest
from fczoo.federation.device import deterministic_operations
from fczoo.federation.remote import RemoteWorker
from fczoo.federation.scenario import Scenario
from fczoo.sites.federation_config import check_sites, check_terms, terms_of
from fczoo.sites.ledger import PrivacyLedger
from fczoo.sites.messages import (
    CALL,
    ENROLMENT,
    REFUSAL,
    UPLOAD,
    Call,
    Enrolment,
    InvalidMessage,
    Refusal,
    UploadInfo,
    deserialize,
    is_call,
    read_request,
    serialize,
)

log = logging.getLogger("fczoo")

STATE_FORM = "fczoo-site-2"
HOW_TO_RESTART = "remove the checkpoint of the server to restart the run"


class SiteState(NamedTuple):
    """State of a site in a run."""

    run: str = ""  # name of the run; empty: the site has not enrolled
    progress: tuple[int, float] = (-1, 0)  # task and position in it of the latest exchange
    client_state: ClientState = ClientState({}, {}, {}, {})
    # answers that may be requested again, by the seal of their request
    answers: Mapping[str, bytes] = {}


class Site:
    """One client of a federation, which answers requests as bytes over any transport.

    Images, memories, exemplars, teacher outputs and control variates never leave the site. The site
    itself clips uploads, adds noise or withholds them, before it serializes them. It writes its
    state to disk before it answers, and answers a repeated request with the same bytes. Therefore a
    killed site or server resumes from its folder with the same results.
    """

    def __init__(
        self,
        scenario: Scenario,
        method: Method,
        seed: int,
        number: int,
        sites: Sequence[str],
        folder: Path,
        ledger: PrivacyLedger | None = None,
    ):
        """Open client ``number`` of ``scenario``, with the state in ``folder``.

        Args:
            scenario: Data of the site.
            method: Method of the run.
            seed: Seed of the run.
            number: Number of the client.
            sites: Names of all sites, in the order of their numbers.
            folder: Folder of the site's state.
            ledger: Ledger of the institution; None: uploads are not counted over runs.

        Raises:
            FczooError: Such a run is impossible between sites, or the state cannot be read.
        """
        check_sites(scenario.settings, method)
        self.scenario, self.number, self.ledger = scenario, number, ledger
        self.worker = RemoteWorker(scenario, method, seed)
        self.terms = terms_of(
            scenario.settings, scenario.stream, scenario.backbone, method, seed, sites
        )
        self.path = folder / "kept.safetensors"
        self.state = self._load()

    def answer(self, content: bytes) -> bytes:
        """Answer a call or a request; a refusal contains its reason.

        Args:
            content: Bytes of the message.

        Returns:
            Bytes of the response.
        """
        try:
            return (
                self._enrol(*deserialize(CALL, content, Call))
                if is_call(content)
                else self._answer_request(content)
            )
        except FczooError as error:
            reason = str(error)
        except InvalidMessage as error:
            reason = f"the message is damaged or of another version of fczoo: {first_line(error)}"
        except Exception as error:  # its message may describe private images
            log.exception("the site cannot answer")
            reason = f"{type(error).__name__} at the site; see its log"
        return serialize(REFUSAL, Refusal(reason))

    def _enrol(self, call: Call, _: Tree) -> bytes:
        """Join a run if its terms are the agreed ones; discard the state of another run."""
        check_terms(self.terms, call.terms, "at the server")
        if self.ledger:
            self.ledger.check(self.scenario.settings)
        if call.run != self.state.run:
            if call.resumes:
                raise FczooError(f"the site has no state of the resumed run; {HOW_TO_RESTART}")
            self._store_state(SiteState(call.run))
        images = [
            len(client_indices[self.number]) for client_indices in self.scenario.partition.tasks
        ]
        return serialize(ENROLMENT, Enrolment(images, self._classes()))

    def _classes(self) -> list[int] | None:
        """Return the classes with enough images at the site; None if updates are clipped.

        Enough are at least ``min_class_count`` images.
        """
        if self.scenario.settings.dp_clip is not None:
            return None
        images = np.bincount(self.scenario.stream.train.labels)
        return [
            int(label) for label in np.flatnonzero(images >= self.scenario.settings.min_class_count)
        ]

    def _answer_request(self, content: bytes) -> bytes:
        request, run = read_request(content, self.scenario.backbone.device)
        site_state, question = self.state, content_hash(content)
        if run != site_state.run:
            raise FczooError(f"the site has not enrolled in this run; {HOW_TO_RESTART}")
        if question in site_state.answers:
            return site_state.answers[question]
        progress = self._position(request)
        client_state = site_state.client_state
        # a new task resets teacher outputs, control variates and compression errors
        if progress[0] != site_state.progress[0]:
            client_state = ClientState(client_state.memories, {}, {}, {})
        upload, client_state, loss = self._respond(request, client_state)
        if self.ledger and upload:
            self.ledger.spend(self.scenario.settings, self._data, run)
        info = UploadInfo(question, upload.num_samples, loss, self._exemplars(client_state))
        answer = serialize(UPLOAD, info, upload.tensors)
        self._store_state(
            SiteState(
                run, progress, client_state, {**self._repeatable_answers(request), question: answer}
            )
        )
        return answer

    @cached_property
    def _data(self) -> str:
        """Return the SHA-256 of the site's images and labels."""
        train = self.scenario.stream.train
        digest = hashlib.sha256(np.ascontiguousarray(train.labels).data)
        digest.update(np.ascontiguousarray(train.pixels).data)
        return digest.hexdigest()

    def _repeatable_answers(self, request: ClientRequest) -> Mapping[str, bytes]:
        """Return answers that a resumed server may request again: those since its last checkpoint.

        The server saves after rounds and tasks.
        """
        task, position = self.state.progress
        server_saved = task != request.ctx.task.index or position in range(request.ctx.rounds)
        return {} if server_saved else self.state.answers

    def _position(self, request: ClientRequest) -> tuple[int, float]:
        """Return the position of an exchange in the schedule: task, and number within the task.

        The number of a round is its index; an exchange before the first round has number -1.

        Raises FczooError for an exchange that is not in the schedule, and for one that is repeated
        with another request: the privacy guarantee holds for the uploads of the schedule only.
        """
        ctx, method = request.ctx, self.worker.trainer.method
        exchanges = []
        if ctx.task in self.scenario.stream.tasks:
            exchanges = list(task_exchanges(method, ctx.task, self.scenario.settings.rounds))
        exchange = request.exchange
        if exchange not in exchanges:
            raise FczooError(f"the schedule has no {exchange}")
        first_round = sum(one.boundary == "task_start" for one in exchanges)
        position = ctx.task.index, float(exchanges.index(exchange) - first_round)
        if position <= self.state.progress:
            raise FczooError(
                f"the server repeats {exchange} with a different request; {HOW_TO_RESTART}"
            )
        return position

    def _respond(
        self, request: ClientRequest, client_state: ClientState
    ) -> tuple[Payload, ClientState, float | None]:
        """Return the protected upload, the new client state, and the mean loss without noise.

        The loss is None if updates are clipped, or nothing was trained.
        """
        settings = self.scenario.settings
        with deterministic_operations(settings.deterministic):
            answer = self.worker.runtime.answer(
                request, [self._client(request, client_state)], client_state
            )
        (upload,) = answer.payloads
        loss_entry = answer.losses.get(self.number) if settings.dp_clip is None else None
        return upload, answer.client_state, loss_entry[0] if loss_entry else None

    def _client(self, request: ClientRequest, client_state: ClientState) -> Client:
        """Return the site's client with its images in an exchange, as in ``FederatedRun``."""
        trainer, task = self.worker.trainer, request.ctx.task
        clients = self.scenario.clients(task, trainer.method.training().data_scope, idle=True)
        client, memory = clients[self.number], client_state.memories.get(self.number, {})
        if request.boundary is None and request.ctx.balanced:
            return replace(client, index=trainer.exemplars(memory))
        if request.boundary == "task_end" and isinstance(trainer.method, EndsTasks):
            return trainer.with_exemplars(client, memory)
        return client

    def _exemplars(self, client_state: ClientState) -> list[int]:
        """Return the site's number of exemplars per task."""
        index = (
            self.worker.trainer.exemplars(client_state.memories.get(self.number, {})).cpu().numpy()
        )
        return [
            int(np.isin(client_indices[self.number], index).sum())
            for client_indices in self.scenario.partition.tasks
        ]

    def _store_state(self, state: SiteState) -> None:
        """Store the site's new state, first on disk."""
        answers = {
            question: torch.from_numpy(np.frombuffer(bytearray(answer), np.uint8))
            for question, answer in state.answers.items()
        }
        terms = content_sha256(self.terms)
        notes = {"run": state.run, "moment": state.progress, "terms": terms}
        write_safely(
            self.path,
            pack(STATE_FORM, {**state.client_state.to_trees(), "answers": answers}, notes),
        )
        self.state = state

    def _load(self) -> SiteState:
        """Read the state from disk; without a file or with other terms, return the initial state.

        Raises FczooError if the file is invalid.
        """
        if not self.path.exists():
            return SiteState()
        terms = content_sha256(self.terms)
        try:
            trees, notes = unpack(STATE_FORM, self.path.read_bytes(), self.scenario.backbone.device)
            answers = {
                question: value.numpy().tobytes() for question, value in trees["answers"].items()
            }
            task, position = notes["moment"]
            if notes.get("terms", terms) != terms:  # the agreement has changed since enrolment
                return SiteState()
            return SiteState(notes["run"], (task, position), ClientState.from_trees(trees), answers)
        except (ValueError, KeyError) as error:
            problem = f"{self.path} is not a valid state of a site: {first_line(error)}"
            raise FczooError(f"{problem}; remove it, and {HOW_TO_RESTART}") from error
