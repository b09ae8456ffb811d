"""DomainNet (Peng et al., ICCV 2019), cleaned version: 345 kinds of things in six domains."""

from pathlib import Path

from fczoo.core.errors import FczooError
from fczoo.core.registry import register_dataset
from fczoo.data.dataset import Archive, Dataset, Defaults, ImageData, Official
from fczoo.data.folder_scan import normalise_path, read_list
from fczoo.data.image_files import ImageFiles, make_rows

PLACE = "http://csr.bu.edu/ftp/visda/2019/multi-source/"
DOMAINS = {  # path and MD5 of the archive, MD5 of the lists of training and test images
    "clipart": (
        "groundtruth/clipart.zip",
        "cd0d8f2d77a4e181449b78ed62bccf1e",
        "b4349693a7f9c05c53955725c47ed6cb",
        "f5ddbcfd657a3acf9d0f7da10db22565",
    ),
    "infograph": (
        "infograph.zip",
        "720380b86f9e6ab4805bb38b6bd135f8",
        "379b50054f4ac2018dca4f89421b92d9",
        "779626b50869edffe8ea6941c3755c71",
    ),
    "painting": (
        "groundtruth/painting.zip",
        "1ae32cdb4f98fe7ab5eb0a351768abfd",
        "7db0e7ca73ad9982f6e1f7f3ef372c0a",
        "232b35dc53f26d414686ae579e38d9b5",
    ),
    "quickdraw": (
        "quickdraw.zip",
        "bdc1b6f09f277da1a263389efe0c7a66",
        "b732ced3939ac8efdd8c0a889dca56cc",
        "c1a828fdfe216fb109f1c0083a252c6f",
    ),
    "real": (
        "real.zip",
        "dcc47055e8935767784b7162e7c7cca6",
        "8ebf02c2075fadd564705f0dc7cd6291",
        "6098816791c3ebed543c71ffa11b9054",
    ),
    "sketch": (
        "sketch.zip",
        "658d8009644040ff7ce30bb2e820850f",
        "1233bd18aa9a8a200bf4cecf1c34ef3e",
        "d8a222e4672cfd585298aa14d02ea441",
    ),
}


@register_dataset("domainnet")
class DomainNet(Dataset):
    """345 classes in six domains.

    The domains are clip art, infographics, paintings, quick drawings, photographs and sketches.
    Each has the same classes.

    The data set is cut into tasks by its classes, with images of all domains together, or with
    ``--tasks domains`` by its domains, in the order of their names. In the second case every task
    has all classes, labels come back, and the accuracy after a task is that over all classes on the
    domains seen so far.

    Training and test images are those of the official lists, whose class numbers give the order of
    the classes; in some domains a class has no training or no test images. The authors publish no
    checksums; fczoo checks the MD5s on which two independent loaders agree.
    """

    classes = 345
    domains = tuple(DOMAINS)
    folder = "domainnet"
    source = "the six archives and twelve lists of DomainNet (ai.bu.edu/M3SDA), cleaned version"
    layout = "domainnet/{DOMAIN/CLASS/*.jpg,DOMAIN_train.txt,DOMAIN_test.txt}"
    licence = "its authors' terms: research, no commercial use"
    official = Official(409_832, 176_743)
    archives = (
        *(Archive(PLACE + path, md5, into="domainnet") for path, md5, *_ in DOMAINS.values()),
        *(
            Archive(f"{PLACE}domainnet/txt/{domain}_{part}.txt", md5, into="domainnet")
            for domain, (_, _, *lists) in DOMAINS.items()
            for part, md5 in zip(("train", "test"), lists, strict=True)
        ),
    )
    overlaps = {"tinyimagenet": "similar", "imagenet1k": "similar"}
    about = (
        "DomainNet, 345 classes in six domains, 409,832 training and 176,743 test images, kept at "
        "256x256"
    )
    defaults = Defaults(tasks=5, clients=5)

    def load(self, root: Path) -> ImageData:
        folder, names = self.locate(root), dict[int, str]()
        train, test = (self._part(folder, part, names) for part in ("train", "test"))
        if sorted(names) != list(range(self.classes)):
            problem = f"the lists in {folder} must have exactly the classes 0 to {self.classes - 1}"
            raise FczooError(f"{problem}; the copy is damaged, get it again")
        classes = tuple(names[label].replace("_", " ") for label in range(self.classes))
        return ImageData(train, test, classes, "official lists")

    def _part(self, folder: Path, part: str, names: dict[int, str]) -> ImageFiles:
        """Return the images of a list for each domain.

        Args:
            folder: Folder of the data set.
            part: ``train`` or ``test``.
            names: Number -> name of the classes, to which those of the list are added.

        Raises:
            FczooError: A list is missing or has a line that does not fit.
        """
        rows: list[tuple[str, int, int]] = []
        for number, domain in enumerate(self.domains):
            list_file = folder / f"{domain}_{part}.txt"
            if not list_file.is_file():
                raise FczooError(
                    f"no file {list_file}, a list of {part} images; get {self.source} again"
                )
            for line in read_list(list_file):
                file, _, label = line.strip().rpartition(" ")
                file = normalise_path(file, list_file)
                steps = file.split("/")
                is_valid = label.isdecimal() and len(steps) == 3 and steps[0] == domain
                if not is_valid or names.setdefault(int(label), steps[1]) != steps[1]:
                    problem = (
                        f"{list_file} has the line {line[:80]!r}, "
                        f"expected {domain}/CLASS/FILE NUMBER"
                    )
                    raise FczooError(f"{problem}; the copy is damaged, get it again")
                rows.append((file, int(label), number))
        return make_rows(self.name, folder, rows, 256)
