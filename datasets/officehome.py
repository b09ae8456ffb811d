"""Office-Home (Venkateswara et al., CVPR 2017): 65 kinds of objects in four domains."""

from pathlib import Path

from fczoo.core.errors import FczooError
from fczoo.core.registry import register_dataset
from fczoo.data.dataset import Dataset, Defaults, ImageData, Official
from fczoo.data.folder_layout import choose_test_images
from fczoo.data.image_files import class_folders, make_rows


@register_dataset("officehome")
class OfficeHome(Dataset):
    """15,588 images of art, clip art, products and photographs, published without a split.

    Here: a fifth of every class of every domain for testing, by the rule of ``imagenet_r``.
    ``--tasks domains`` makes every domain a task.
    """

    classes = 65
    domains = ("Art", "Clipart", "Product", "Real World")
    folder = "OfficeHomeDataset_10072016"
    source = "OfficeHomeDataset_10072016.zip (Google Drive, hemanthdv.org/officeHomeDataset.html)"
    layout = "OfficeHomeDataset_10072016/{Art,Clipart,Product,Real World}/CLASS/*.jpg"
    licence = "its authors' terms: non-commercial research and education"
    official = Official(12_471, 3_117)
    overlaps = {"tinyimagenet": "similar", "imagenet1k": "similar"}
    about = (
        "Office-Home, 65 classes in four domains, 12,471 training and 3,117 test images, 256x256"
    )
    defaults = Defaults(tasks=5, clients=4)

    def load(self, root: Path) -> ImageData:
        folder, first = self.locate(root), self.domains[0]
        classes = sorted(class_folders(folder / first))
        parts: dict[bool, list[tuple[str, int, int]]] = {False: [], True: []}
        for number, domain in enumerate(self.domains):
            files = class_folders(folder / domain)
            if different := sorted(files.keys() ^ set(classes)):
                problem = f"{folder / domain} and {folder / first} have different classes"
                raise FczooError(f"{problem}, such as {different[0]}; unpack {self.source} again")
            test = choose_test_images(files, 0)
            for label, name in enumerate(classes):
                for image in files[name]:
                    parts[image in test].append((f"{domain}/{image}", label, number))
        train_part, test_part = (make_rows(self.name, folder, r, 256) for r in parts.values())
        names = tuple(name.replace("_", " ") for name in classes)
        split = "a fifth of every class of every domain by sha256, seed 0"
        return ImageData(train_part, test_part, names, split)
