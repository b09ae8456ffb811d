"""Stanford Cars (Krause et al., 2013): 196 car models, with the official split.

torchvision lists the images.
"""

from pathlib import Path

import numpy as np

from fczoo.core.errors import FczooError
from fczoo.core.registry import register_dataset
from fczoo.data.dataset import Dataset, Defaults, ImageData, Official
from fczoo.data.folder_layout import find_parts, read_folders
from fczoo.data.image_files import ImageFiles


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
        from torchvision.datasets import StanfordCars as Reader  # takes a second

        try:
            for split in ("train", "test"):
                # str: paths instead of images
                reader = Reader(str(folder.parent), split, loader=str)
                paths, numbers = zip(*(reader[i] for i in range(len(reader))), strict=True)
                names = tuple(Path(path).relative_to(folder).as_posix() for path in paths)
                labels = np.array([int(number) for number in numbers], np.int64)
                parts.append(ImageFiles(self.name, folder, names, labels, 256))
            classes = tuple(map(str, reader.classes))
        except (RuntimeError, OSError, ValueError, KeyError, IndexError, TypeError) as error:
            problem = f"Stanford Cars in {folder} is incomplete or has another layout ({error})"
            raise FczooError(f"{problem}; expected: {self.layout}") from error
        return ImageData(parts[0], parts[1], classes)
