"""Any images of your own, one folder per class."""

from pathlib import Path

from fczoo.core.errors import FczooError
from fczoo.core.registry import register_dataset
from fczoo.data.dataset import Dataset, Defaults, ImageData
from fczoo.data.folder_layout import read_folders, read_groups
from fczoo.data.image_files import ImageFiles, turned_upright


@register_dataset("imagefolder")
class ImageFolder(Dataset):
    """``--data-root DIR`` with ``train/CLASS/*`` and ``test/CLASS/*``, or just ``CLASS/*``.

    ``test`` may be called ``val``, ``valid``, ``validation`` or ``dev``, in any capitals. Without
    that division, a file ``DIR/test.txt`` lists the test images, one ``CLASS/FILE`` per line;
    without the file they are a fifth of every class, by the rule of ``imagenet_r``. Images in
    subfolders of a class folder belong to the class. Images are turned by their orientation tags,
    and stored at 256x256, or ``--stored-size``.

    The hospital, writer or user of each image, for ``--partition natural`` and ``domains``, is the
    column ``group`` of ``DIR/groups.csv``, whose column ``file`` has paths below DIR, or, if all
    training images are in ``CLASS/GROUP/*``, the name of the subfolder GROUP.
    """

    classes = 0
    source = "any folder of class folders, given with --data-root"
    layout = "DIR/{train,test}/CLASS/*, or DIR/CLASS/*"
    about = "your own images: --data-root DIR with train/CLASS/* and test/CLASS/*, or CLASS/*"
    defaults = Defaults(tasks=5, clients=5)

    def locate(self, root: Path) -> Path:
        if not root.is_dir():
            raise FczooError(
                f"no folder {root}; give --data-root a folder that contains the class folders"
            )
        return root

    def load(self, root: Path) -> ImageData:
        data = turned_upright(read_folders(self.name, self.locate(root), 256))
        assert isinstance(data.train, ImageFiles)
        return data._replace(groups=read_groups(root, data.train))
