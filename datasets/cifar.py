"""CIFAR-10 and CIFAR-100 (Krizhevsky, 2009), Python version.

They are pickles; torchvision opens them only when their checksums match.
"""

from pathlib import Path
from typing import ClassVar

import numpy as np

from fczoo.core.errors import FczooError
from fczoo.core.registry import register_dataset
from fczoo.data.dataset import Archive, Dataset, Defaults, ImageData, Images, Official
from fczoo.data.folder_layout import read_folders

HOME = "https://www.cs.toronto.edu/~kriz"


class PickledCIFAR(Dataset):
    """A CIFAR data set as ``reader`` finds it, or in ``train/CLASS/*`` and ``test/CLASS/*``."""

    reader: ClassVar[str]  # torchvision's class
    overlaps = {"tinyimagenet": "similar", "imagenet1k": "similar"}
    licence = "none stated by its authors; for research, cite the technical report"

    def load(self, root: Path) -> ImageData:
        from torchvision import datasets  # takes a second

        folder, reader = self.locate(root), getattr(datasets, self.reader)
        if (folder / "train").is_dir():  # the official order of classes is alphabetical, too
            return read_folders(self.name, folder, 32)
        try:
            parts = [
                reader(str(folder.parent), train=train, download=False) for train in (True, False)
            ]
        except RuntimeError as error:
            problem = f"{self.name} in {folder} is incomplete or corrupt (checksums differ)"
            raise FczooError(f"{problem}; unpack {self.source} again") from error
        train, test = (Images(p.data, np.asarray(p.targets, np.int64)) for p in parts)
        return ImageData(train, test, tuple(parts[0].classes))


@register_dataset("cifar10")
class CIFAR10(PickledCIFAR):
    """50,000 training and 10,000 test images of 32x32 pixels in 10 classes."""

    classes = 10
    reader = "CIFAR10"
    folder = "cifar-10-batches-py"
    source = f"cifar-10-python.tar.gz ({HOME}/cifar.html)"
    layout = "cifar-10-batches-py/{data_batch_1..5,test_batch,batches.meta}"
    official = Official(50_000, 10_000, 5_000, 1_000)
    archives = (
        Archive(
            f"{HOME}/cifar-10-python.tar.gz",
            "c58f30108f718f92721af3b95e74349a",
            170_498_071,
            sha256="6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
        ),
    )
    about = "CIFAR-10, 10 classes, 5,000 training and 1,000 test images each, 32x32"
    defaults = Defaults(tasks=5)


@register_dataset("cifar100")
class CIFAR100(PickledCIFAR):
    """50,000 training and 10,000 test images of 32x32 pixels in 100 classes."""

    classes = 100
    reader = "CIFAR100"
    folder = "cifar-100-python"
    source = f"cifar-100-python.tar.gz ({HOME}/cifar.html)"
    layout = "cifar-100-python/{train,test,meta}"
    official = Official(50_000, 10_000, 500, 100)
    archives = (
        Archive(
            f"{HOME}/cifar-100-python.tar.gz",
            "eb9058c3a382ffc7106e4002c42a8d85",
            169_001_437,
            sha256="85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
        ),
    )
    about = "CIFAR-100, 100 classes, 500 training and 100 test images each, 32x32"
    defaults = Defaults()
