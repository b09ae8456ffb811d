"""The rounds of one run: clients train, the server merges, every task ends in an evaluation."""

import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from fczoo.core.files import restore_nan
from fczoo.core.metrics import all_metrics
from fczoo.core.seeds import numpy_stream
from fczoo.core.tree import Tree, select
from fczoo.core.types import Context, Exchange, Task
from fczoo.federation.batches import Client, view_batches
from fczoo.federation.carried import Carried, Kept, from_trees, to_trees
from fczoo.federation.checkpoint import Snapshot
from fczoo.federation.engine import Engine
from fczoo.federation.environment import peak_memory, reset_peak_memory
from fczoo.federation.evaluate import accuracy_row
from fczoo.federation.exchanges import Exchanges
from fczoo.federation.local_training import CONTROL
from fczoo.federation.plan import Plan, plan_of
from fczoo.federation.result import MEASURED, PROGRESS, Result


class Run(Exchanges):
    """The rounds of one run."""

    def run(self) -> Result:
        """All tasks that are left."""
        for _ in self:
            pass
        return self.result

    def __iter__(self) -> Iterator[Task]:
        """Yields each task once it is learned and evaluated; ``state`` and ``result`` are as of then."""
        tasks_done, rounds_done = self._restore()
        self.begin = time.perf_counter() - self.result.seconds
        reset_peak_memory(self.backbone.device)
        done = sum(self.rounds[:tasks_done]) + sum(self.balanced[:tasks_done]) + rounds_done
        rounds = sum(self.rounds) + sum(self.balanced)
        self.observer.start(self.method, self.seed, self.world.partition.clients, rounds, done)
        for task in self.stream.tasks[tasks_done:]:
            self._learn(task, rounds_done)
            rounds_done = 0
            with self.result.phase("evaluation"):
                batch = self._plan().pass_size
                row = accuracy_row(self.method, self.world, self.state, task, batch)
                self.result.accuracy.append(row)
            self.result.metrics = all_metrics(self.result.accuracy, self.result.test_counts)
            self.result.seconds = time.perf_counter() - self.begin
            before = self.result.peak_memory  # of the processes that were stopped, too
            peaks = peak_memory(self.backbone.device)
            self.result.peak_memory = {k: max(v, before.get(k, 0)) for k, v in peaks.items()}
            self.observer.task(self.result)
            if task.index + 1 < len(self.stream.tasks):
                self._save(task.index + 1, 0)
            yield task

    @torch.inference_mode()
    def features(self, part: Literal["train", "test"] = "test") -> tuple[Tensor, Tensor]:
        """What the method reads of the images of all tasks learned so far, [N, D], under the server's state.

        And their labels [N], in order of arrival; both on the CPU.
        """
        seen = self.stream.tasks[: len(self.result.accuracy)]
        images, store = {
            "train": (self.stream.train, self.world.train),
            "test": (self.stream.test, self.world.test),
        }[part]
        found, labels = [torch.empty(0, self.backbone.dim)], [torch.empty(0, dtype=torch.int64)]
        for task in seen:
            index = torch.from_numpy(self.stream.positions(images, task))
            for batch in view_batches(self.method, store, index, self._plan().pass_size):
                found.append(self.method.features(self.backbone, self.state, batch).float().cpu())
                labels.append(batch.y.cpu())
        return torch.cat(found[1:] or found), torch.cat(labels)

    def _learn(self, task: Task, done: int) -> None:
        """One task, of which ``done`` rounds were done before."""
        scope = self.training.scope
        joined = self.world.clients(task, scope, idle=True)
        clients = [c for c in joined if len(c.index)]
        candidates = self._candidates(joined)
        if not done:
            self.taught.clear()
            rng = self._rng("begin", task, "cpu")
            self.controls.clear()
            self.state = self._place(self.method.begin_task(self.state, task, self.backbone, rng))
        trained = select(self.state, *self.training.optims)
        self.result.trained_scalars = sum(v.numel() for v in trained.values())
        engine = self._engine(self._plan())
        if not done:
            new = self.world.clients(task) if scope == "latest" else clients  # sums are of the task's classes
            self._survey("begin", engine, new, task)
            if self.probe:
                self.probe.begun(self.method, self.state)
        for number in range(done, self.rounds[task.index]):
            self._round(engine, candidates, task, number)
            self._save(task.index, number + 1)
        clients = self._conclude(engine, joined, task)
        if self.balanced[task.index]:
            remembering = [replace(c, index=engine.exemplars(c)) for c in joined]
            holding = [c for c in remembering if len(c.index)]
            self._round(engine, holding, task, self.rounds[task.index])
        asked = self._trained if self.training.asked == "trained" else None
        self._survey("end", engine, clients, task, asked)
        if self.probe:
            self.probe.learned(self.world, self.method, self.state, task)

    def _round(self, engine: Engine, candidates: list[Client], task: Task, number: int) -> None:
        """One round: clients are drawn and train, the server merges what arrives.

        The round after the last is the one on exemplars alone; ``candidates`` hold nothing else then, and all
        take part.
        """
        started = time.perf_counter()
        rounds = self.rounds[task.index]
        exchange = Exchange(task, number, balanced=number == rounds)
        drawn = candidates if exchange.balanced else self._participants(candidates, task, number)
        present = [c for c in drawn if len(c.index)]
        shared, down = self._send(drawn)
        losses: dict[int, float] = {}

        def tick(client: int, loss: float, steps: Tensor) -> None:
            losses[client] = loss
            self.observer.client(task.index, number, loss)
            self.observer.steps(task.index, number, client, steps.tolist())

        heard = self.uplink.heard(present, exchange)
        with self.result.phase("training"):
            sent = engine.train(shared, heard, Context(task, number, rounds, shared), tick)
        arrived, rejected, up = self._receive(self.uplink.arrive(sent, present, shared, exchange, losses))
        payloads = [payload.drop(CONTROL) for payload in arrived]
        self._note_storage(shared, heard)
        if self.probe and payloads and number == rounds - 1:
            self.probe.trained(self.world, self.method, self.state, payloads, task)
        if payloads:  # else nobody drawn has data, and the state stays
            with self.result.phase("server"):
                self._control(arrived)
                merged = self.method.aggregate(payloads, self.average)
                merged = {k: v.to(self.backbone.device) for k, v in merged.items()}
                ctx = self._server_context("server", task, number, payloads)
                self.state = self._place(self.method.server_update(self.state, merged, ctx))
        told = [losses[p.client] for p in payloads if p.client in losses]  # real sites may keep them back
        self.observer.round(
            {
                "task": task.index,
                "round": number,
                "clients": [c.number for c in present],
                "rejected": rejected,
                "loss": statistics.fmean(told) if told else None,
                "bytes_up": up,
                "bytes_down": down,
                "seconds": time.perf_counter() - started,
            }
        )

    def _save(self, tasks: int, rounds: int) -> None:
        """Keep the run as it is after ``tasks`` tasks and ``rounds`` rounds of the next one."""
        if self.checkpoint:
            self.result.seconds = time.perf_counter() - self.begin
            notes: dict[str, Any] = {
                "ledger": self.ledger.notes(),
                "result": {k: getattr(self.result, k) for k in PROGRESS},
            }
            begin: Tree = {}
            if self.probe:
                notes["diagnostics"], begin = self.probe.size(), self.probe.begin
            kept = Kept(self.memories, self.taught, self.controls.clients)
            trees = to_trees(Carried(self.state, kept, self.controls.server, begin))
            self.checkpoint.save(Snapshot(tasks, rounds, trees, notes))

    def _restore(self) -> tuple[int, int]:
        """Take up the run where it was saved; returns how many tasks and rounds of the next one are done."""
        snapshot = self.checkpoint.load(self.backbone.device) if self.checkpoint else None
        if snapshot is None:
            if self.probe:
                self.probe.resume(0, {})
            return 0, 0
        notes = snapshot.notes
        carried = from_trees(snapshot.trees)
        self.state, self.controls.server = carried.state, carried.control
        self.memories, self.taught, self.controls.clients = carried.kept
        if self.probe:
            self.probe.resume(notes.get("diagnostics", 0), carried.begin)
        self.ledger.restore(notes["ledger"])
        self.result = replace(self.result, **restore_nan(notes["result"], MEASURED))
        return snapshot.task, snapshot.round

    def _plan(self) -> Plan:
        clients, scalars = self.world.partition.clients, self.result.trained_scalars
        return plan_of(self.settings, self.seed, self.backbone.device, clients, scalars)

    def _participants(self, clients: list[Client], task: Task, number: int) -> list[Client]:
        """The clients drawn for a round, at least one."""
        drawing = number if self.settings.client_draw == "round" else 0
        rng = numpy_stream("participation", self.seed, task.index, drawing)
        chosen = rng.choice(len(clients), self.settings.drawn(len(clients)), replace=False)
        return [clients[i] for i in sorted(chosen)]

    def _trained(self, task: Task) -> set[int]:
        """Numbers of the clients that trained in a round of a task; known beforehand from the seed."""
        numbers: set[int] = set()
        candidates = self._candidates(self.world.clients(task, self.training.scope, idle=True))
        for number in range(self.rounds[task.index]):
            present = [c for c in self._participants(candidates, task, number) if len(c.index)]
            numbers |= {c.number for c in self.uplink.heard(present, Exchange(task, number))}
        return numbers
