"""A site: one institution with its images, and what it keeps from one question to the next."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from fczoo.core.errors import FczooError, first_line
from fczoo.core.files import write_safely
from fczoo.core.method import Concludes, Method
from fczoo.core.payload import Payload
from fczoo.core.tree import Tree
from fczoo.core.types import Exchange
from fczoo.federation.batches import Client
from fczoo.federation.carried import Kept, kept_in, kept_trees
from fczoo.federation.client_side import Asked
from fczoo.federation.device import reproducible
from fczoo.federation.spread import Answering
from fczoo.federation.wire import pack, seal_of, unpack
from fczoo.federation.world import World
from fczoo.sites.messages import (
    CALL,
    ENROLMENT,
    REFUSAL,
    UPLOAD,
    About,
    Call,
    Damaged,
    Enrolment,
    Refusal,
    is_call,
    question_in,
    read,
    written,
)
from fczoo.sites.terms import check_sites, check_terms, terms_of

log = logging.getLogger("fczoo")

KEPT = "fczoo-site-2"


class Standing(NamedTuple):
    """Where a site stands in a run."""

    run: str = ""  # none: it has not enrolled
    moment: tuple[int, float] = (-1, 0)  # task and place in it of the last exchange
    kept: Kept = Kept({}, {}, {})
    answers: Mapping[str, bytes] = {}  # by the seal of the question: what may be asked again


class Site:
    """Answers for one client: bytes in, bytes out, whatever carries them.

    Images, memories, exemplars, teachers' outputs and control variates stay here. Uploads are clipped, made
    noisy or withheld here, by the site's own settings, before they become bytes. What is kept is on disk
    before an answer leaves, and a question that comes again gets the same answer: a site or server that is
    killed goes on with its folder, and changes no number.
    """

    def __init__(self, world: World, method: Method, seed: int, number: int, folder: Path):
        """Client ``number`` of ``world``, which keeps things in ``folder``.

        Raises FczooError where such a run cannot be, or the folder holds something else.
        """
        check_sites(world.settings, method)
        self.world, self.number = world, number
        self.side_of = Answering(world, method, seed)
        self.terms = terms_of(world.settings, world.stream, world.backbone, method, seed)
        self.path = folder / "kept.safetensors"
        self.standing = self._load()

    def answer(self, content: bytes) -> bytes:
        """What the site answers to a call or a question: at worst, why it refuses."""
        try:
            return self._enrol(*read(CALL, content, Call)) if is_call(content) else self._act(content)
        except FczooError as error:
            reason = str(error)
        except Damaged as error:
            reason = f"what arrived is damaged or of another version: {first_line(error)}"
        except Exception as error:  # whose text may be about images, which are nobody else's business
            log.exception("the site cannot answer")
            reason = f"{type(error).__name__} at the site, see what it has logged"
        return written(REFUSAL, Refusal(reason))

    def _enrol(self, call: Call, _: Tree) -> bytes:
        """Take part in a run, if it is the one that was agreed; nothing is kept of an earlier one."""
        check_terms(self.terms, call.terms, "at the server")
        if call.run != self.standing.run:
            if call.goes_on:
                raise FczooError("the site has kept nothing of this run; begin it anew")
            self._stand(Standing(call.run))
        images = [len(own[self.number]) for own in self.world.partition.tasks]
        return written(ENROLMENT, Enrolment(images, self._classes()))

    def _classes(self) -> list[int] | None:
        """Classes that it has images of, as far as it may say so; of updates with noise nothing is said."""
        if self.world.settings.dp_clip is not None:
            return None
        images = np.bincount(self.world.stream.train.labels)
        return [int(label) for label in np.flatnonzero(images >= self.world.settings.min_class_count)]

    def _act(self, content: bytes) -> bytes:
        asked, run = question_in(content, self.world.backbone.device)
        standing, question = self.standing, seal_of(content)
        if run != standing.run:
            raise FczooError("the site has not enrolled in this run; begin the run anew")
        if question in standing.answers:
            return standing.answers[question]
        moment = self._moment(asked)
        kept = standing.kept
        if moment[0] != standing.moment[0]:  # what a teacher has said and control variates are of one task
            kept = Kept(kept.memories, {}, {})
        upload, kept, loss = self._done(asked, kept)
        about = About(question, upload.num_samples, loss, self._exemplars(kept))
        answer = written(UPLOAD, about, upload.tensors)
        self._stand(Standing(run, moment, kept, {**self._unsaved(asked), question: answer}))
        return answer

    def _unsaved(self, asked: Asked) -> Mapping[str, bytes]:
        """Answers for which a server that goes on may ask again: it saves after rounds and after tasks."""
        task, place = self.standing.moment
        saved = task != asked.ctx.task.index or place in range(asked.ctx.rounds)
        return {} if saved else self.standing.answers

    def _moment(self, asked: Asked) -> tuple[int, float]:
        """Where an exchange stands in the schedule.

        Raises FczooError for one that is not in it, and for one that comes again as another question: what a
        site promises of its noise holds for as many uploads as the schedule has.
        """
        ctx = asked.ctx
        place = {"begin": -1.0, "conclude": ctx.rounds - 0.5, "end": ctx.rounds + 1.0}
        moment = ctx.task.index, place[asked.boundary] if asked.boundary else float(ctx.round)
        scheduled = 0 <= ctx.round <= ctx.rounds <= self.world.settings.rounds
        if ctx.task not in self.world.stream.tasks or not scheduled:
            raise FczooError(f"the schedule has no round {ctx.round + 1} of task {ctx.task.index + 1}")
        if moment <= self.standing.moment:
            raise FczooError("the server asks for what the site has answered before; begin the run anew")
        return moment

    def _done(self, asked: Asked, kept: Kept) -> tuple[Payload, Kept, float | None]:
        """The protected upload, what is kept from now on, and the mean loss, which no noise covers."""
        settings, ctx = self.world.settings, asked.ctx
        with reproducible(settings.deterministic):
            answer = self.side_of.side.answer(asked, [self._client(asked, kept)], kept)
        exchange = Exchange(ctx.task, survey=asked.boundary)
        if asked.boundary is None:
            exchange = Exchange(ctx.task, ctx.round, balanced=ctx.balanced)
        (upload,) = self.side_of.uplink.protected(answer.payloads, asked.state, exchange)
        told = answer.losses.get(self.number) if settings.dp_clip is None else None
        return upload, answer.kept, told[0] if told else None

    def _client(self, asked: Asked, kept: Kept) -> Client:
        """The site's client with the images that an exchange is about, as ``Run`` has them."""
        side, task = self.side_of.side, asked.ctx.task
        everyone = self.world.clients(task, side.method.training().scope, idle=True)
        client, memory = everyone[self.number], kept.memories.get(self.number, {})
        if asked.boundary is None and asked.ctx.balanced:
            return replace(client, index=side.exemplars(memory))
        if asked.boundary == "end" and isinstance(side.method, Concludes):
            return side.with_exemplars(client, memory)
        return client

    def _exemplars(self, kept: Kept) -> list[int]:
        """How many images of each task are kept as exemplars."""
        index = self.side_of.side.exemplars(kept.memories.get(self.number, {})).cpu().numpy()
        return [int(np.isin(own[self.number], index).sum()) for own in self.world.partition.tasks]

    def _stand(self, standing: Standing) -> None:
        """Note where the site stands, on disk first."""
        answers = {
            question: torch.from_numpy(np.frombuffer(bytearray(answer), np.uint8))
            for question, answer in standing.answers.items()
        }
        notes = {"run": standing.run, "moment": standing.moment}
        write_safely(self.path, pack(KEPT, {**kept_trees(standing.kept), "answers": answers}, notes))
        self.standing = standing

    def _load(self) -> Standing:
        """Raises FczooError for a file that is damaged or something else."""
        if not self.path.exists():
            return Standing()
        try:
            trees, notes = unpack(KEPT, self.path.read_bytes(), self.world.backbone.device)
            answers = {question: value.numpy().tobytes() for question, value in trees["answers"].items()}
            task, place = notes["moment"]
            return Standing(notes["run"], (task, place), kept_in(trees), answers)
        except (ValueError, KeyError) as error:
            problem = f"{self.path} is no file of a site: {first_line(error)}"
            raise FczooError(f"{problem}; remove it, and begin the run anew") from error
