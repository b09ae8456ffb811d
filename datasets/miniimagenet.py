"""Mini-ImageNet (Vinyals et al., 2016), split within its classes as class-incremental work does."""

from pathlib import Path

from fczoo.core.registry import register_dataset
from fczoo.data.dataset import Dataset, Defaults, ImageData, Official
from fczoo.data.folder_layout import read_folders


@register_dataset("miniimagenet")
class MiniImageNet(Dataset):
    """100 classes of 600 images, kept at 84x84; FCILPT trains on 500 and tests on 100 images of each.

    ``val`` or ``test`` beside ``train`` is the test part and must have the same classes (the few-shot
    split by classes has not). Class folders without that division are split by the seeded rule of
    ``imagenet_r``, a fifth of each class for testing, or by a list ``test.txt``. From a copy at full
    resolution take ``--stored-size 224``.
    """

    classes = 100
    folder = "mini-imagenet"
    source = (
        "a copy made from ImageNet-1k (image-net.org; its terms forbid redistribution, "
        "so there is no official archive)"
    )
    layout = "mini-imagenet/{train,val}/CLASS/*.jpg, or mini-imagenet/CLASS/*.jpg"
    licence = "ImageNet's terms: non-commercial research and education"
    official = Official(50_000, 10_000, 500, 100)
    overlaps = {"tinyimagenet": "some", "imagenet1k": "all"}  # 25 of 100 in Tiny-ImageNet
    about = "Mini-ImageNet, 100 classes, 500 training and 100 test images each, 84x84"
    defaults = Defaults()

    def load(self, root: Path) -> ImageData:
        return read_folders(self.name, self.locate(root), 84)
