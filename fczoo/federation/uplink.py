"""Uploads on their way from the clients to the server.

Clients protect or forge their uploads before they send them; the server validates them.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from fczoo.core.backbone import Backbone
from fczoo.core.errors import FczooError
from fczoo.core.method import Method
from fczoo.core.payload import Payload, content_of, contents, unpack_factors
from fczoo.core.training import Training
from fczoo.core.tree import Tree, nbytes, select
from fczoo.core.types import Exchange
from fczoo.federation.batches import Client
from fczoo.federation.compression import Compression, decode_upload, encode_upload, make_compression
from fczoo.federation.local_rules import (
    STEPS,
    LocalRule,
    frozen_features_message,
    make_local_training,
)
from fczoo.federation.settings import Settings
from fczoo.security.attacks import Attackers
from fczoo.security.outliers import (
    check_centre,
    extreme_clients,
    groups_with_means,
    leave_out,
    replace_by_centres,
)
from fczoo.security.privacy import Privacy, bytes_by_content
from fczoo.security.upload_validation import UploadValidator


class SumAccumulator:
    """Sums over clients, which equal those over the pooled data.

    They are added in float64, one client after another, so that no upload needs to be stored.
    """

    def __init__(self) -> None:
        self._sums: Tree = {}
        self._dtypes: dict[str, torch.dtype] = {}

    def add(self, tree: Tree) -> None:
        """Add one client's sums."""
        for name, value in tree.items():
            if name in self._sums:
                self._sums[name] += value
                self._dtypes[name] = torch.promote_types(self._dtypes[name], value.dtype)
            else:
                # mps has no float64
                wide = value.is_floating_point() and value.device.type != "mps"
                self._sums[name] = value.to(torch.float64 if wide else value.dtype, copy=True)
                self._dtypes[name] = value.dtype

    @property
    def tree(self) -> Tree:
        """Return the sums so far, in the data types of the uploads."""
        return {name: value.to(self._dtypes[name]) for name, value in self._sums.items()}


def sum_or_stack(payloads: Sequence[Payload], separate: bool) -> Tree:
    """Return the clients' sums [K, ...] stacked in the order of their numbers, or their total."""
    if separate:
        return {name: torch.stack([payload[name] for payload in payloads]) for name in payloads[0]}
    total = SumAccumulator()
    for payload in payloads:
        total.add(payload.tensors)
    return total.tree


class Arrival(NamedTuple):
    """Arrival of a round's or boundary's uploads at the server."""

    payloads: list[Payload]  # the valid ones
    # uploads that are rejected in whole or in part: task, moment, client, reason
    rejected: list[dict[str, Any]]
    bytes: dict[str, int]  # of all uploads, by content
    by_client: dict[int, int]  # bytes of each client's upload; without those who sent nothing
    # clients with class statistics far from the others', which are used nevertheless
    far: list[int]

    @property
    def uploads(self) -> int:
        """Return the number of uploads."""
        return len(self.by_client)

    @property
    def total_bytes(self) -> int:
        """Return the bytes of all uploads."""
        return sum(self.bytes.values())


