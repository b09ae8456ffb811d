"""EMNIST (Cohen et al., 2017): handwritten digits and letters; no file names their writers."""

import gzip
from functools import cache
from pathlib import Path

import numpy as np

from fczoo.core.errors import FczooError
from fczoo.core.registry import register_dataset
from fczoo.data.dataset import Archive, Dataset, Defaults, ImageData, Images, Official

BALANCED = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabdefghnqrt"  # other lower-case letters look alike
SPLITS = {
    "balanced": (BALANCED, Official(112_800, 18_800, 2_400, 400)),
    "letters": ("abcdefghijklmnopqrstuvwxyz", Official(124_800, 20_800, 4_800, 800)),
}
URL = "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip"  # address and MD5 are torchvision's


@register_dataset("emnist")
class EMNIST(Dataset):
    """47 classes (``balanced``), or 26 letters, each in both cases (``emnist:letters``);
    upright."""

    classes = 47
    folder = "EMNIST"
    source = "gzip.zip (nist.gov/itl/products-and-services/emnist-dataset)"
    layout = "EMNIST/gzip/emnist-SPLIT-{train,test}-{images-idx3,labels-idx1}-ubyte.gz"
    licence = "public domain (NIST)"
    official = SPLITS["balanced"][1]
    archives = (Archive(URL, "58c8d27c78d21e728a6bc7b3cc06412e", into="EMNIST"),)
    about = "EMNIST, 47 digits and letters, 2,400 training and 400 test images each, 28x28 grey"
    defaults = Defaults("vit_nano_32", rounds=3, epochs=2, augment="none")

    @classmethod
    @cache
    def select(cls, split: str) -> type[Dataset]:
        """Return the data set ``emnist:SPLIT``."""
        if split not in SPLITS:
            raise FczooError(f"no split of EMNIST is called {split!r}; known: {', '.join(SPLITS)}")
        return cls.variant(split, classes=len(SPLITS[split][0]), official=SPLITS[split][1])

    def load(self, root: Path) -> ImageData:
        folder, split = self.locate(root), self.name.partition(":")[2] or "balanced"
        try:
            train, test = (_images(folder / "gzip", split, part) for part in ("train", "test"))
        except Exception as error:  # damaged files raise errors of many kinds
            raise FczooError(
                f"{folder} is incomplete or corrupt; unpack {self.source} again"
            ) from error
        return ImageData(train, test, tuple(SPLITS[split][0]))


def _images(folder: Path, split: str, part: str) -> Images:
    files = (folder / f"emnist-{split}-{part}-{k}-ubyte.gz" for k in ("images-idx3", "labels-idx1"))
    pixels, labels = (np.frombuffer(gzip.decompress(f.read_bytes()), np.uint8) for f in files)
    classes = labels[8:].astype(np.int64) - (split == "letters")  # after the header; letters from 1
    upright = pixels[16:].reshape(len(classes), 28, 28, 1).swapaxes(1, 2)  # stored transposed
    return Images(np.repeat(upright, 3, -1), classes)
