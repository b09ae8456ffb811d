"""CIFAR-100 (Krizhevsky, 2009), read by torchvision after its checksums matched."""

from torchvision.datasets import CIFAR100 as Reader

from fczoo.cifar import PickledCIFAR
from fczoo.data import Archive, Defaults, Official
from fczoo.registry import register_dataset


@register_dataset("cifar100")
class CIFAR100(PickledCIFAR):
    """50,000 training and 10,000 test images of 32x32 pixels in 100 classes."""

    classes = 100
    reader = Reader
    folder = Reader.base_folder
    source = "cifar-100-python.tar.gz (www.cs.toronto.edu/~kriz/cifar.html)"
    layout = "cifar-100-python/{train,test,meta}"
    licence = "none stated by its authors; for research, cite the technical report"
    official = Official(50_000, 10_000, 500, 100)
    archives = (Archive(Reader.url, Reader.tgz_md5, 169_001_437),)
    about = "CIFAR-100, 100 classes, 500 training and 100 test images each, 32x32"
    defaults = Defaults()
