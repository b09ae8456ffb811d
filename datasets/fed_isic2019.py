"""Fed-ISIC2019 (FLamby, Ogier du Terrail et al., NeurIPS 2022): skin lesions of six centres."""

import csv
from pathlib import Path

from fczoo.core.errors import FczooError
from fczoo.core.registry import register_dataset
from fczoo.data.dataset import Archive, Dataset, Defaults, ImageData, Official
from fczoo.data.folder_scan import read_list
from fczoo.data.image_files import make_rows

ISIC = "https://isic-challenge-data.s3.amazonaws.com/2019/ISIC_2019_Training_Input.zip"
FLAMBY = "https://raw.githubusercontent.com/owkin/FLamby/ed9c943f19236ec4dedb4a3bee30d9316d08e395"
SPLIT = "flamby/datasets/fed_isic2019/dataset_creation_scripts/train_test_split"
CLASSES = (
    *("melanoma", "melanocytic nevus", "basal cell carcinoma", "actinic keratosis"),
    *("benign keratosis", "dermatofibroma", "vascular lesion", "squamous cell carcinoma"),
)


@register_dataset("fed_isic2019")
class FedISIC2019(Dataset):
    """18,597 training and 4,650 test images of FLamby's list, which also names their centres.

    The group of an image, for ``--partition natural`` and ``domains``, is its centre. FLamby's
    colour constancy is not applied. No one publishes a checksum of the images; that of the list
    was taken from FLamby's repository.
    """

    classes = 8
    folder = "fed_isic2019"
    source = (
        "ISIC_2019_Training_Input.zip (challenge.isic-archive.com) and FLamby's train_test_split"
    )
    layout = "fed_isic2019/{ISIC_2019_Training_Input/*.jpg,train_test_split}"
    licence = "CC BY-NC 4.0; accept the terms of ISIC 2019 and HAM10000 first"
    official = Official(18_597, 4_650)
    archives = (
        Archive(ISIC, into="fed_isic2019"),
        Archive(f"{FLAMBY}/{SPLIT}", "f65e84dcd1e6b69edf55960899b22d81", into="fed_isic2019"),
    )
    about = "Fed-ISIC2019, 8 skin lesions in six centres, 18,597 training and 4,650 test images"
    defaults = Defaults(tasks=4, clients=6, partition="natural")

    def load(self, root: Path) -> ImageData:
        folder = self.locate(root)
        path = folder / "train_test_split"
        parts: dict[str, list[tuple[str, int, int]]] = {"train": [], "test": []}
        try:
            for row in csv.DictReader(read_list(path)):
                image = f"{row['image']}.jpg", int(row["target"]), int(row["center"])
                parts[row["fold"]].append(image)
        except (KeyError, ValueError, TypeError) as error:
            raise FczooError(f"{path} is damaged; get FLamby's train_test_split again") from error
        images = folder / "ISIC_2019_Training_Input"
        train, test = (make_rows(self.name, images, rows, 256) for rows in parts.values())
        return ImageData(train, test, CLASSES, "FLamby's list")
