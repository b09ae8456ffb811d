"""A client's own images, as its method sees them besides batches."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from fczoo.core.method import Method
from fczoo.core.types import Batch
from fczoo.data.views import ImageStore
from fczoo.federation.batches import NOWHERE, view_batches


@dataclass(frozen=True)
class LocalImages:
    """What ``Remembers`` and ``Concludes`` see of a client's images."""

    method: Method
    store: ImageStore
    index: Tensor  # [n] positions of the images of the current task
    earlier: Tensor = NOWHERE  # [m] of earlier tasks
    pass_size: int = 64  # images of a batch

    def labels(self, index: Tensor) -> Tensor:
        """Labels [n] in order of arrival."""
        return self.store.labels[index.to(self.store.labels.device)]

    def batches(self, index: Tensor) -> Iterator[Batch]:
        """The test view of some images, in order."""
        return view_batches(self.method, self.store, index, self.pass_size)
