"""Stanford Cars (Krause et al., 2013): 196 car models, with the official split."""

from pathlib import Path

import numpy as np

from fczoo.core.errors import FczooError, first_line
from fczoo.core.registry import register_dataset
from fczoo.data.dataset import Dataset, Defaults, ImageData, Official
from fczoo.data.folder_layout import find_parts, read_folders
from fczoo.data.image_files import ImageFiles

ANNOTATIONS = {
    "cars_train": "devkit/cars_train_annos.mat",
    "cars_test": "cars_test_annos_withlabels.mat",
}


@register_dataset("cars196")
class Cars196(Dataset):
    """8,144 training and 8,041 test images; whole images, bounding boxes are not used.

    Without ``devkit``, images are read from ``train/CLASS/*`` and ``test/CLASS/*``.
    """

    classes = 196
    folder = "stanford_cars"
    source = (
        "a copy of Stanford Cars (its page ai.stanford.edu/~jkrause/cars/car_dataset.html is gone, "
        "so no official archive exists)"
    )
    layout = (
        "stanford_cars/{cars_train/*.jpg,cars_test/*.jpg,devkit/{cars_meta,cars_train_annos}.mat,"
        "cars_test_annos_withlabels.mat}"
    )
    licence = "ImageNet's terms: non-commercial research and education"
    official = Official(8_144, 8_041)
    about = "Stanford Cars, 196 classes, 8,144 training and 8,041 test images, kept at 256x256"
    defaults = Defaults(partition="dirichlet:1")

    def load(self, root: Path) -> ImageData:
        folder, parts = self.locate(root), []
        if not (folder / "devkit").is_dir() and find_parts(folder):
            return read_folders(self.name, folder, 256)
        from scipy.io import loadmat  # takes a second

        try:
            for images, annotations in ANNOTATIONS.items():
                content = loadmat(folder / annotations, squeeze_me=True)
                rows = np.atleast_1d(content["annotations"])
                names = tuple(f"{images}/{name}" for name in rows["fname"])
                labels = rows["class"].astype(np.int64) - 1  # they count from 1
                parts.append(ImageFiles(self.name, folder, names, labels, 256))
            meta = loadmat(folder / "devkit/cars_meta.mat", squeeze_me=True)
            classes = tuple(map(str, meta["class_names"]))
        except Exception as error:  # scipy's reader raises errors of many kinds
            reason = first_line(error)
            problem = f"Stanford Cars in {folder} is incomplete or has another layout ({reason})"
            raise FczooError(f"{problem}; expected: {self.layout}") from error
        return ImageData(parts[0], parts[1], classes)
