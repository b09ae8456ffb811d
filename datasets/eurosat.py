"""EuroSAT (Helber et al., 2019): land use on Sentinel-2 images, RGB."""

from pathlib import Path

from fczoo.core.registry import register_dataset
from fczoo.data.dataset import Archive, Dataset, Defaults, ImageData, Official
from fczoo.data.folder_layout import read_folders


@register_dataset("eurosat")
class EuroSAT(Dataset):
    """27,000 images of 64x64 pixels in 10 classes, published without a split.

    Here: the rule of ``imagenet_r``, a fifth of every class for testing (21,600 and 5,400 images),
    or the images in a list ``test.txt`` in the folder. Address and MD5 of the archive are
    torchvision's.
    """

    classes = 10
    folder = "eurosat/2750"
    source = "EuroSAT.zip (github.com/phelber/eurosat)"
    layout = "eurosat/2750/CLASS/*.jpg"
    licence = "MIT; Copernicus Sentinel data"
    official = Official(21_600, 5_400)
    archives = (
        Archive(
            "https://huggingface.co/datasets/torchgeo/eurosat/resolve/c877bcd43f099cd0196738f714544e355477f3fd/EuroSAT.zip",
            "c8fa014336c82ac7804f0398fcb19387",
            into="eurosat",
        ),
    )
    about = "EuroSAT, 10 kinds of land use, 21,600 training and 5,400 test images, 64x64"
    defaults = Defaults(tasks=5, partition="dirichlet:1")

    def load(self, root: Path) -> ImageData:
        return read_folders(self.name, self.locate(root), 64)
