"""Server of one run: the global state, and all that it sends, receives, merges and counts."""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from fczoo.aggregators.merge import check_stateless, wrap_with_checks
from fczoo.core.backbone import Backbone
from fczoo.core.errors import DivergedError, TooFewUploadsError
from fczoo.core.method import Method, table_note, task_exchanges
from fczoo.core.options import plural
from fczoo.core.payload import Payload, unpack_symmetric
from fczoo.core.registry import make_aggregator
from fczoo.core.seeds import PHASE_KEYS, torch_stream
from fczoo.core.tree import Tree, drop, nbytes, select
from fczoo.core.types import Boundary, Exchange, ServerContext, Task
from fczoo.federation.batches import Client
from fczoo.federation.checkpoint import ClientState, contiguous_copy, memory_bytes
from fczoo.federation.client_task_accuracy import client_tasks
from fczoo.federation.environment import code_of, commit, digest, versions
from fczoo.federation.local_rules import ControlVariates
from fczoo.federation.participation import Participation
from fczoo.federation.result import Result
from fczoo.federation.scenario import Scenario
from fczoo.federation.server_optimizers import make_server_optimizer, step_server
from fczoo.federation.settings import Settings
from fczoo.federation.uplink import Arrival, sum_or_stack

log = logging.getLogger("fczoo")


class BroadcastTracker:
    """Tracker of changes of the server's tensors and of the clients' last broadcasts."""

    def __init__(self) -> None:
        self.clock = 0  # counts changes of the state
        self.changed: dict[
            str, list[list[int]]
        ] = {}  # state name -> [row, when] of those from a row on
        self.sent: dict[int, int] = {}  # client -> clock of its last broadcast

    def update(self, before: Tree, after: Tree) -> None:
        """Record which tensors of the state are new or have changed.

        If only rows were appended to a tensor, as to a stack of finished tasks, only these count.
        """
        self.clock += 1
        for name, value in after.items():
            rows, same = len(torch.atleast_1d(value)), _equal_row_count(before.get(name), value)
            if same is None:
                self.changed[name] = [[0, self.clock]]
            elif same < rows:
                self.changed[name].append([same, self.clock])

    def send(self, tree: Tree, clients: Sequence[int]) -> dict[int, int]:
        """Return the bytes of a broadcast that each client lacks, and mark them as sent."""
        sizes = {}
        for client in clients:
            last_broadcast = self.sent.get(client, 0)
            first = {name: self._first_new(name, last_broadcast) for name in tree}
            sizes[client] = nbytes(
                {k: torch.atleast_1d(tree[k])[n:] for k, n in first.items() if n is not None}
            )
            self.sent[client] = self.clock
        return sizes

    def _first_new(self, name: str, last_broadcast: int) -> int | None:
        """Return the row from which on all rows of a tensor changed; None if none changed."""
        return next(
            (row for row, when in self.changed[name] if when > last_broadcast), None
        )  # in order of both

    def notes(self) -> dict[str, Any]:
        """Return the records as plain values, which ``restore`` reads."""
        return {"clock": self.clock, "changed": self.changed, "told": list(self.sent.items())}

    def restore(self, notes: Mapping[str, Any]) -> None:
        """Restore the records that ``notes`` returned."""
        self.clock, self.changed, self.sent = (
            notes["clock"],
            dict(notes["changed"]),
            dict(notes["told"]),
        )


def _equal_row_count(old: Tensor | None, new: Tensor) -> int | None:
    """Return the number of earlier rows; None if one of them changed or is missing."""
    if old is None:
        return None
    old_rows, new_rows = torch.atleast_1d(old), torch.atleast_1d(new)
    alike = (
        old_rows.shape[1:] == new_rows.shape[1:]
        and len(old_rows) <= len(new_rows)
        and torch.equal(old_rows, new_rows[: len(old_rows)])
    )
    return len(old_rows) if alike else None


def broadcast(method: Method, state: Tree) -> Tree:
    """Return the tensors that the server sends: the state without ``server_only`` tensors."""
    return drop(state, *method.server_only) if method.server_only else dict(state)


def to_device(state: Tree, backbone: Backbone) -> Tree:
    """Return a state on the backbone's device, in its number type and at least in float32."""
    least, tensors = torch.promote_types(backbone.dtype, torch.float32), {}
    for name, value in state.items():
        dtype = value.dtype
        if value.is_floating_point():
            dtype = torch.promote_types(dtype, least)
        tensors[name] = contiguous_copy(value.detach().to(backbone.device, dtype))
    return tensors


