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
from fczoo.federation.checkpoint import ClientState, kept_in, kept_trees, pack, seal_of, unpack
from fczoo.federation.client import ClientRequest
from fczoo.federation.device import reproducible
from fczoo.federation.remote import RemoteWorker
from fczoo.federation.world import World
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


class SiteState(NamedTuple):
    """State of a site in a run."""

    run: str = ""  # name of the run; empty: the site has not enrolled
    progress: tuple[int, float] = (-1, 0)  # task and position in it of the latest exchange
    kept: ClientState = ClientState({}, {}, {}, {})
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
        world: World,
        method: Method,
        seed: int,
        number: int,
        sites: Sequence[str],
        folder: Path,
        ledger: PrivacyLedger | None = None,
    ):
        """Open client ``number`` of ``world``, with the state in ``folder``.

        Args:
            world: Data of the site.
            method: Method of the run.
            seed: Seed of the run.
            number: Number of the client.
            sites: Names of all sites, in the order of their numbers.
            folder: Folder of the site's state.
            ledger: Ledger of the institution; None: uploads are not counted over runs.

        Raises:
            FczooError: Such a run is impossible between sites, or the state cannot be read.
        """
        check_sites(world.settings, method)
        self.world, self.number, self.ledger = world, number, ledger
        self.side_of = RemoteWorker(world, method, seed)
        self.terms = terms_of(world.settings, world.stream, world.backbone, method, seed, sites)
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
            reason = f"the message is damaged or of another version: {first_line(error)}"
        except Exception as error:  # its message may describe private images
            log.exception("the site cannot answer")
            reason = f"{type(error).__name__} at the site; its log has the reason"
        return serialize(REFUSAL, Refusal(reason))

    def _enrol(self, call: Call, _: Tree) -> bytes:
        """Join a run if its terms are the agreed ones; discard the state of another run."""
        check_terms(self.terms, call.terms, "at the server")
        if self.ledger:
            self.ledger.check(self.world.settings)
        if call.run != self.state.run:
            if call.resumes:
                raise FczooError("the site has no state of this run; begin it again")
            self._store_state(SiteState(call.run))
        images = [len(client_indices[self.number]) for client_indices in self.world.partition.tasks]
        return serialize(ENROLMENT, Enrolment(images, self._classes()))

    def _classes(self) -> list[int] | None:
        """Return the classes with enough images at the site; None if updates are clipped.

        Enough are at least ``min_class_count`` images.
        """
        if self.world.settings.dp_clip is not None:
            return None
        images = np.bincount(self.world.stream.train.labels)
        return [
            int(label) for label in np.flatnonzero(images >= self.world.settings.min_class_count)
        ]

    def _answer_request(self, content: bytes) -> bytes:
        request, run = read_request(content, self.world.backbone.device)
        site_state, question = self.state, seal_of(content)
        if run != site_state.run:
            raise FczooError("the site has not enrolled in this run; begin the run again")
        if question in site_state.answers:
            return site_state.answers[question]
        progress = self._position(request)
        client_state = site_state.kept
        # a new task resets teacher outputs, control variates and compression errors
        if progress[0] != site_state.progress[0]:
            client_state = ClientState(client_state.memories, {}, {}, {})
        upload, client_state, loss = self._respond(request, client_state)
        if self.ledger and upload:
            self.ledger.spend(self.world.settings, self._data, run)
        about = UploadInfo(question, upload.num_samples, loss, self._exemplars(client_state))
        answer = serialize(UPLOAD, about, upload.tensors)
        self._store_state(
            SiteState(
                run, progress, client_state, {**self._repeatable_answers(request), question: answer}
            )
        )
        return answer

    @cached_property
    def _data(self) -> str:
        """Return the SHA-256 of the site's images and labels."""
        train = self.world.stream.train
        digest = hashlib.sha256(np.ascontiguousarray(train.labels).data)
        digest.update(np.ascontiguousarray(train.pixels).data)
        return digest.hexdigest()

    def _repeatable_answers(self, asked: ClientRequest) -> Mapping[str, bytes]:
        """Return answers that a resumed server may request again: those since its last checkpoint.

        The server saves after rounds and tasks.
        """
        task, position = self.state.progress
        server_saved = task != asked.ctx.task.index or position in range(asked.ctx.rounds)
        return {} if server_saved else self.state.answers

    def _position(self, asked: ClientRequest) -> tuple[int, float]:
        """Return the position of an exchange in the schedule: task, and number within the task.

        The number of a round is its index; an exchange before the first round has number -1.

        Raises FczooError for an exchange that is not in the schedule, and for one that is repeated
        with another request: the privacy guarantee holds for the uploads of the schedule only.
        """
        ctx, method = asked.ctx, self.side_of.side.method
        exchanges = []
        if ctx.task in self.world.stream.tasks:
            exchanges = list(task_exchanges(method, ctx.task, self.world.settings.rounds))
        exchange = asked.exchange
        if exchange not in exchanges:
            raise FczooError(f"the schedule has no {exchange}")
        first_round = sum(one.boundary == "task_start" for one in exchanges)
        position = ctx.task.index, float(exchanges.index(exchange) - first_round)
        if position <= self.state.progress:
            raise FczooError(
                "the server repeats an exchange with another request; begin the run again"
            )
        return position

    def _respond(
        self, asked: ClientRequest, kept: ClientState
    ) -> tuple[Payload, ClientState, float | None]:
        """Return the protected upload, the new client state, and the mean loss without noise.

        The loss is None if updates are clipped, or nothing was trained.
        """
        settings = self.world.settings
        with reproducible(settings.deterministic):
            answer = self.side_of.side.answer(asked, [self._client(asked, kept)], kept)
        (upload,) = answer.payloads
        loss_entry = answer.losses.get(self.number) if settings.dp_clip is None else None
        return upload, answer.kept, loss_entry[0] if loss_entry else None

    def _client(self, asked: ClientRequest, kept: ClientState) -> Client:
        """Return the site's client with its images in an exchange, as in ``FederatedRun``."""
        side, task = self.side_of.side, asked.ctx.task
        everyone = self.world.clients(task, side.method.training().data_scope, idle=True)
        client, memory = everyone[self.number], kept.memories.get(self.number, {})
        if asked.boundary is None and asked.ctx.balanced:
            return replace(client, index=side.exemplars(memory))
        if asked.boundary == "task_end" and isinstance(side.method, EndsTasks):
            return side.with_exemplars(client, memory)
        return client

    def _exemplars(self, kept: ClientState) -> list[int]:
        """Return the site's number of exemplars per task."""
        index = self.side_of.side.exemplars(kept.memories.get(self.number, {})).cpu().numpy()
        return [
            int(np.isin(client_indices[self.number], index).sum())
            for client_indices in self.world.partition.tasks
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
            self.path, pack(STATE_FORM, {**kept_trees(state.kept), "answers": answers}, notes)
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
            trees, notes = unpack(STATE_FORM, self.path.read_bytes(), self.world.backbone.device)
            answers = {
                question: value.numpy().tobytes() for question, value in trees["answers"].items()
            }
            task, position = notes["moment"]
            if notes.get("terms", terms) != terms:  # the agreement has changed since enrolment
                return SiteState()
            return SiteState(notes["run"], (task, position), kept_in(trees), answers)
        except (ValueError, KeyError) as error:
            problem = f"{self.path} is not a file of a site: {first_line(error)}"
            raise FczooError(f"{problem}; remove it, and begin the run again") from error
