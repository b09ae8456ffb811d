"""Image folders: training images of a site, and test images of the server."""

import logging
from pathlib import Path

import numpy as np

from fczoo.backbones.load import load_backbone
from fczoo.core.backbone import Backbone
from fczoo.core.errors import FczooError
from fczoo.data.dataset import Images
from fczoo.data.folder_scan import normalise_name
from fczoo.data.image_files import ImageFiles, describe_unread_files, list_images, scan_classes
from fczoo.data.stream import Stream, make_tasks
from fczoo.federation.benchmark import open_stores
from fczoo.federation.device import DTYPES, pick_device
from fczoo.federation.settings import AUTO, Settings
from fczoo.federation.settings_checks import normalisation_of
from fczoo.sites.federation_config import (
    CLASSES,
    DATASET,
    FederationConfig,
    check_image_counts,
)
from fczoo.sites.ledger import PrivacyLedger
from fczoo.sites.server import SiteConnection, Sites, SitesRun, start_run
from fczoo.sites.site import Site
from fczoo.sites.site_data import site_scenario

log = logging.getLogger(__name__)


CACHE = "cache"  # private folder of decoded images and their features
SIZE = 256  # side of stored images in pixels, as in ``imagefolder``


def open_site(
    agreement: FederationConfig,
    name: str,
    images: Path,
    folder: Path,
    ledger: PrivacyLedger | None = None,
) -> Site:
    """Open the site called ``name`` with its images ``images/CLASS/*``; classes may be missing.

    Args:
        agreement: Configuration of the federation.
        name: Name of the site.
        images: Folder of class folders.
        folder: Folder of its state and decoded images; only the owner can read it.
        ledger: Ledger of the institution, see ``Site``.

    Returns:
        The site.

    Raises:
        FczooError: The site is unknown, a class is not in the agreement, a task has too many
            images, images cannot be read, or the ledger's budget allows no upload.
    """
    settings = agreement.settings
    number, backbone = agreement.number(name), _backbone(settings)
    cache = _private(folder) / CACHE
    site_images = _images(agreement, images, cache)
    stream = _stream(agreement, site_images, _empty_images(site_images))
    (store,) = open_stores((site_images,), backbone, settings.test_crop, cache)
    scenario = site_scenario(settings, stream, backbone, store, number)
    counts = [len(of_task[number]) for of_task in scenario.partition.tasks]
    check_image_counts(name, counts, agreement.max_images)
    if ledger:
        ledger.check(settings)
    names = agreement.sites
    return Site(scenario, agreement.method, agreement.seed, number, names, folder, ledger)


def open_server(
    agreement: FederationConfig,
    images: Path,
    connection: SiteConnection,
    folder: Path | None = None,
) -> SitesRun:
    """Start the server's run with test images of every class, after enrolling all sites.

    Args:
        agreement: Configuration of the federation.
        images: Folder of class folders with test images.
        connection: Transport to the sites.
        folder: Folder of checkpoints and decoded images, see ``start_run``. None: nothing is
            stored.

    Returns:
        The run.

    Raises:
        FczooError: A class has no test image, or a site refuses.
    """
    settings, backbone = agreement.settings, _backbone(agreement.settings)
    cache = _private(folder / CACHE) if folder else None
    test = _images(agreement, images, cache)
    stream = _stream(agreement, _empty_images(test), test)
    if labels_without_images := set(range(len(stream.classes))) - set(test.labels.tolist()):
        name = stream.classes[min(labels_without_images)]
        raise FczooError(
            f"no test image of class {name} in {images}; the server needs images of every class"
        )
    (store,) = open_stores((test,), backbone, settings.test_crop, cache)
    run_arguments = settings, stream, backbone, store, agreement.method, agreement.seed
    sites = Sites(
        agreement.sites, connection, agreement.answer_mb, image_limit=agreement.max_images
    )
    return start_run(*run_arguments, sites, folder)


def _private(folder: Path) -> Path:
    """Create a folder that only its owner can open, or raise FczooError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
    except OSError as error:
        problem = f"cannot make {folder} private: {error.strerror}"
        raise FczooError(f"{problem}; give a folder that belongs to you") from error
    return folder


def _backbone(s: Settings) -> Backbone:
    if s.precision == AUTO:  # each site would choose for itself
        raise FczooError(
            f"precision = {AUTO} may differ between sites; write fp32 or bf16 in run.toml"
        )
    mean, std = normalisation_of(s)
    backbone = load_backbone(s.backbone, image_size=s.image_size, mean=mean, std=std, pool=s.pool)
    return backbone.to(pick_device(s.device), DTYPES[s.precision])


def _images(agreement: FederationConfig, folder: Path, cache: Path | None) -> Images:
    """Return all images of a folder in the order of ``imagefolder``.

    Labels number the classes in order of arrival. Skipped files are logged. Raises FczooError for
    the folder of a class that is not in the agreement.
    """
    scans = scan_classes(folder)
    files_by_class = list_images(folder, scans)
    names = [normalise_name(name) for task in agreement.tasks for name in task]
    if unknown := sorted(name for name in files_by_class if normalise_name(name) not in names):
        raise FczooError(
            f"{folder / unknown[0]} is not a class in {CLASSES}; rename the folder, or agree on a "
            "class list that contains it"
        )
    for line in describe_unread_files(folder, scans):
        log.warning("%s: %s", folder, line)
    arrival = [names.index(normalise_name(name)) for name in files_by_class]
    labels = np.repeat(
        np.array(arrival, np.int64), [len(images) for images in files_by_class.values()]
    )
    files = tuple(name for images in files_by_class.values() for name in images)
    image_files = ImageFiles(DATASET, folder, files, labels, SIZE, resize=agreement.settings.resize)
    return image_files.take(np.arange(len(files)), agreement.settings.stored_size, cache)


def _empty_images(like: Images) -> Images:
    return Images(like.pixels[:0], like.labels[:0])


def _stream(agreement: FederationConfig, train: Images, test: Images) -> Stream:
    names = tuple(name for task in agreement.tasks for name in task)
    sizes = [len(task) for task in agreement.tasks]
    tasks, index = make_tasks(DATASET, len(names), sizes), np.arange(len(train.labels))
    split = "the server's own test images"
    return Stream(DATASET, train, test, index, agreement.order, names, tasks, split)