class Server:
    """Server of one run.

    Attributes:
        state: The global state, by names of tensors.
        result: Result of the run so far.
        exchanges: The exchanges with clients in each task, in their order.
        rounds: The number of training rounds in each task.
    """

    def __init__(self, scenario: Scenario, method: Method, seed: int):
        scenario.check_labels(method)
        self.scenario, self.method, self.seed = scenario, method, seed
        self.settings, self.backbone = scenario.settings, scenario.backbone
        self.uplink = scenario.uplink(method, seed)
        self.uplink.check()
        self.training = self.uplink.training
        averaging = self.settings.aggregator or self.training.averaging
        check_stateless(averaging)
        self.average = wrap_with_checks(make_aggregator(averaging))
        self.average_controls = wrap_with_checks(
            make_aggregator(self.settings.aggregator or "uniform")
        )
        self.controls = ControlVariates(self.uplink.rule)
        self.optimizer = make_server_optimizer(self.settings.server_optimizer)
        self.moments: Tree = {}  # of the optimizer
        self.tracker = BroadcastTracker()
        self.participation = Participation(scenario, seed, self.training.data_scope)
        tasks, rounds = scenario.stream.tasks, self.settings.rounds
        self.exchanges = [tuple(task_exchanges(method, task, rounds)) for task in tasks]
        self.rounds = [
            sum(exchange.is_training_round for exchange in of_task) for of_task in self.exchanges
        ]
        self.state: Tree = {}
        self.result = self._new_result()

    def _new_result(self) -> Result:
        """Return the result of a run that has not begun."""
        scenario, method, stream = self.scenario, self.method, self.scenario.stream
        notes = [table_note(method), self.uplink.rule.table_note(self.training)]
        result = Result(
            method.name,
            asdict(method),
            self.settings.portable(),
            self.seed,
            {**self.backbone.config.record(), "sha256": self.backbone.sha256},
            {
                "spec": scenario.partition.spec,
                "seed": scenario.partition.seed,
                "sha256": scenario.partition.sha256,
            },
            list(stream.class_order),
            [task.size for task in stream.tasks],
            [len(stream.positions(stream.test, task)) for task in stream.tasks],
            remark="; ".join(filter(None, notes)),
            client_tasks=client_tasks(scenario),
            versions=_versions(self.settings, method),
        )
        draws = self.participation.draws(self.exchanges) if self.settings.dp_noise else ()
        result.privacy = self.uplink.privacy.guarantee(list(draws))
        return result

    def training_clients(self, task: Task) -> set[int]:
        """Return the numbers of the clients that train in a round of a task."""
        return self.participation.training_clients(task, self.rounds[task.index])

    def begin_task(self, task: Task) -> None:
        """Start a task: reset control variates and moments, and create the method's state."""
        self.controls.clear()
        self.moments = {}
        rng = self.generator("begin", task, device="cpu")
        task = replace(task, class_order=self.scenario.stream.class_order)
        self.replace_state(self.method.begin_task(self.state, task, self.backbone, rng))

    def send(self, clients: Sequence[Client]) -> tuple[Tree, dict[int, int]]:
        """Return the broadcast, and the bytes of it that each client does not have yet."""
        shared = broadcast(self.method, self.state)
        if self.training.own_models:  # every client makes the start of its model by itself
            return shared, {}
        tree = {**shared, **self.controls.broadcast}
        sizes = self.tracker.send(tree, [client.number for client in clients])
        self.result.bytes_down += sum(sizes.values())
        return shared, sizes

    def receive(self, arrival: Arrival, exchange: Exchange) -> list[Payload]:
        """Record an arrival and return its valid uploads, none if they are too few."""
        self.result.bytes_up += arrival.total_bytes
        self.result.uploaded = dict(Counter(self.result.uploaded) + Counter(arrival.bytes))
        self.result.client_rounds += arrival.uploads
        self.result.rejected += arrival.rejected
        self.result.far = dict(Counter(self.result.far) + Counter(map(str, arrival.far)))
        uploads, least = arrival.payloads, self.settings.min_clients
        if self.uplink.ends_run or len(uploads) >= least:
            return uploads
        self.skip(exchange, f"fewer than {plural(least, 'valid upload')}")
        return []

    def skip(self, exchange: Exchange, reason: str) -> None:
        """Record an exchange with too few valid uploads, in which the state stays."""
        about = {"task": exchange.task.index, "moment": exchange.label}
        self.result.skipped.append({**about, "reason": reason})
        log.warning("%s in %s; the state does not change", reason, exchange)

    @contextmanager
    def _restore_state_on_failure(self, exchange: Exchange) -> Iterator[None]:
        """Restore the state after a failed change and record it, if clients can be hostile."""
        if self.uplink.ends_run:
            yield
            return
        notes, result = deepcopy(self.tracker.notes()), self.result
        before = self.state, self.moments, self.controls.server, result.server_storage
        try:
            yield
        except (TooFewUploadsError, DivergedError) as error:
            self.state, self.moments, self.controls.server, result.server_storage = before
            self.tracker.restore(notes)
            few = isinstance(error, TooFewUploadsError)
            few_uploads = f"too few uploads for {self.settings.aggregator}"
            self.skip(exchange, few_uploads if few else "a merge that is not finite")

    def merge(self, uploads: Sequence[Payload], exchange: Exchange) -> None:
        """Merge the valid uploads of a round into the state."""
        with self._restore_state_on_failure(exchange):
            self._merge(uploads, exchange)

    def _merge(self, uploads: Sequence[Payload], exchange: Exchange) -> None:
        broadcast_before = self.controls.broadcast
        clients, rule = self.scenario.partition.clients, self.controls.rule
        optims = self.training.active_optims(exchange.task, exchange.round, exchange.balanced)
        sent = select(self.state, *optims)
        self.controls.update_server_tree(uploads, sent, clients, self.average_controls)
        self.tracker.update(broadcast_before, self.controls.broadcast)
        payloads = rule.adapt_uploads(uploads, sent, self.average)
        merged = self.method.aggregate(payloads, self.average)
        merged = {name: value.to(self.backbone.device) for name, value in merged.items()}
        merged = rule.correct_merged(merged, self.controls.server)
        merged, self.moments = step_server(
            self.optimizer, self.moments, merged, sent, self.method.name
        )
        ctx = self._context("server", exchange.task, exchange.round, payloads)
        self.replace_state(self.method.server_update(self.state, merged, ctx))

    def update_from(
        self, boundary: Boundary, uploads: Sequence[Payload], task: Task, folded: Tree
    ) -> None:
        """Update the state from the clients' statistics at a boundary of a task.

        Args:
            boundary: The boundary of the task.
            uploads: Valid uploads, one per client.
            task: The current task.
            folded: Statistics that were summed on arrival, see ``Uplink.sums_on_arrival``.
        """
        sums = sum_or_stack(uploads, self.training.per_client_statistics) | folded
        sums = unpack_symmetric(sums, self.training.uploads)
        number = 0 if boundary == "task_start" else self.rounds[task.index]
        ctx = self._context(f"absorb {PHASE_KEYS[boundary]}", task, number, uploads)
        with self._restore_state_on_failure(Exchange(task, boundary=boundary)):
            self.replace_state(self.method.update_from(boundary, self.state, sums, ctx))

    def _context(
        self, purpose: str, task: Task, number: int, payloads: Sequence[Payload]
    ) -> ServerContext:
        return ServerContext(
            task,
            number,
            self.rounds[task.index],
            self.scenario.partition.clients,
            len(payloads),
            sum(payload.num_samples for payload in payloads),
            self.backbone,
            self.generator(purpose, task, number),
            tuple(payload.client for payload in payloads),
        )

    def note_storage(
        self, shared: Tree, clients: Sequence[Client], client_state: ClientState
    ) -> None:
        """Record a client's storage in bytes: broadcast, memory and pixels of its exemplars."""
        if not self.scenario.sees_clients:
            return
        image, exemplars = self.scenario.train.pixels[0].numel(), self.training.exemplars
        local = [
            memory_bytes(client_state.memories.get(client.number, {}), exemplars, image)
            + nbytes(client_state.controls.get(client.number, {}))
            + nbytes(client_state.residuals.get(client.number, {}))
            for client in clients
        ]
        sent = {} if self.training.own_models else shared
        total = nbytes(sent) + nbytes(self.controls.shared) + max(local, default=0)
        self.result.client_storage = max(self.result.client_storage or 0, total)

    def replace_state(self, new: Tree) -> None:
        """Replace the state, on the device and in at least float32, and track what has changed.

        Sums in float64 stay in float64. Raises DivergedError if a value is not finite.
        """
        tensors = to_device(new, self.backbone)
        for name, value in tensors.items():
            if not value.isfinite().all():
                raise DivergedError(
                    f"{self.method.name} diverged: {name} is not finite on the server; "
                    f"lower its learning rates with --set"
                )
        self.tracker.update(self.state, tensors)
        size = nbytes(tensors) + nbytes(self.moments)
        self.result.server_storage = max(self.result.server_storage or 0, size)
        self.state = tensors

    def generator(
        self, purpose: str, task: Task, number: int = 0, device: str | None = None
    ) -> torch.Generator:
        """Create the random generator of a purpose in a task."""
        on = device or self.backbone.device
        return torch_stream(purpose, self.seed, task.index, number, device=on)


def _versions(settings: Settings, method: Method) -> dict[str, str]:
    """Return versions, hash and commit of the code of a run."""
    checkout = {"commit": commit()} if commit() else {}
    return {**versions(), "code": digest(code_of(settings, method)), **checkout}
