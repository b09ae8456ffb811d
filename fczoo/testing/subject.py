"""A method under test: its runs in the toy world, each made once."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fczoo.core.errors import FczooError
from fczoo.core.method import Method
from fczoo.core.types import Batch
from fczoo.data.views import ImageStore
from fczoo.federation.batches import view_batches
from fczoo.testing.recording import Record, watch
from fczoo.testing.trials import need
from fczoo.testing.world import toy_bench


@dataclass
class Subject:
    """A method and its watched runs in the toy world."""

    method: Method
    runs: dict[tuple[torch.dtype, int, int, int], Record] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The method's registered name, with which every sentence begins."""
        return self.method.name

    def run(
        self, dtype: torch.dtype = torch.float64, together: int = 1, seed: int = 0, copy: int = 0
    ) -> Record:
        """One run, made when it is first asked for; another ``copy`` is made anew.

        Raises AssertionError where the method does not come to the end of it.
        """
        key = (dtype, together, seed, copy)
        if key not in self.runs:
            try:
                self.runs[key] = watch(toy_bench(dtype, together=together), self.method, seed)
            except (FczooError, TypeError) as error:
                raise AssertionError(
                    f"{self.name} does not finish a run in the toy world: {error}"
                ) from error
        return self.runs[key]

    def logits(self, record: Record, task: int, index: Tensor | None = None, batch_size: int = 100) -> Tensor:
        """Logits [N, task.stop] of test images (all, or some) by the state after a task."""
        store = record.bench.test
        rows = torch.arange(len(store.labels)) if index is None else index
        at, state = record.bench.stream.tasks[task], record.states[task]
        batches = (batch_of(self.method, store, part) for part in rows.split(batch_size))
        return torch.cat([self.method.predict(store.backbone, state, batch, at) for batch in batches])


def batch_of(method: Method, store: ImageStore, index: Tensor) -> Batch:
    """The test view of some images as ``method`` asks for it, in one batch."""
    (batch,) = view_batches(method, store, index, len(index))
    return batch


def need_same(
    ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], sentence: str, tolerance: float = 0.0
) -> None:
    """Raise AssertionError with ``sentence`` and the tensor's name where two trees differ.

    ``tolerance`` is relative and absolute; 0: bit for bit.
    """
    odd = ours.keys() ^ theirs.keys()
    need(not odd, f"{sentence} ({', '.join(sorted(odd))} is there only once)")
    for name, value in ours.items():
        try:
            torch.testing.assert_close(value, theirs[name], rtol=tolerance, atol=tolerance)
        except AssertionError:
            raise AssertionError(f"{sentence} ({name} differs)") from None
