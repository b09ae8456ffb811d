"""Data sets: images, source, and default schedule."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol

from fczoo.core.errors import FczooError
from fczoo.core.registry import DATASETS

if TYPE_CHECKING:  # a shell that completes a word waits for this module
    import numpy as np


Overlap = Literal["all", "some", "similar"]
"""The part of a data set's classes that a pre-training set has; similar: it has classes like some.
"""
Resize = Literal["crop", "squash"]
"""How an image file becomes square: its largest centred square, or the whole image distorted."""


IN_PACKAGE = "part of an installed package"
"""Source of a data set that states none and has no folder."""


class Images(NamedTuple):
    """Decoded square RGB images and their labels."""

    pixels: "np.ndarray"  # uint8 [N, S, S, 3]
    labels: "np.ndarray"  # int64 [N]
    # int64 [N] number of each image's domain, if the data set has several
    domains: "np.ndarray | None" = None

    def take(self, index: "np.ndarray", size: int | None = None) -> "Images":
        """Return the images at some positions.

        Args:
            index: Positions, ascending.
            size: Side in pixels; None for that of the images.

        Raises:
            FczooError: ``size`` is not the side of the images.
        """
        if size not in (None, self.pixels.shape[1]):
            problem = (
                f"the images of this data set have a fixed side of {self.pixels.shape[1]} pixels"
            )
            raise FczooError(f"{problem}; leave out --stored-size, which is for image files")
        if len(index) == len(self.labels):
            return self
        return Images(self.pixels[index], self.labels[index], rows(self.domains, index))


def rows(values: "np.ndarray | None", index: "np.ndarray") -> "np.ndarray | None":
    """Return the values at some positions, or None without values.

    Args:
        values: Array [N, ...] or None.
        index: Positions.
    """
    return None if values is None else values[index]


class Split(Protocol):
    """Training or test part of a data set.

    It is ``Images`` in memory, or ``ImageFiles``, which are decoded when taken.
    """

    @property
    def labels(self) -> "np.ndarray": ...
    @property
    def domains(self) -> "np.ndarray | None": ...
    def take(self, index: "np.ndarray", size: int | None = None) -> Images: ...


class ImageData(NamedTuple):
    """The parts of a data set, as they were read from disk."""

    train: Split
    test: Split
    classes: tuple[str, ...]
    split: str = "official"  # how the test part was chosen, for the record
    remarks: tuple[str, ...] = ()  # warnings on this copy, such as files that are not read
    # int64 [N] group of each training image (hospital, writer, user); None: its domain, if any
    groups: "np.ndarray | None" = None


class Archive(NamedTuple):
    """A file to download."""

    url: str
    md5: str = ""  # as published; empty where no one publishes one
    size: int | None = None  # bytes, where known for certain
    into: str = ""  # folder below the data root in which it is unpacked
    sha256: str = ""  # of the file with that MD5, where known


class Official(NamedTuple):
    """Numbers of images of the whole data set; None if they differ between classes."""

    train: int | None
    test: int | None
    train_per_class: int | None = None
    test_per_class: int | None = None


@dataclass(frozen=True)
class Defaults:
    """The schedule that ``bench`` uses by default; a data set names only what differs."""

    backbone: str = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    tasks: int = 10
    clients: int = 10
    partition: str = "dirichlet:0.5"
    rounds: int = 5
    epochs: int = 5
    batch_size: int = 16
    augment: str = "crop"


class Dataset(ABC):
    """One data set: location and layout of its files, and the defaults of ``bench``."""

    name: ClassVar[str] = ""
    about: ClassVar[str]
    classes: ClassVar[int]  # 0 where they are known only when the files are seen
    # names of the domains in order of arrival, if there are several; each has all classes
    domains: ClassVar[tuple[str, ...]] = ()
    defaults: ClassVar[Defaults]
    # folder below the data root; empty for data that are part of a package
    folder: ClassVar[str] = ""
    source: ClassVar[str] = ""  # where a user gets it
    layout: ClassVar[str] = ""  # what is in the folder
    licence: ClassVar[str] = ""
    official: ClassVar[Official | None] = None
    # classes in common with a pre-training set: tinyimagenet, imagenet1k or imagenet21k
    overlaps: ClassVar[Mapping[str, Overlap]] = {}
    # downloads; empty if the terms forbid them or no host has them
    archives: ClassVar[tuple[Archive, ...]] = ()

    @abstractmethod
    def load(self, root: Path) -> ImageData:
        """Read the data.

        Args:
            root: Data root, or the data set's own folder.

        Raises:
            FczooError: Data are missing or corrupt; the message says which and how to get them.
        """

    @classmethod
    def variant(cls, source: str, **values: Any) -> "type[Dataset]":
        """Create the class of a data set ``NAME:SOURCE``, for ``select`` of class ``NAME``.

        Args:
            source: Text after the name and a colon.
            **values: Class attributes that differ from those of this class.
        """
        values |= {"name": f"{cls.name}:{source}", "__doc__": cls.__doc__}
        return type(cls.__name__, (cls,), values)

    @property
    def can_download(self) -> bool:
        """Return whether ``fczoo data fetch`` gets it, from its archives or by ``download``."""
        return bool(self.archives)

    def download(self, folder: Path) -> None:
        """Download a data set without archives, through the client of its host.

        Args:
            folder: Folder to write.

        Raises:
            FczooError: The download fails.
        """
        raise NotImplementedError(f"{self.name} does not define download()")

    def locate(self, root: Path) -> Path:
        """Return the data set's own folder.

        Args:
            root: This folder or its parent.

        Raises:
            FczooError: The folder does not exist.
        """
        folder = root if root.name == Path(self.folder).name else root / self.folder
        if not folder.is_dir():
            fetch = f"run `fczoo data fetch {self.name}`, " if self.can_download else ""
            advice = f"{fetch}unpack {self.source} there or give its path with --data-root"
            raise FczooError(f"no folder {self.folder} in {root}; {advice}")
        return folder


def domains_of(dataset: str) -> tuple[str, ...]:
    """Return the domains of a data set in order of arrival.

    Args:
        dataset: Name of the data set.

    Raises:
        FczooError: The data set does not have domains.
    """
    names: tuple[str, ...] = DATASETS.get(dataset).domains
    if not names:
        raise FczooError(f"{dataset} has no domains to use as tasks; give a number as --tasks")
    return names


HALF = ((0.5,) * 3, (0.5,) * 3)
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
RELEASED_NORM = {
    "cifar100": HALF,
    "imagenet_r": HALF,
    "imagenet_a": IMAGENET,
    "cub200": IMAGENET,
    "eurosat": CLIP,
    "cars196": ((0.0,) * 3, (1.0,) * 3),
}
"""Mean and standard deviation by data set in fed-mammoth, the code released with HGP."""


def released_norm(dataset: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation per channel in the code released with HGP.

    Args:
        dataset: Name of the data set.

    Raises:
        FczooError: The data set is unknown or has no known values.
    """
    name = DATASETS.get(dataset).name
    if name not in RELEASED_NORM:
        names = ", ".join(RELEASED_NORM)
        raise FczooError(f"--norm-by-dataset has no values for {name}; known: {names}")
    return RELEASED_NORM[name]
