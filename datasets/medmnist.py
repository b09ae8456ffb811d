"""MedMNIST v2 (Yang et al., 2023): sets of medical images at 28x28 pixels, with official splits."""

from functools import cache
from pathlib import Path

import numpy as np

from fczoo.core.errors import FczooError
from fczoo.core.registry import register_dataset
from fczoo.data.dataset import Archive, Dataset, Defaults, ImageData, Images, Official

SETS = {  # MD5 of the file, training and test images, classes; as version 3 of medmnist has them
    "pathmnist": ("a8b06965200029087d5bd730944a56c1", 89_996, 7_180, 9),
    "dermamnist": ("0744692d530f8e62ec473284d019b0c7", 7_007, 2_005, 7),
    "bloodmnist": ("7053d0359d879ad8a5505303e11de1dc", 11_959, 3_421, 8),
    "tissuemnist": ("ebe78ee8b05294063de985d821c1c34b", 165_466, 47_280, 8),
    "organamnist": ("68e3f8846a6bd62f0c9bf841c0d9eacc", 34_561, 17_778, 11),
    "organcmnist": ("b9ceb9546e10131b32923c5bbeaea2b1", 12_975, 8_216, 11),
    "organsmnist": ("9ab87b696fb54e2a387ebe992d6ed5f1", 13_932, 8_827, 11),
}
HOME = "https://zenodo.org/records/10519652/files"


@register_dataset("medmnist")
class MedMNIST(Dataset):
    """Seven sets of MedMNIST, named ``medmnist:NAME``; validation images are left out."""

    classes = 0
    source = f"NAME.npz ({HOME})"
    layout = "NAME/NAME.npz"
    licence = "CC BY 4.0; dermamnist CC BY-NC 4.0"
    about = f"seven sets of MedMNIST, 7 to 11 classes, 28x28: {', '.join(SETS)}"
    defaults = Defaults("vit_nano_32", tasks=4, clients=5, rounds=3, epochs=2, augment="none")

    @classmethod
    @cache
    def select(cls, name: str) -> type[Dataset]:
        """Return the data set ``medmnist:NAME``."""
        if (key := name.lower()) not in SETS:
            raise FczooError(f"no set of MedMNIST is called {name!r}; known: {', '.join(SETS)}")
        md5, train, test, classes = SETS[key]
        archives, official = (Archive(f"{HOME}/{key}.npz", md5, into=key),), Official(train, test)
        return cls.variant(key, folder=key, classes=classes, archives=archives, official=official)

    def load(self, root: Path) -> ImageData:
        if not self.folder:
            raise FczooError(f"name one set of MedMNIST: medmnist:{', medmnist:'.join(SETS)}")
        file = self.locate(root) / f"{self.folder}.npz"
        parts = []
        try:
            with np.load(file, allow_pickle=False) as data:
                for part in ("train", "test"):
                    pixels, labels = data[f"{part}_images"], data[f"{part}_labels"]
                    pixels = pixels.reshape(*pixels.shape[:3], -1)  # grey or RGB
                    pixels = np.repeat(pixels, 3 // pixels.shape[3], 3)
                    parts.append(Images(pixels, labels.astype(np.int64).ravel()))
        except Exception as error:  # numpy's reader raises errors of many kinds
            raise FczooError(f"{file} is missing or corrupt; get {self.source}") from error
        return ImageData(parts[0], parts[1], tuple(map(str, range(self.classes))))
