"""A method under test: its runs in the toy world, each made once."""

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from fczoo.core.errors import FczooError
from fczoo.core.method import Method
from fczoo.core.payload import Payload
from fczoo.core.types import Batch
from fczoo.data.views import ImageStore
from fczoo.federation.batches import view_batches
from fczoo.federation.run import FederatedRun
from fczoo.testing.call_recorder import Call, Record, record_run
from fczoo.testing.runs import need
from fczoo.testing.world import toy_bench

SHORT: dict[str, Any] = {"epochs": 1, "batch_size": 8}
"""Settings of a run: still two rounds, and one or two steps of a client in each."""


class _FirstCall(Exception):
    """End a run after its first round or survey."""


@dataclass
class MethodUnderTest:
    """A method and its watched runs in the toy world."""

    method: Method
    runs: dict[tuple[torch.dtype, int, int], Record] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return the method's registered name, which starts every message."""
        return self.method.name

    def run(self, dtype: torch.dtype = torch.float64, together: int = 1, seed: int = 0) -> Record:
        """Return one run, made at the first call.

        Args:
            dtype: Number type of the backbone.
            together: Number of clients in one batched forward.
            seed: Seed of the run.

        Returns:
            Record of the run.

        Raises:
            AssertionError: The method does not finish the run.
        """
        key = (dtype, together, seed)
        if key not in self.runs:
            with self._in_toy_world():
                bench = toy_bench(dtype, together=together, **SHORT)
                self.runs[key] = record_run(bench, self.method, seed)
        return self.runs[key]

    def start(
        self,
        tasks: int,
        dtype: torch.dtype = torch.float64,
        together: int = 1,
        seed: int = 0,
        **settings: Any,
    ) -> FederatedRun:
        """Learn the first tasks of a run that is not recorded.

        Args:
            tasks: Number of tasks.
            dtype: Number type of the backbone.
            together: Number of clients in one batched forward.
            seed: Seed of the run.
            settings: Fields of ``Settings`` that replace those of a run.

        Returns:
            The run, whose ``state`` and ``result`` are as of then; it is a new one at each call.

        Raises:
            AssertionError: The method does not finish these tasks.
        """
        with self._in_toy_world():
            bench = toy_bench(dtype, **{**SHORT, "together": together, **settings})
            run = bench.start(self.method, seed)
            deque(islice(run, tasks), maxlen=0)
        return run

    def first_uploads(self, dtype: torch.dtype, together: int) -> list[Payload]:
        """Return the first uploads of a run with more steps, which show smaller differences.

        Args:
            dtype: Number type of the backbone.
            together: Number of clients in one batched forward.

        Returns:
            Uploads of the first round or survey; the run ends there.

        Raises:
            AssertionError: The method does not come to them.
        """
        calls: list[Call] = []

        def stop(call: Call) -> None:
            calls.append(call)
            raise _FirstCall

        with self._in_toy_world(), suppress(_FirstCall):
            record_run(toy_bench(dtype, together=together), self.method, on_call=stop)
        return calls[0].payloads

    @contextmanager
    def _in_toy_world(self) -> Iterator[None]:
        """Turn what a run raises into the sentence of a broken rule."""
        try:
            yield
        except (FczooError, TypeError) as error:
            raise AssertionError(
                f"{self.name} does not finish a run in the toy world: {error}"
            ) from error

    def logits(
        self, record: Record, task: int, index: Tensor | None = None, batch_size: int = 100
    ) -> Tensor:
        """Compute the logits of test images with the state after a task.

        Args:
            record: Run whose state is used.
            task: Index of the task.
            index: Positions [N] of test images. None: all.
            batch_size: Images per call of ``predict``.

        Returns:
            Logits [N, task.stop].
        """
        store = record.bench.test
        rows = torch.arange(len(store.labels)) if index is None else index
        evaluated_task, state = record.bench.stream.tasks[task], record.states[task]
        batches = (batch_of(self.method, store, part) for part in rows.split(batch_size))
        return torch.cat(
            [self.method.predict(store.backbone, state, batch, evaluated_task) for batch in batches]
        )


def batch_of(method: Method, store: ImageStore, index: Tensor) -> Batch:
    """Load the test view of some images in one batch, with the inputs of ``method``.

    Args:
        method: Method that states which inputs it needs.
        store: Images.
        index: Their positions [B].

    Returns:
        The batch.
    """
    (batch,) = view_batches(method, store, index, len(index))
    return batch


def need_same(
    ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], sentence: str, tolerance: float = 0.0
) -> None:
    """Raise AssertionError where two trees differ in names or values.

    Args:
        ours: Tensors by name.
        theirs: Tensors that must be the same.
        sentence: Start of the message, which ends with the name of the tensor.
        tolerance: Relative and absolute difference that is allowed; 0: bit for bit.

    Raises:
        AssertionError: The trees differ.
    """
    unmatched_names = ours.keys() ^ theirs.keys()
    need(
        not unmatched_names,
        f"{sentence} ({', '.join(sorted(unmatched_names))} is in only one of them)",
    )
    for name, value in ours.items():
        try:
            torch.testing.assert_close(value, theirs[name], rtol=tolerance, atol=tolerance)
        except AssertionError:
            raise AssertionError(f"{sentence} ({name} differs)") from None
