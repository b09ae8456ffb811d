"""CORe50 (Lomonaco and Maltoni, CoRL 2017): 50 objects, filmed in eleven sessions."""

from pathlib import Path

from fczoo.core.errors import FczooError
from fczoo.core.registry import register_dataset
from fczoo.data.dataset import Archive, Dataset, Defaults, ImageData, Official
from fczoo.data.image_files import class_folders, make_rows

CATEGORIES = (  # of five objects each
    *("plug adapter", "mobile phone", "scissors", "light bulb", "can"),
    *("glass", "ball", "marker", "cup", "remote control"),
)
TEST = (3, 7, 10)  # sessions of the official test part
URL = "http://bias.csr.unibo.it/maltoni/download/core50/core50_128x128.zip"


@register_dataset("core50")
class CORe50(Dataset):
    """119,894 training and 44,972 test images of 128x128 pixels, classified by object.

    Sessions 3, 7 and 10 are the test part, as in the paper. The group of an image, for
    ``--partition natural`` and ``domains``, is its session. The scenario NC (new classes) of the
    paper is ``--tasks 10,5,5,5,5,5,5,5,5``. The MD5 of the archive is the one that Avalanche uses.
    """

    classes = 50
    folder = "core50/core50_128x128"
    source = "core50_128x128.zip (vlomonaco.github.io/core50)"
    layout = "core50/core50_128x128/s{1..11}/o{1..50}/*.png"
    licence = "CC BY 4.0"
    official = Official(119_894, 44_972)
    archives = (Archive(URL, "745f3373fed08d69343f1058ee559e13", into="core50"),)
    overlaps = {"tinyimagenet": "similar", "imagenet1k": "similar"}
    about = "CORe50, 50 objects, 119,894 training and 44,972 test images, 128x128"
    defaults = Defaults(clients=8)

    def load(self, root: Path) -> ImageData:
        folder = self.locate(root)
        parts: dict[bool, list[tuple[str, int, int]]] = {False: [], True: []}
        for session in range(1, 12):
            files = class_folders(folder / f"s{session}")
            for label in range(self.classes):
                if (name := f"o{label + 1}") not in files:
                    problem = f"no folder {name} in {folder / f's{session}'}"
                    raise FczooError(f"{problem}; unpack {self.source} again")
                rows = [(f"s{session}/{file}", label, session) for file in files[name]]
                parts[session in TEST] += rows
        train, test = (make_rows(self.name, folder, rows, 128) for rows in parts.values())
        names = tuple(f"{name} {i}" for name in CATEGORIES for i in range(1, 6))
        return ImageData(train, test, names, "sessions 3, 7 and 10 for testing")
