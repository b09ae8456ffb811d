"""ObjectNet (Barbu et al., NeurIPS 2019) as class-incremental work cuts it: 200 classes."""

from pathlib import Path

from fczoo.core.registry import register_dataset
from fczoo.data.dataset import Dataset, Defaults, ImageData, Official
from fczoo.data.folder_layout import read_folders


@register_dataset("objectnet")
class ObjectNet(Dataset):
    """The subset of Zhou et al. (IJCV 2024), which LAMDA-PILOT uses, too.

    26,509 training and 6,628 test images. Classes come in the order of their folders. The authors
    of ObjectNet publish it for tests only; the division is that of Zhou et al. The MD5 of their
    archive is 63ff7443a47bd682016a8ec59b8cc1bc (LAMDA-CL/RevisitingCIL, issue 5).
    """

    classes = 200
    folder = "objectnet"
    source = "objnet.tgz (OneDrive, github.com/LAMDA-CL/LAMDA-PILOT)"
    layout = "objectnet/{train,test}/CLASS/*"
    licence = "ObjectNet's (objectnet.dev): it may not be used to tune the parameters of a model"
    official = Official(26_509, 6_628)
    overlaps = {"imagenet1k": "some"}
    about = "ObjectNet, 200 classes, 26,509 training and 6,628 test images, kept at 256x256"
    defaults = Defaults(partition="dirichlet:1")

    def load(self, root: Path) -> ImageData:
        return read_folders(self.name, self.locate(root), 256)
