"""A data set of small images in folders, and each site's part of it."""

import shutil
from pathlib import Path

import numpy as np
from PIL import Image

from fczoo import Benchmark, Settings
from fczoo.data.partition import Partition
from fczoo.federation.data_setup import whole_stream
from fczoo.sites.federation_config import read_agreement
from helpers_sites import NAMES

CLASSES = ("ant", "bee", "cat", "dog", "eel", "fox")
TASKS = (("fox", "bee"), ("ant", "eel"), ("dog", "cat"))
SETTINGS = {"backbone": "vit_nano_32", "rounds": 1, "epochs": 1, "batch_size": 4, "augment": "none"}
IMAGES_BY_SITE = {
    "paris": [0, 1, 2],
    "rome": [3, 4],
    "lyon": [5],
}  # numbers of the training images of each class


def write_images(root: Path) -> None:
    """Write ``train``, ``test`` and a folder for each site; Lyon has nothing of the last task."""
    rng = np.random.default_rng(0)
    for label, name in enumerate(CLASSES):
        for part, count in (("train", 6), ("test", 3)):
            folder = root / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                noise = rng.integers(0, 60, (32, 32, 3)) + 30 * label
                Image.fromarray(noise.astype(np.uint8)).save(folder / f"{number}.png")
        for site, numbers in IMAGES_BY_SITE.items():
            if site == "lyon" and name in TASKS[-1]:
                continue
            (root / site / name).mkdir(parents=True)
            for number in numbers:
                shutil.copy2(root / "train" / name / f"{number}.png", root / site / name)


def simulated_folders(agreement_folder: Path, data: Path) -> Benchmark:
    """Open the same images, at the same sites, as a benchmark of one process.

    Args:
        agreed: File of the agreement.
        data: The folder that ``write_images`` has written.
    """
    agreement = read_agreement(agreement_folder).settings
    s = Settings.for_dataset(
        "imagefolder",
        **SETTINGS,
        clients=3,
        tasks=agreement.tasks,
        class_order=agreement.class_order,
        data_root=str(data),
    )
    stream = whole_stream(s)
    files = [f"{name}/{number}.png" for name in CLASSES for number in range(6)]
    tasks = []
    for task in stream.tasks:
        positions = stream.positions(stream.train, task)
        tasks.append(
            [
                np.array([i for i in positions if (data / k / files[i]).exists()], np.int64)
                for k in NAMES
            ]
        )
    partition = Partition(stream.name, "by hand", 0, stream.class_order, tuple(tasks))
    return Benchmark.open(s, lambda _: (stream, partition))
