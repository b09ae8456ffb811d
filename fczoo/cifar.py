"""CIFAR's Python version: pickles, which torchvision opens only after their checksums matched."""

from pathlib import Path
from typing import ClassVar

import numpy as np
from torchvision.datasets import CIFAR10

from .data import Dataset, ImageData, Images
from .errors import FczooError


class PickledCIFAR(Dataset):
    """A CIFAR data set as ``reader`` finds it."""

    reader: ClassVar[type[CIFAR10]]

    def load(self, root: Path) -> ImageData:
        place = self.locate(root)
        try:
            parts = [self.reader(str(place.parent), train=train, download=False) for train in (True, False)]
        except RuntimeError as error:
            raise FczooError(f"{self.name} in {place} is incomplete or corrupt (checksums differ); unpack {self.source} again") from error
        train, test = (Images(p.data, np.asarray(p.targets, np.int64)) for p in parts)
        return ImageData(train, test, tuple(parts[0].classes))
