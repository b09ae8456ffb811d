"""CIFAR-100 (Krizhevsky, 2009), read by torchvision after its checksums matched."""

from pathlib import Path

import numpy as np
from torchvision.datasets import CIFAR100 as Reader

from fczoo.data import Dataset, Defaults, ImageData, Images
from fczoo.errors import FczooError
from fczoo.registry import register_dataset


@register_dataset("cifar100")
class CIFAR100(Dataset):
    """50,000 training and 10,000 test images of 32x32 pixels in 100 classes."""

    classes = 100
    folder = Reader.base_folder
    source = "cifar-100-python.tar.gz (www.cs.toronto.edu/~kriz/cifar.html)"
    about = "CIFAR-100, 100 classes, 500 training and 100 test images each, 32x32"
    defaults = Defaults(
        "vit_tiny_patch16_224.augreg_in21k_ft_in1k",
        tasks=10, clients=10, partition="dirichlet:0.5", rounds=5, epochs=5, batch_size=16, augment="crop",
    )  # fmt: skip

    def load(self, root: Path) -> ImageData:
        place = self.locate(root)
        try:
            parts = [Reader(str(place.parent), train=train, download=False) for train in (True, False)]
        except RuntimeError as error:
            raise FczooError(f"CIFAR-100 in {place} is incomplete or corrupt (checksums differ); unpack {self.source} again") from error
        train, test = (Images(p.data, np.asarray(p.targets, np.int64)) for p in parts)
        return ImageData(train, test, tuple(parts[0].classes))
