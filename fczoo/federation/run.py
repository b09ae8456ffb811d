"""One run of a method: clients train, the server merges, every task ends in an evaluation."""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from fczoo.core.errors import FczooError
from fczoo.core.files import restore_nan
from fczoo.core.method import Method
from fczoo.core.metrics import pooled_accuracy
from fczoo.core.payload import Payload
from fczoo.core.tree import Tree, select
from fczoo.core.types import Boundary, Context, Exchange, Task
from fczoo.federation.batches import Client, view_batches
from fczoo.federation.callbacks import Callback
from fczoo.federation.checkpoint import Checkpoint, ClientState, Snapshot
from fczoo.federation.client import ClientRequest
from fczoo.federation.client_engine import ClientEngine
from fczoo.federation.device import Plan, plan_of
from fczoo.federation.diagnostics import Probe, check_diagnostics
from fczoo.federation.environment import peak_memory, reset_peak_memory
from fczoo.federation.evaluate import accuracy_row, evaluate, personal_accuracies
from fczoo.federation.local_rules import RULE_UPLOADS
from fczoo.federation.remote import RemoteEngine, Transport
from fczoo.federation.result import METRIC_FIELDS, PROGRESS, Result, metrics_of
from fczoo.federation.scenario import Scenario
from fczoo.federation.server import Server, broadcast
from fczoo.federation.uplink import Arrival
from fczoo.federation.virtual_clock import VirtualClock
from fczoo.federation.warm_start import start_from_model


