"""Mean and standard deviation of the input images, by data set."""

from fczoo.core.errors import FczooError
from fczoo.core.registry import DATASETS

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
    """Return mean and standard deviation of the three channels.

    Raises FczooError for an unknown data set, and for one without known values.
    """
    name = DATASETS.get(dataset).name
    if name not in RELEASED_NORM:
        known = ", ".join(RELEASED_NORM)
        raise FczooError(f"--norm-by-dataset knows no values for {name}; known: {known}")
    return RELEASED_NORM[name]
