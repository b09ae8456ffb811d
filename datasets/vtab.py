"""VTAB (Zhai et al., 2019) as class-incremental work cuts it: five sets of ten classes."""

from pathlib import Path

from fczoo.core.registry import register_dataset
from fczoo.data.dataset import Dataset, Defaults, ImageData, Official
from fczoo.data.folder_layout import read_folders


@register_dataset("vtab")
class VTAB(Dataset):
    """The subset of Zhou et al. (IJCV 2024), which LAMDA-PILOT and RanPAC use, too.

    1,796 training and 8,619 test images. The order of the folders is that of the classes: ten each
    of Resisc45, DTD, Pets, EuroSAT and Flowers, so each of the five tasks is one set. The MD5 of
    the archive is a9c37bde6105a2516c900b0c33a437c1 (LAMDA-CL/RevisitingCIL, issue 5).
    """

    classes = 50
    folder = "vtab"
    source = "vtab.zip (Google Drive or OneDrive, github.com/LAMDA-CL/LAMDA-PILOT)"
    layout = "vtab/{train,test}/CLASS/*"
    licence = "those of the five sets; for research"
    official = Official(1_796, 8_619)
    overlaps = {"tinyimagenet": "similar", "imagenet1k": "similar"}
    about = "VTAB, 50 classes of five sets, 1,796 training and 8,619 test images, kept at 256x256"
    defaults = Defaults(tasks=5, partition="dirichlet:1")

    def load(self, root: Path) -> ImageData:
        return read_folders(self.name, self.locate(root), 256)
