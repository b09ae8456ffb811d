"""Any labelled images in the formats of Hugging Face's library ``datasets`` (extra ``hf``)."""

from functools import cache
from pathlib import Path
from typing import ClassVar

from fczoo.core.errors import FczooError
from fczoo.core.registry import register_dataset
from fczoo.data.dataset import Dataset, Defaults, ImageData


@register_dataset("hf")
class HuggingFace(Dataset):
    """``hf:FOLDER`` with a data set of ``save_to_disk`` or parquet files, or ``hf:ORG/NAME``.

    A name on the hub (``ORG/NAME/CONFIGURATION`` where it has several) is downloaded by ``fczoo
    data fetch`` and then read from disk. The image column is the one of type ``Image``, the label
    column the one of type ``ClassLabel`` or else the only column of whole numbers. If they are not
    found, name them, as in ``--hf-columns image=img,label=fine_label`` or
    ``hf:FOLDER,label=fine_label``; ``group=NAME`` names a column with the hospital, writer or user
    of each image.

    The training split is ``train``; the test split is called ``test``, ``val``, ``valid``,
    ``validation`` or ``dev``. A test split without labels is skipped. Without a test split a fifth
    of every class is held out. Images are turned by their orientation tags, and stored at 256x256,
    or ``--stored-size``.
    """

    classes = 0
    source = "a folder of save_to_disk or parquet files, or a data set of huggingface.co"
    layout = "hf:FOLDER with Arrow tables or parquet files"
    licence = "that of the data set; see its page"
    about = "any data set of Hugging Face: hf:FOLDER or hf:ORG/NAME; needs the extra hf"
    defaults = Defaults(tasks=5, clients=5)
    columns: ClassVar[dict[str, str]] = {}

    @classmethod
    @cache
    def select(cls, source: str) -> type[Dataset]:
        """Return the data set ``hf:SOURCE``.

        Args:
            source: Folder below the data root, or name on the hub, and named columns.
        """
        from fczoo.data.hub_files import parse_source

        folder, columns = parse_source(source)
        return cls.variant(source, folder=folder, columns=columns)

    @property
    def can_download(self) -> bool:
        from fczoo.data.hub_files import HUB_NAME

        return HUB_NAME.fullmatch(self.folder) is not None

    def download(self, folder: Path) -> None:
        from fczoo.data.hub_files import download

        download(self.folder, folder)

    def locate(self, root: Path) -> Path:
        folder = root if root.name == Path(self.folder).name else root / self.folder
        if not folder.is_dir():
            fetch = f"run `fczoo data fetch {self.name}`, or " if self.can_download else ""
            raise FczooError(f"no folder {folder}; {fetch}name one as --dataset hf:FOLDER")
        return folder

    def load(self, root: Path) -> ImageData:
        from fczoo.data.hub_tables import read_tables

        return read_tables(self.name, self.locate(root), self.columns)
