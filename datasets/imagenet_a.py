"""ImageNet-A (Hendrycks et al., 2021): natural images that mislead classifiers.

They belong to 200 ImageNet classes.
"""

from pathlib import Path

from fczoo.core.registry import register_dataset
from fczoo.data.dataset import Archive, Dataset, Defaults, ImageData, Official
from fczoo.data.folder_layout import read_folders
from fczoo.data.folder_scan import class_names


@register_dataset("imagenet_a")
class ImageNetA(Dataset):
    """7,500 images in one folder, published as a test set only.

    Class-incremental papers divide it in different ways. Here: the rule of ``imagenet_r``, a fifth
    of every class for testing (6,000 and 1,500 images), or the list ``test.txt``. The authors
    publish no checksum; fczoo checks the MD5 that many independent loaders check.
    """

    classes = 200
    folder = "imagenet-a"
    source = "imagenet-a.tar (github.com/hendrycks/natural-adv-examples)"
    layout = "imagenet-a/CLASS/*.jpg"
    licence = "MIT for the collection; the images belong to their makers and are for research only"
    official = Official(6_000, 1_500)
    archives = (
        Archive(
            "https://people.eecs.berkeley.edu/~hendrycks/imagenet-a.tar",
            "c3e55429088dc681f30d81f4726b6595",
        ),
    )
    overlaps = {"tinyimagenet": "some", "imagenet1k": "all"}  # 74 of 200 in Tiny-ImageNet
    about = "ImageNet-A, 200 classes, 6,000 training and 1,500 test images, kept at 256x256"
    defaults = Defaults(partition="dirichlet:1")

    def load(self, root: Path) -> ImageData:
        folder = self.locate(root)
        data = read_folders(self.name, folder, 256)
        return data._replace(classes=class_names(data.classes, folder / "README.txt"))