@dataclass(frozen=True)
class Uplink:
    """Uplink of one run with ``clients`` clients.

    Clients ``send``: honest ones protect their uploads, hostile ones forge them as well, and all
    encode them. The server decodes and validates what arrives (``arrive``, ``collect``).
    """

    method: Method
    settings: Settings
    seed: int
    clients: int
    backbone: Backbone | None = None  # bounds statistics of its features
    ends_run: bool = True  # with fewer valid uploads than ``min_clients``; else the run decides

    def check(self) -> None:
        """Raise FczooError if the settings of the uplink do not fit the method."""
        self._check_own_models()
        self._check_training()
        uploads = self.training.uploads
        _ = self.attackers, self.privacy, self.compression
        if self.settings.outliers is not None and "second moments" in contents(uploads):
            raise FczooError(
                "--outliers cannot check the second moments over all classes that "
                f"{self.method.name} uploads; leave it out"
            )
        if self.settings.outliers is not None and not groups_with_means(uploads):
            raise FczooError(
                f"--outliers compares class means, but {self.method.name} uploads none; "
                "leave it out, or use --aggregator"
            )
        if self.settings.merge_statistics is not None:
            check_centre(self.settings.merge_statistics, self.method.name, uploads)

    def _check_own_models(self) -> None:
        """Raise FczooError for settings about uploads where clients send nothing."""
        s = self.settings
        options = {
            "--aggregator": s.aggregator,
            "--local": s.local,
            "--server-optimizer": s.server_optimizer,
            "--compress": s.compress,
            "--attack": s.attack,
            "--outliers": s.outliers,
            "--merge-statistics": s.merge_statistics,
            "--min-clients": s.min_clients > 1,
            "--min-class-count": s.min_class_count > 1,
            "--dp-clip": s.dp_clip,
            "--dp-noise": s.dp_noise,
            "--deadline": s.deadline,
            "--over-select": s.over_select,
        }
        chosen = [name for name, value in options.items() if value]
        if self.training.own_models and chosen:
            problem = f"{chosen[0]} applies to uploads, but clients of {self.method.name} send none"
            raise FczooError(f"{problem}; leave out one of the two")

    def _check_training(self) -> None:
        """Raise FczooError if local rule, optimizer or compression do not fit the training."""
        s, rule, method = self.settings, self.rule, self.method
        for option in ("local", "server_optimizer", "compress"):
            spec = getattr(s, option)
            if spec and not self.training.trained_prefixes:
                problem = f"--{option.replace('_', '-')} {spec} applies to trained tensors"
                raise FczooError(f"{problem}, but {method.name} trains none; leave it out")
        if s.dp_clip is not None and rule.uploads:
            extra = "control variates" if rule.uploads_tree else "numbers of steps"
            raise FczooError(
                f"--dp-clip covers updates of parameters, but --local {s.local} also uploads "
                f"{extra}; leave one out"
            )
        if rule.corrects_model and s.server_optimizer:
            options = f"--local {s.local} and --server-optimizer {s.server_optimizer}"
            raise FczooError(f"{options} both correct the averaged model; leave one out")
        if rule.reads_features and type(method).features is Method.features:
            raise FczooError(frozen_features_message(rule.name, method.name))
        if (rule.corrects_model or s.server_optimizer) and not self.training.averages_trained:
            option = f"local {s.local}" if rule.corrects_model else "server-optimizer"
            problem = f"--{option} needs averages of the trained tensors, but {method.name} does"
            raise FczooError(f"{problem} not average them; leave it out")

    @cached_property
    def rule(self) -> LocalRule:
        """Return the rule of local training.

        Raises FczooError for an unknown rule.
        """
        return make_local_training(self.settings.local)

    @cached_property
    def training(self) -> Training:
        """Return the declaration of the run: the method's with the uploads of the local rule."""
        training = self.method.training()
        return replace(training, uploads={**training.uploads, **self.rule.uploads})

    @cached_property
    def attackers(self) -> Attackers:
        """Return the hostile clients.

        Raises FczooError for an unknown attack.
        """
        s = self.settings
        return Attackers.draw(s.attack, s.attackers, self.clients, self.training, self.seed)

    @cached_property
    def privacy(self) -> Privacy:
        """Return the privacy mechanism of honest clients.

        Raises FczooError if it does not cover the uploads.
        """
        s = self.settings
        privacy = Privacy(
            self.seed,
            s.min_class_count,
            s.dp_clip,
            s.dp_noise,
            s.dp_delta,
            s.dp_secure,
            s.dp_subsampling,
        )
        privacy.check(self.method)
        return privacy

    @cached_property
    def compression(self) -> Compression | None:
        """Return the code of trained tensors; None: they are sent as they are.

        Raises FczooError for an unknown code.
        """
        return make_compression(self.settings.compress)

    def send(
        self,
        uploads: Sequence[Payload],
        shared: Tree,
        exchange: Exchange,
        residuals: dict[int, Tree] | None = None,
    ) -> list[Payload]:
        """Return the uploads as they leave the clients; the server sent ``shared``.

        ``residuals`` are the errors of each client's earlier codes, and are updated. With
        ``--dp-clip`` they stay empty: with them a later upload would exceed the clipping norm.
        """
        start_tensors = _trained_tensors(self.training, shared, exchange)
        protected = self.privacy.protect(uploads, start_tensors, self.training, exchange)
        forged = self.attackers.forge(protected, shared, exchange)
        if self.compression is None or not start_tensors:
            return forged
        residuals, encoded = {} if residuals is None else residuals, []
        for upload in forged:
            residual = residuals.get(upload.client, {})
            code, residual = encode_upload(self.compression, upload, start_tensors, residual)
            encoded.append(code)
            if self.privacy.clip is None and residual:
                residuals[upload.client] = residual
        return encoded

    def arrive(
        self,
        sent: Sequence[Payload],
        participants: Sequence[Client],
        shared: Tree,
        exchange: Exchange,
        losses: Mapping[int, float] = MappingProxyType({}),
        form: Payload | None = None,
        late: Mapping[int, str] = MappingProxyType({}),
    ) -> Arrival:
        """Validate the uploads of a round or boundary.

        ``form`` and ``late`` are as in ``UploadValidator.validate``. Raises FczooError if too few
        uploads are valid.
        """
        training = self.training
        start_tensors = _trained_tensors(training, shared, exchange)
        size, by_client = bytes_by_content(training, sent), _sizes(sent)
        if compression := self.compression:
            sent = [decode_upload(compression, p, start_tensors) for p in sent]
            form = form and decode_upload(compression, form, start_tensors)
        if form:
            sent = [unpack_factors(p, training.uploads, form) for p in sent]
            form = unpack_factors(form, training.uploads, form)
        validator = self._validator
        uploads = {payload.client: payload for payload in sent}
        images = {c.number: len(c.index) for c in participants}
        counts = self._count_limits(participants)
        valid_uploads, rejections = validator.validate(
            uploads, images, start_tensors, exchange, losses, form, late, counts
        )
        if self.settings.outliers is not None:
            valid_uploads, exclusions = leave_out(
                valid_uploads, training.uploads, self.settings.outliers, exchange.task
            )
            for client, classes in exclusions.items():
                class_list = ", ".join(map(str, classes))
                reason = f"statistics of classes {class_list} are far from the other clients'"
                about = {"task": exchange.task.index, "moment": exchange.label}
                rejections.append({**about, "client": client, "reason": reason})
        distant_clients = extreme_clients(valid_uploads, training.uploads, exchange.task)
        if self.settings.merge_statistics is not None:
            valid_uploads = replace_by_centres(
                valid_uploads, training.uploads, self.settings.merge_statistics, exchange.task
            )
        return Arrival(valid_uploads, rejections, size, by_client, distant_clients)

    def empty_arrival(self, exchange: Exchange, losses: Mapping[int, float]) -> Arrival:
        """Return the arrival of a round without uploads, with the clients that diverged."""
        about = {"task": exchange.task.index, "moment": exchange.label}
        diverged = [
            {**about, "client": client, "reason": f"diverged, loss {loss:g}"}
            for client, loss in losses.items()
            if not math.isfinite(loss)
        ]
        return Arrival([], diverged, {}, {}, [])

    def _count_limits(self, participants: Sequence[Client]) -> dict[int, dict[str, int]]:
        """Return the largest counts of each client: images once per epoch, and local steps."""
        uploads, s, limits = self.training.uploads, self.settings, dict[int, dict[str, int]]()
        of_images = [prefix for prefix, group in uploads.items() if group.of_images]
        for client in participants if of_images or STEPS in uploads else ():
            earlier = client.earlier if self.training.exemplars else ()  # may be exemplars
            images = len(client.index) + len(earlier)
            steps = {STEPS: s.epochs * math.ceil(images / s.batch_size)}
            limits[client.number] = dict.fromkeys(of_images, s.epochs * images) | steps
        return limits

    @property
    def _validator(self) -> UploadValidator:
        least = self.settings.min_clients if self.ends_run else 0
        return UploadValidator(self.method.name, self.training, least, self.backbone)

    @property
    def sums_on_arrival(self) -> bool:
        """Return whether second moments of statistics, which are large, are summed on arrival.

        They are not if the server stacks the clients' sums, or compares them before it adds them.
        """
        compares = self.settings.outliers is not None or self.settings.merge_statistics is not None
        return "second moments" in contents(self.training.uploads) and not (
            self.training.per_client_statistics or compares
        )

    def collect(
        self,
        sent: Iterable[Payload],
        participants: Sequence[Client],
        exchange: Exchange,
        form: Payload,
    ) -> tuple[Arrival, Tree]:
        """Validate uploads client by client as ``arrive`` does; second moments are only summed.

        Each upload is compared with ``form``, which no client sends, and not with other uploads.
        """
        training, validator = self.training, self._validator
        like = unpack_factors(form, training.uploads, form)
        large = [
            n
            for n in form
            if content_of(n, training.trained_prefixes, training.uploads) == "second moments"
        ]
        images, total = {c.number: len(c.index) for c in participants}, SumAccumulator()
        size, valid_uploads, reasons = Counter[str](), list[Payload](), dict[int, str]()
        by_client: dict[int, int] = {}
        arrivals = iter(sent)
        for client in participants:
            upload = next(arrivals)
            size.update(bytes_by_content(training, [upload]))
            by_client |= _sizes([upload])
            upload = unpack_factors(upload, training.uploads, form)
            number, limits = client.number, self._count_limits([client])
            if reason := validator.find_fault(
                upload, number, images[number], like, exchange.task, limits
            ):
                reasons[client.number] = reason
            else:
                total.add(upload.only(*large).tensors)
                valid_uploads.append(upload.drop(*large))
            del upload  # before the next one is made
        rejections = validator.list_rejections(len(valid_uploads), reasons, exchange)
        distant_clients = extreme_clients(valid_uploads, training.uploads, exchange.task)
        arrival = Arrival(valid_uploads, rejections, dict(size), by_client, distant_clients)
        return arrival, total.tree


def _sizes(uploads: Iterable[Payload]) -> dict[int, int]:
    """Return the bytes of each client's upload, without those that are empty."""
    return {upload.client: nbytes(upload.tensors) for upload in uploads if upload}


def _trained_tensors(training: Training, shared: Tree, exchange: Exchange) -> Tree:
    """Return the tensors that clients train in an exchange, at its start."""
    if exchange.boundary:
        return {}
    optims = training.active_optims(exchange.task, exchange.round, exchange.balanced)
    return select(shared, *optims)
