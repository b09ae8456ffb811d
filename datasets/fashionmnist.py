"""Fashion-MNIST (Xiao et al., 2017), read by torchvision: ten kinds of clothes, for quick work."""

from pathlib import Path

import numpy as np

from fczoo.core.errors import FczooError
from fczoo.core.registry import register_dataset
from fczoo.data.dataset import Archive, Dataset, Defaults, ImageData, Images, Official

MIRROR = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
FILES = (  # MD5, bytes, SHA-256
    (
        "train-images-idx3-ubyte.gz",
        "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        26_421_880,
        "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
    ),
    (
        "train-labels-idx1-ubyte.gz",
        "25c81989df183df01b3e8a0aad5dffbe",
        29_515,
        "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
    ),
    (
        "t10k-images-idx3-ubyte.gz",
        "bef4ecab320f06d8554ea6380940ec79",
        4_422_102,
        "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
    ),
    (
        "t10k-labels-idx1-ubyte.gz",
        "bb300cfdad3c16e7a12a480ee83cd310",
        5_148,
        "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    ),
)


@register_dataset("fashionmnist")
class FashionMNIST(Dataset):
    """60,000 training and 10,000 test images in 10 classes.

    They have 28x28 grey pixels, in three equal channels.
    """

    classes = 10
    folder = "FashionMNIST/raw"
    source = "the four ubyte.gz files (github.com/zalandoresearch/fashion-mnist)"
    layout = "FashionMNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte, unpacked"
    licence = "MIT"
    official = Official(60_000, 10_000, 6_000, 1_000)
    archives = tuple(
        Archive(MIRROR + name, md5, size, "FashionMNIST/raw", sha256)
        for name, md5, size, sha256 in FILES
    )
    about = "Fashion-MNIST, 10 classes, 6,000 training and 1,000 test images each, 28x28 grey"
    defaults = Defaults(
        "vit_nano_32",
        tasks=5,
        clients=5,
        partition="dirichlet:0.5",
        rounds=3,
        epochs=2,
        batch_size=16,
        augment="none",
    )

    def load(self, root: Path) -> ImageData:
        from torchvision.datasets import FashionMNIST as Reader  # takes a second

        folder = self.locate(root)
        try:
            train, test = (_images(folder, part) for part in ("train", "t10k"))
        except (RuntimeError, ValueError, TypeError, LookupError, AssertionError, OSError) as error:
            problem = f"Fashion-MNIST in {folder} is incomplete or corrupt"
            raise FczooError(f"{problem}; unpack {self.source} again") from error
        return ImageData(train, test, tuple(Reader.classes))


def _images(folder: Path, part: str) -> Images:
    """Return the images of one part.

    torchvision's class would take tensors of an older version where it finds some.
    """
    from torchvision.datasets.mnist import read_image_file, read_label_file

    pixels = read_image_file(str(folder / f"{part}-images-idx3-ubyte")).numpy()
    labels = read_label_file(str(folder / f"{part}-labels-idx1-ubyte")).numpy()
    if len(pixels) != len(labels):
        raise ValueError(f"{len(pixels)} images and {len(labels)} labels")
    return Images(np.repeat(pixels[..., None], 3, -1), labels)