class FederatedRun:
    """One run: its server, its clients, and the exchanges between them task by task.

    Args:
        scenario: Data, partition and backbone.
        method: The method to train.
        seed: Seed of everything random.
        callback: Callback that follows the progress.
        checkpoint: File that is replaced after every round; None: no checkpoint.
        probe: Recorder of diagnostics; None: no diagnostics.
        transport: Transport to remote workers that act for clients; None: this process.
    """

    def __init__(
        self,
        scenario: Scenario,
        method: Method,
        seed: int,
        callback: Callback,
        checkpoint: Checkpoint | None,
        probe: Probe | None,
        transport: Transport | None = None,
    ):
        self.scenario, self.method, self.seed = scenario, method, seed
        self.callback, self.checkpoint, self.probe = callback, checkpoint, probe
        self.transport = transport
        if probe:
            check_diagnostics(method)
        self.settings, self.stream = scenario.settings, scenario.stream
        self.backbone = scenario.backbone
        self.server = Server(scenario, method, seed)
        self.clock = VirtualClock(self.settings, scenario.devices, self.backbone)
        attackers = self.server.uplink.attackers
        self.train = attackers.store(scenario.stream, scenario.partition, scenario.train)
        self.memories: dict[int, Tree] = {}  # client -> what it keeps from round to round
        # client -> outputs of the task's teacher for its images, see ClientState
        self.teacher_cache: dict[int, dict[int, Tensor]] = {}
        self.residuals: dict[int, Tree] = {}  # client -> what its codes have lost, see compression

    @property
    def state(self) -> Tree:
        """Return the server's state."""
        return self.server.state

    @property
    def own_models(self) -> dict[int, Tree]:
        """Return the clients' own models by number; empty for methods with a global model."""
        memories = self.memories if self.server.training.own_models else {}
        return {c: {**self.state, **memory} for c, memory in sorted(memories.items())}

    @property
    def models(self) -> dict[int | None, Tree]:
        """Return the models that are evaluated: the clients' own, or the state under None."""
        return dict(self.own_models.items()) or {None: self.state}

    @property
    def result(self) -> Result:
        """Return the result of the run so far."""
        return self.server.result

    def run(self) -> Result:
        """Run all remaining tasks."""
        for _ in self:
            pass
        return self.result

    def __iter__(self) -> Iterator[Task]:
        """Yield each task after its evaluation, with ``state`` and ``result`` up to date."""
        tasks_done, rounds_done = self._restore()
        self.begin = time.perf_counter() - self.result.seconds
        reset_peak_memory(self.backbone.device)
        rounds_of = [sum(e.boundary is None for e in of_task) for of_task in self.server.exchanges]
        first = self.stream.learned_count
        done, rounds = sum(rounds_of[first:tasks_done]) + rounds_done, sum(rounds_of[first:])
        clients = self.scenario.partition.clients
        self.callback.start(self.method, self.seed, clients, rounds, done)
        for task in self.stream.tasks[tasks_done:]:
            self._learn(task, rounds_done)
            rounds_done = 0
            with self.result.phase("evaluation"):
                batch = self._plan().pass_size
                self.result.add(evaluate(self.method, self.scenario, self.models, task, batch))
                self.result.add_to_curve(task, self.server.rounds[task.index])
            if self.result.is_finished:
                self.result.note_skipped()
            if self.settings.personal_epochs and task.index + 1 == len(self.stream.tasks):
                self._personalise(task)
            self.result.seconds = time.perf_counter() - self.begin
            self.result.add_peaks(peak_memory(self.backbone.device))
            self.callback.task(self.result)
            yield task
            if task.index + 1 < len(self.stream.tasks):
                self._save(task.index + 1, 0)

    @torch.inference_mode()
    def features(self, part: Literal["train", "test"] = "test") -> tuple[Tensor, Tensor]:
        """Compute the features of all learned tasks' images under the server's state.

        Args:
            part: The images, in order of arrival.

        Returns:
            Features [N, D] and labels [N], both on the CPU.
        """
        if self.server.training.own_models:
            problem = f"{self.method.name} has one model per client and no global model"
            raise FczooError(f"{problem}; call method.features with one of run.own_models")
        images, store = getattr(self.stream, part), getattr(self.scenario, part)
        features = [torch.empty(0, self.backbone.dim)]
        labels = [torch.empty(0, dtype=torch.int64)]
        for task in self.stream.tasks[: len(self.result.accuracy)]:
            index = torch.from_numpy(self.stream.positions(images, task))
            for batch in view_batches(self.method, store, index, self._plan().pass_size):
                of_batch = self.method.features(self.backbone, self.state, batch)
                features.append(of_batch.float().cpu())
                labels.append(batch.y.cpu())
        return torch.cat(features[1:] or features), torch.cat(labels)

    def _learn(self, task: Task, first_round: int) -> None:
        """Learn one task from round ``first_round`` on, exchange by exchange."""
        training, exchanges = self.server.training, self.server.exchanges[task.index]
        members = self.scenario.clients(task, training.data_scope, idle=True)
        holders = [client for client in members if len(client.index)]
        if not first_round:
            self.teacher_cache.clear()
            self.residuals.clear()
            self.server.begin_task(task)
        trained = select(self.state, *training.optims).values()
        self.result.trained_scalars = sum(value.numel() for value in trained)
        engine = self._engine(self._plan())
        if not first_round:
            if any(exchange.boundary == "task_start" for exchange in exchanges):
                # statistics are of the task's classes
                owners = self.scenario.clients(task) if training.data_scope == "latest" else holders
                self._collect("task_start", engine, owners, task)
            if self.probe:
                self.probe.on_task_start(self.method, self.state)
        for exchange in exchanges:
            if exchange.boundary == "after_rounds":
                holders = self._end_task(engine, members, task)
            elif exchange.boundary in ("before_exemplars", "task_end"):
                self._collect(exchange.boundary, engine, holders, task)
            elif exchange.balanced:
                owners = [replace(c, index=engine.exemplars(c)) for c in members]
                self._round(engine, [c for c in owners if len(c.index)], exchange, len(members))
            elif exchange.is_training_round and exchange.round >= first_round:
                candidates = self.server.participation.candidates(members)
                sampled = self.server.participation.sample(candidates, task, exchange.round)
                count = self.settings.participant_count(len(candidates))
                self._round(engine, sampled, exchange, count)
                self._save(task.index, exchange.round + 1)
        if self.probe:
            self.probe.on_task_end(self.scenario, self.method, self.state, task)

    def _round(
        self, engine: ClientEngine, participants: Sequence[Client], exchange: Exchange, needed: int
    ) -> None:
        """Run one round: send the broadcast, train the participants, merge their uploads.

        The server takes the first ``needed`` uploads.
        """
        start_time, server = time.perf_counter(), self.server
        task, number, rounds = exchange.task, exchange.round, server.rounds[exchange.task.index]
        present = [client for client in participants if len(client.index)]
        shared, down = server.send(participants)
        losses: dict[int, float] = {}

        def report_progress(client: int, loss: float, steps: Tensor) -> None:
            losses[client] = loss
            self.callback.client(task.index, number, loss)
            self.callback.steps(task.index, number, client, steps.tolist())

        responding = server.participation.responding(present, exchange)
        ctx = Context(task, number, rounds, shared)
        request = ClientRequest(None, shared, server.controls.shared, ctx)
        work = self.clock.work(engine, request, responding)
        with self.result.phase("training"):
            client_uploads = engine.train(shared, responding, ctx, report_progress)
        round_end = self.clock.close_round(work, down, client_uploads, present, needed)
        self.result.virtual_seconds += round_end.seconds
        if server.training.own_models:
            arrival = server.uplink.empty_arrival(exchange, losses)
        else:
            form = engine.upload_form(request)
            arrival = server.uplink.arrive(
                round_end.uploads, round_end.sampled, shared, exchange, losses, form, round_end.late
            )
        uploads = self._receive(arrival, exchange)
        server.note_storage(shared, responding, engine.client_state)
        if self.probe and uploads:
            payloads = [upload.drop(*RULE_UPLOADS) for upload in uploads]
            self.probe.on_round(self.scenario, self.method, self.state, payloads, ctx)
        if uploads:
            with self.result.phase("server"):
                server.merge(uploads, exchange)
        seconds = time.perf_counter() - start_time
        measured = self._evaluate_round(exchange)
        # real sites may not report their losses
        senders = [*losses] if server.training.own_models else [u.client for u in uploads]
        reported_losses = [losses[client] for client in senders if client in losses]
        self.callback.round(
            {
                "task": task.index,
                "round": number,
                "clients": [client.number for client in present],
                "rejected": arrival.rejected,
                "loss": statistics.fmean(reported_losses) if reported_losses else None,
                "bytes_up": arrival.total_bytes,
                "bytes_down": sum(down.values()),
                "seconds": seconds,
                **self.clock.record(self.result),
                **measured,
            }
        )

    def _evaluate_round(self, exchange: Exchange) -> dict[str, float]:
        """Measure the accuracy over all classes seen after every ``eval_every`` training rounds."""
        every, number = self.settings.eval_every, exchange.round + 1
        if not every or not exchange.is_training_round or number % every:
            return {}
        with self.result.phase("evaluation"):
            task, batch = exchange.task, self._plan().pass_size
            row = accuracy_row(self.method, self.scenario, self.models, task, batch)
        accuracy = pooled_accuracy(row, self.result.test_counts)
        self.result.add_to_curve(task, number, accuracy)
        return {"accuracy": accuracy}

    def _personalise(self, task: Task) -> None:
        """Train and test a fine-tuned copy of the final model at each client."""
        training, rounds = self.server.training, self.server.rounds[task.index]
        if not training.active_optims(task, rounds - 1) or training.data_scope == "pooled":
            return
        with self.result.phase("personal"):
            plan = replace(self._plan(), epochs=self.settings.personal_epochs)
            trainer = self._engine(plan).trainer
            ctx = Context(task, rounds - 1, rounds, broadcast(self.method, self.state))
            state = ClientState(self.memories, self.teacher_cache, {}, {})
            clients = {c.number: c for c in self.scenario.clients(task, training.data_scope)}
            before = self.result.client_accuracy
            self.result.personal_accuracy = personal_accuracies(
                self.scenario, trainer, self.state, state, clients, ctx, before
            )
        self.result.metrics = metrics_of(self.result)

    def _collect(
        self, phase: Boundary, engine: ClientEngine, clients: Sequence[Client], task: Task
    ) -> None:
        """Collect statistics, whose sums over clients equal those of the pooled data."""
        server, training = self.server, self.server.training
        senders_of = None  # function of a task that returns the clients that send; None: all
        if phase == "task_end" and training.collect_from == "trained":
            senders_of = server.training_clients
            numbers = senders_of(task)
            clients = [client for client in clients if client.number in numbers]
        clients = self.scenario.without_counted_images(
            clients, task, training.data_scope, senders_of
        )
        if not clients:
            return
        shared, down = server.send(clients)
        ctx = Context(task, 0, server.rounds[task.index], shared)
        request = ClientRequest(phase, shared, {}, ctx)
        work, exchange = self.clock.work(engine, request, clients), request.exchange
        folded_sums: Tree = {}
        with self.result.phase("surveys"):
            client_uploads = engine.collect(phase, shared, clients, ctx)
            if server.uplink.sums_on_arrival:
                form = engine.statistics_form(phase, shared, clients[0], ctx)
                arrival, folded_sums = server.uplink.collect(
                    client_uploads, clients, exchange, form
                )
            else:
                expected = engine.upload_form(request)
                uploads = list(client_uploads)
                arrival = server.uplink.arrive(uploads, clients, shared, exchange, form=expected)
        self.clock.wait(self.result, work, down, arrival)
        server.note_storage(shared, clients, engine.client_state)
        if received := self._receive(arrival, exchange):
            server.update_from(phase, received, task, folded_sums)

    def _end_task(
        self, engine: ClientEngine, clients: Sequence[Client], task: Task
    ) -> list[Client]:
        """Let every client update its memory after a task.

        Returns the clients with images of the task or exemplars, with both, each image once.
        """
        server, rounds = self.server, self.server.rounds[task.index]
        clients = [c for c in clients if len(c.index) + len(engine.exemplars(c))]
        shared, down = server.send(clients)
        ctx = Context(task, rounds, rounds, shared)
        request = ClientRequest("after_rounds", shared, {}, ctx)
        work, arrival = self.clock.work(engine, request, clients), None
        with self.result.phase("surveys"):
            client_uploads = engine.end_task_client(clients, ctx)
        server.note_storage(shared, clients, engine.client_state)
        holders = [engine.with_exemplars(client) for client in clients]
        pairs = [(upload, c) for upload, c in zip(client_uploads, holders, strict=True) if upload]
        if pairs:
            uploads: list[Payload] = [upload for upload, _ in pairs]
            senders = [client for _, client in pairs]
            form = engine.upload_form(request)
            arrival = server.uplink.arrive(uploads, senders, shared, request.exchange, form=form)
            if received := self._receive(arrival, request.exchange):
                server.update_from("after_rounds", received, task, {})
        self.clock.wait(self.result, work, down, arrival)
        return holders

    def _receive(self, arrival: Arrival, exchange: Exchange) -> list[Payload]:
        """Record an arrival and return the uploads to merge; without any, the state is kept."""
        return self.server.receive(arrival, exchange)

    def _engine(self, plan: Plan) -> ClientEngine:
        """Create the engine of a task's clients."""
        controls = self.server.controls
        parts = (self.method, self.backbone, self.train, plan, self.memories, self.teacher_cache)
        if self.transport:
            return RemoteEngine(*parts, controls, self.residuals, transport=self.transport)
        return ClientEngine(*parts, controls, self.residuals, uplink=self.server.uplink)

    def _plan(self) -> Plan:
        sizes = self.scenario.partition.clients, self.result.trained_scalars
        return plan_of(self.settings, self.seed, self.backbone.device, *sizes)

    def _save(self, tasks: int, rounds: int) -> None:
        """Save the run after ``tasks`` tasks and ``rounds`` rounds of the next task."""
        if not self.checkpoint:
            return
        self.result.seconds = time.perf_counter() - self.begin
        notes: dict[str, Any] = {
            "ledger": self.server.tracker.notes(),
            "result": {name: getattr(self.result, name) for name in PROGRESS},
        }
        begin: Tree = {}
        if self.probe:
            notes["diagnostics"], begin = self.probe.size(), self.probe.begin
        controls = self.server.controls
        clients = ClientState(self.memories, self.teacher_cache, controls.clients, self.residuals)
        trees = {"state": self.state, "control": controls.server, "begin": begin}
        trees |= {"moments": self.server.moments, **clients.to_trees()}
        self.checkpoint.save(Snapshot(tasks, rounds, trees, notes))

    def _restore(self) -> tuple[int, int]:
        """Resume the run from its checkpoint, or start it from a kept model or from scratch.

        Return the number of finished tasks, and of finished rounds of the next one.
        """
        snapshot = self.checkpoint.load(self.backbone.device) if self.checkpoint else None
        if snapshot is None:
            if self.probe:
                self.probe.resume(0, {})
            return start_from_model(self.server, self.seed), 0
        notes, trees, server = snapshot.notes, snapshot.trees, self.server
        server.state, server.controls.server = trees["state"], trees["control"]
        server.moments = trees.get("moments", {})  # not in older files
        clients = ClientState.from_trees(trees)
        self.memories, self.teacher_cache = clients.memories, clients.teacher_outputs
        server.controls.clients, self.residuals = clients.controls, clients.residuals
        if self.probe:
            self.probe.resume(notes.get("diagnostics", 0), trees["begin"])
        server.tracker.restore(notes["ledger"])
        server.result = replace(server.result, **restore_nan(notes["result"], METRIC_FIELDS))
        return snapshot.task, snapshot.round
