"""What a data set is: its images, where they come from, and the schedule that a benchmark uses on it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, Protocol

from fczoo.core.errors import FczooError

if TYPE_CHECKING:  # a shell that completes a word waits for this module
    import numpy as np


Overlap = Literal["all", "some", "similar"]
"""The part of a data set's classes that a pre-training set has; similar: it has classes like some."""


class Images(NamedTuple):
    """Decoded square RGB images and their labels."""

    pixels: "np.ndarray"  # uint8 [N, S, S, 3]
    labels: "np.ndarray"  # int64 [N]
    domains: "np.ndarray | None" = None  # int64 [N] which of the data set's domains, where it has several

    def take(self, index: "np.ndarray", size: int | None = None) -> "Images":
        """The images at the positions ``index``, ascending.

        Raises FczooError for a ``size`` in pixels other than the one that they have.
        """
        if size not in (None, self.pixels.shape[1]):
            pixels = f"these images come at {self.pixels.shape[1]} pixels"
            raise FczooError(f"{pixels}; --stored-size is for data sets of image files")
        if len(index) == len(self.labels):
            return self
        return Images(self.pixels[index], self.labels[index], rows(self.domains, index))


def rows(values: "np.ndarray | None", index: "np.ndarray") -> "np.ndarray | None":
    """The values at the positions ``index``; None where there are none."""
    return None if values is None else values[index]


class Split(Protocol):
    """Training or test part of a data set: ``Images`` in memory, or ``ImageFiles``, decoded when taken."""

    @property
    def labels(self) -> "np.ndarray": ...
    @property
    def domains(self) -> "np.ndarray | None": ...
    def take(self, index: "np.ndarray", size: int | None = None) -> Images: ...


class ImageData(NamedTuple):
    """A data set as it was found."""

    train: Split
    test: Split
    classes: tuple[str, ...]
    split: str = "official"  # how the test part was chosen, for the record
    remarks: tuple[str, ...] = ()  # warnings on this copy, such as files that are not read


class Archive(NamedTuple):
    """A file to download."""

    url: str
    md5: str = ""  # as published; empty where nobody publishes one
    size: int | None = None  # bytes, where known for certain
    into: str = ""  # folder below the data root in which it is unpacked
    sha256: str = ""  # of the file with that MD5, where known


class Official(NamedTuple):
    """The numbers of the whole data set; None where they differ from class to class."""

    train: int | None
    test: int | None
    train_per_class: int | None = None
    test_per_class: int | None = None


@dataclass(frozen=True)
class Defaults:
    """The schedule that ``bench`` uses unless told otherwise; a data set names only what differs."""

    backbone: str = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    tasks: int = 10
    clients: int = 10
    partition: str = "dirichlet:0.5"
    rounds: int = 5
    epochs: int = 5
    batch_size: int = 16
    augment: str = "crop"


class Dataset(ABC):
    """One data set: where its files are, how they are read, what ``bench`` does with it by default."""

    name: ClassVar[str] = ""
    about: ClassVar[str]
    classes: ClassVar[int]  # 0 where they are known only when the files are seen
    domains: ClassVar[tuple[str, ...]] = ()  # in order of arrival, where each of several has all classes
    defaults: ClassVar[Defaults]
    folder: ClassVar[str] = ""  # expected below the data root; empty for data that come with a package
    source: ClassVar[str] = ""  # where a user gets it
    layout: ClassVar[str] = ""  # what lies in the folder
    licence: ClassVar[str] = ""
    official: ClassVar[Official | None] = None
    # classes in common with a pre-training set: tinyimagenet, imagenet1k or imagenet21k
    overlaps: ClassVar[Mapping[str, Overlap]] = {}
    archives: ClassVar[
        tuple[Archive, ...]
    ] = ()  # downloads; empty where the terms forbid or nobody hosts them

    @abstractmethod
    def load(self, root: Path) -> ImageData:
        """Read the data below ``root``.

        Raises FczooError that says what is missing or corrupt and how to get it.
        """

    def locate(self, root: Path) -> Path:
        """The data set's own folder, also when ``root`` is that folder.

        Raises FczooError when it is not there.
        """
        folder = root if root.name == Path(self.folder).name else root / self.folder
        if not folder.is_dir():
            fetch = f"run `fczoo data fetch {self.name}`, " if self.archives else ""
            advice = f"{fetch}unpack {self.source} there or give its place with --data-root"
            raise FczooError(f"no folder {self.folder} in {root}; {advice}")
        return folder
