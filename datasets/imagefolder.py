"""Any images of your own, one folder a class."""

from pathlib import Path

from fczoo.core.errors import FczooError
from fczoo.core.registry import register_dataset
from fczoo.data.dataset import Dataset, Defaults, ImageData
from fczoo.data.image_files import one_folder, two_folders


@register_dataset("imagefolder")
class ImageFolder(Dataset):
    """``--data-root DIR`` with ``train/CLASS/*`` and ``test/CLASS/*`` (or ``val``), or just ``CLASS/*``.

    Without that division a fifth of every class is the test part by the rule of ``imagenet_r``, or what a
    list ``test.txt`` in the folder names, one ``CLASS/FILE`` a line. Images are kept at 256x256, or
    ``--stored-size``.
    """

    classes = 0
    source = "any folder of class folders, given with --data-root"
    layout = "DIR/{train,test}/CLASS/*, or DIR/CLASS/*"
    about = "your own images: --data-root DIR with train/CLASS/* and test/CLASS/*, or CLASS/*"
    defaults = Defaults(tasks=5, clients=5)

    def locate(self, root: Path) -> Path:
        if not root.is_dir():
            raise FczooError(f"no folder {root}; give the one that holds the class folders with --data-root")
        return root

    def load(self, root: Path) -> ImageData:
        folder = self.locate(root)
        for test in ("test", "val"):
            if (folder / "train").is_dir() and (folder / test).is_dir():
                return two_folders(self.name, folder / "train", folder / test, 256)
        return one_folder(self.name, folder, 256)
