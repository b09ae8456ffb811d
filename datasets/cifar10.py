"""CIFAR-10 (Krizhevsky, 2009), read by torchvision after its checksums matched."""

from torchvision.datasets import CIFAR10 as Reader

from fczoo.cifar import PickledCIFAR
from fczoo.data import Archive, Defaults, Official
from fczoo.registry import register_dataset


@register_dataset("cifar10")
class CIFAR10(PickledCIFAR):
    """50,000 training and 10,000 test images of 32x32 pixels in 10 classes."""

    classes = 10
    reader = Reader
    folder = Reader.base_folder
    source = "cifar-10-python.tar.gz (www.cs.toronto.edu/~kriz/cifar.html)"
    layout = "cifar-10-batches-py/{data_batch_1..5,test_batch,batches.meta}"
    licence = "none stated by its authors; for research, cite the technical report"
    official = Official(50_000, 10_000, 5_000, 1_000)
    archives = (Archive(Reader.url, Reader.tgz_md5, 170_498_071),)
    about = "CIFAR-10, 10 classes, 5,000 training and 1,000 test images each, 32x32"
    defaults = Defaults(tasks=5)
