"""SVHN (Netzer et al., 2011): house numbers of street views, cropped to single digits."""

from pathlib import Path

import numpy as np

from fczoo.core.errors import FczooError
from fczoo.core.registry import register_dataset
from fczoo.data.dataset import Archive, Dataset, Defaults, ImageData, Images, Official

HOME = "http://ufldl.stanford.edu/housenumbers"


@register_dataset("svhn")
class SVHN(Dataset):
    """73,257 training and 26,032 test images of 32x32 pixels; the extra images are not used.

    The files give the digit 0 the label 10; here it is class 0. Addresses and MD5s are
    torchvision's.
    """

    classes = 10
    folder = "svhn"
    source = f"train_32x32.mat and test_32x32.mat ({HOME}/)"
    layout = "svhn/{train,test}_32x32.mat"
    licence = "its authors' terms: non-commercial use"
    official = Official(73_257, 26_032)
    archives = (
        Archive(f"{HOME}/train_32x32.mat", "e26dedcc434d2e4c54c9b2d4a06d8373", into="svhn"),
        Archive(f"{HOME}/test_32x32.mat", "eb5a983be6a315427106f1b164d9cef3", into="svhn"),
    )
    about = "SVHN, 10 digits, 73,257 training and 26,032 test images, 32x32"
    defaults = Defaults(tasks=5)

    def load(self, root: Path) -> ImageData:
        folder = self.locate(root)
        try:
            train, test = (_images(folder / f"{part}_32x32.mat") for part in ("train", "test"))
        except Exception as error:  # scipy's reader raises errors of many kinds
            problem = f"SVHN in {folder} is incomplete or corrupt"
            raise FczooError(f"{problem}; get {self.source} again") from error
        return ImageData(train, test, tuple("0123456789"))


def _images(file: Path) -> Images:
    from scipy.io import loadmat  # takes a second

    data = loadmat(file, variable_names=["X", "y"])
    labels = data["y"].astype(np.int64).ravel() % 10
    return Images(np.ascontiguousarray(data["X"].transpose(3, 0, 1, 2)), labels)
