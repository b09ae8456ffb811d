"""OmniBenchmark (Zhang et al., ECCV 2022) as class-incremental work cuts it: 300 classes."""

from pathlib import Path

from fczoo.core.registry import register_dataset
from fczoo.data.dataset import Dataset, Defaults, ImageData, Official
from fczoo.data.folder_layout import read_folders


@register_dataset("omnibenchmark")
class OmniBenchmark(Dataset):
    """The subset of Zhou et al. (IJCV 2024), which LAMDA-PILOT and RanPAC use, too.

    89,697 training and 5,985 test images. Classes come in the order of their folders. The MD5 of
    the archive is f1c30808a707f9197c6c811ea52e5cbb (LAMDA-CL/RevisitingCIL, issue 5).
    """

    classes = 300
    folder = "omnibenchmark"
    source = "omnibenchmark.zip (Google Drive or OneDrive, github.com/LAMDA-CL/LAMDA-PILOT)"
    layout = "omnibenchmark/{train,test}/CLASS/*"
    licence = "its authors' terms: non-commercial research; the images belong to their makers"
    official = Official(89_697, 5_985)
    about = "OmniBenchmark, 300 classes, 89,697 training and 5,985 test images, kept at 256x256"
    defaults = Defaults(partition="dirichlet:1")

    def load(self, root: Path) -> ImageData:
        return read_folders(self.name, self.locate(root), 256)
