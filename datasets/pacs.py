"""PACS (Li et al., ICCV 2017): seven kinds of things in four domains, with the official lists."""

from pathlib import Path

from fczoo.core.errors import FczooError
from fczoo.core.registry import register_dataset
from fczoo.data.dataset import Dataset, Defaults, ImageData, Official
from fczoo.data.folder_scan import normalise_path, read_list
from fczoo.data.image_files import make_rows


@register_dataset("pacs")
class PACS(Dataset):
    """9,991 art paintings, cartoons, photographs and sketches.

    Training images are those of the lists ``DOMAIN_train_kfold.txt``, test images those of
    ``DOMAIN_crossval_kfold.txt``; classes are the folders, not the numbers of the lists.
    ``--tasks domains`` makes every domain a task.
    """

    classes = 7
    domains = ("art_painting", "cartoon", "photo", "sketch")
    folder = "PACS"
    source = "the images (folder kfold) and the lists of PACS (Google Drive, dali-dl.github.io)"
    layout = "PACS/{kfold/DOMAIN/CLASS/*,DOMAIN_{train,crossval}_kfold.txt}"
    licence = "not stated by its authors; for research"
    official = Official(8_977, 1_014)
    overlaps = {"tinyimagenet": "similar", "imagenet1k": "similar"}
    about = "PACS, 7 classes in four domains, 8,977 training and 1,014 test images, kept at 256x256"
    defaults = Defaults(tasks=3, clients=4)

    def load(self, root: Path) -> ImageData:
        folder = self.locate(root)
        train, test = (self._images(folder, part) for part in ("train", "crossval"))
        classes = sorted({name.split("/")[1] for name, _ in train})
        label = {name: number for number, name in enumerate(classes)}
        if unknown := [name for name, _ in test if name.split("/")[1] not in label]:
            problem = f"the training lists in {folder} lack the class of {unknown[0]}"
            raise FczooError(f"{problem}; get {self.source} again")
        parts = []
        for images in (train, test):
            rows = [(name, label[name.split("/")[1]], domain) for name, domain in images]
            parts.append(make_rows(self.name, folder / "kfold", rows, 256))
        return ImageData(parts[0], parts[1], tuple(classes), "official lists")

    def _images(self, folder: Path, part: str) -> list[tuple[str, int]]:
        """Return name and domain of the images of a part."""
        images = []
        for number, domain in enumerate(self.domains):
            path = folder / f"{domain}_{part}_kfold.txt"
            for line in read_list(path):
                name = normalise_path(line.rpartition(" ")[0], path)
                if name.count("/") != 2 or not name.startswith(f"{domain}/"):
                    problem = (
                        f"{path} has the line {line[:80]!r}, expected {domain}/CLASS/FILE NUMBER"
                    )
                    raise FczooError(f"{problem}; get {self.source} again")
                images.append((name, number))
        return images
