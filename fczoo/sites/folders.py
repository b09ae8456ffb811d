"""Images in folders: a site's own, from which it learns, and the server's, on which it tests."""

from pathlib import Path

import numpy as np

from fczoo.backbones.load import load_backbone
from fczoo.core.backbone import Backbone
from fczoo.core.errors import FczooError
from fczoo.data.dataset import Images
from fczoo.data.image_files import ImageFiles, class_folders
from fczoo.data.stream import Stream, make_tasks
from fczoo.federation.benchmark import open_stores
from fczoo.federation.device import DTYPES, pick_device
from fczoo.federation.settings import AUTO, Settings
from fczoo.sites.agreement import CLASSES, DATASET, Agreement
from fczoo.sites.server import Sites, SitesRun, Way, begin
from fczoo.sites.site import Site
from fczoo.sites.worlds import site_world

CACHE = "cache"  # folder of decoded images and their features, which are nobody else's business
SIZE = 256  # side in pixels at which images are kept, as ``imagefolder`` has it


def open_site(agreement: Agreement, name: str, images: Path, folder: Path) -> Site:
    """The site called ``name``, with all images in ``images/CLASS/*``; what it keeps goes into ``folder``,
    decoded images too, and its owner alone can read that.

    It need not have images of every class. Raises FczooError for a class that nobody has agreed on, for
    images that cannot be read, and for whatever else is wrong.
    """
    settings = agreement.settings
    number, backbone = agreement.number(name), _backbone(settings)
    cache = _private(folder) / CACHE
    own = _images(agreement, images, cache)
    stream = _stream(agreement, own, _none(own))
    (store,) = open_stores((own,), backbone, settings.test_crop, cache)
    world = site_world(settings, stream, backbone, store, number)
    return Site(world, agreement.method, agreement.seed, number, folder)


def open_server(agreement: Agreement, images: Path, way: Way, folder: Path | None = None) -> SitesRun:
    """The server's run, once all sites have enrolled, with test images of every class; see ``begin``.

    Raises FczooError for a class without them, where a site refuses, and for whatever else is wrong.
    """
    settings, backbone = agreement.settings, _backbone(agreement.settings)
    cache = _private(folder / CACHE) if folder else None
    test = _images(agreement, images, cache)
    stream = _stream(agreement, _none(test), test)
    if bare := set(range(len(stream.classes))) - set(test.labels.tolist()):
        name = stream.classes[min(bare)]
        raise FczooError(f"no test image of class {name} in {images}; the server needs some of every class")
    (store,) = open_stores((test,), backbone, settings.test_crop, cache)
    given = settings, stream, backbone, store, agreement.method, agreement.seed
    return begin(*given, Sites(agreement.sites, way), folder)


def _private(folder: Path) -> Path:
    """The folder, made if need be, which its owner alone can open. Raises FczooError where that cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
    except OSError as error:
        problem = f"cannot make a folder for your eyes alone of {folder}: {error.strerror}"
        raise FczooError(f"{problem}; take a folder of your own") from error
    return folder


def _backbone(s: Settings) -> Backbone:
    if s.precision == AUTO:  # each site would choose for itself
        raise FczooError(f"precision is {AUTO}; sites need one number type: write fp32 or bf16 in run.toml")
    mean, std = s.normalisation
    found = load_backbone(s.backbone, image_size=s.image_size, mean=mean, std=std)
    return found.to(pick_device(s.device), DTYPES[s.precision])


def _images(agreement: Agreement, folder: Path, cache: Path | None) -> Images:
    """All images of a folder in the order of ``imagefolder``, with labels in order of arrival."""
    found = class_folders(folder)
    if unknown := sorted(set(found) - set(agreement.classes)):
        raise FczooError(f"{folder / unknown[0]} is of no class in {CLASSES}; rename it, or agree on another")
    names = [name for task in agreement.tasks for name in task]
    arrival = [names.index(name) for name in found]
    labels = np.repeat(np.array(arrival, np.int64), [len(images) for images in found.values()])
    files = tuple(name for images in found.values() for name in images)
    own = ImageFiles(DATASET, folder, files, labels, SIZE)
    return own.take(np.arange(len(files)), agreement.settings.stored_size, cache)


def _none(like: Images) -> Images:
    return Images(like.pixels[:0], like.labels[:0])


def _stream(agreement: Agreement, train: Images, test: Images) -> Stream:
    names = tuple(name for task in agreement.tasks for name in task)
    sizes = [len(task) for task in agreement.tasks]
    tasks, index = make_tasks(DATASET, len(names), sizes), np.arange(len(train.labels))
    split = "images of the server's own"
    return Stream(DATASET, train, test, index, agreement.order, names, tasks, split)
