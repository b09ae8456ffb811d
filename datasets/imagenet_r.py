"""ImageNet-R (Hendrycks et al., 2021): renditions of 200 ImageNet classes."""

from pathlib import Path

from fczoo.core.registry import register_dataset
from fczoo.data.dataset import Archive, Dataset, Defaults, ImageData, Official
from fczoo.data.folder_layout import read_folders
from fczoo.data.folder_scan import class_names


@register_dataset("imagenet_r")
class ImageNetR(Dataset):
    """30,000 images in one folder, divided into 24,000 training and 6,000 test images.

    Papers use these numbers, but each draws its own split. Here a fifth of every class is the test
    part: the images whose sha256 of ``0:CLASS/FILE`` comes first (0 is the seed). To use another
    paper's split, list its test images in ``imagenet-r/test.txt``, one ``CLASS/FILE`` per line. The
    authors publish no checksum; fczoo checks the MD5 that many independent loaders check.
    """

    classes = 200
    folder = "imagenet-r"
    source = "imagenet-r.tar (github.com/hendrycks/imagenet-r)"
    layout = "imagenet-r/CLASS/*.jpg"
    licence = "MIT for the collection; the images belong to their makers and are for research only"
    official = Official(24_000, 6_000)
    archives = (
        Archive(
            "https://people.eecs.berkeley.edu/~hendrycks/imagenet-r.tar",
            "a61312130a589d0ca1a8fca1f2bd3337",
            2_191_079_936,
        ),
    )
    overlaps = {"tinyimagenet": "some", "imagenet1k": "all"}  # 62 of 200 in Tiny-ImageNet
    about = "ImageNet-R, 200 classes, 24,000 training and 6,000 test images, kept at 256x256"
    defaults = Defaults()

    def load(self, root: Path) -> ImageData:
        folder = self.locate(root)
        data = read_folders(self.name, folder, 256)
        return data._replace(classes=class_names(data.classes, folder / "README.txt"))
