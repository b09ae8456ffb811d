"""Transform from an image to the pixels on which a run was evaluated."""

from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import Compose

from fczoo.core.errors import FczooError
from fczoo.data.image_files import to_square
from fczoo.data.views import evaluation_view


@dataclass(frozen=True)
class ViewConfig:
    """Steps from an image file to the input of the backbone, as evaluation takes them."""

    stored_size: int  # side in pixels of the stored square
    image_size: int  # side of the input in pixels
    test_crop: float  # part of each side that the view shows
    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class Square:
    """Step that cuts the largest centred square and resizes it, as data sets of files do.

    An orientation tag turns the image first, as in a data set of users.
    """

    size: int  # pixels

    def __call__(self, image: Image.Image) -> Tensor:
        """Return the pixels, uint8 [3, size, size].

        Args:
            image: Image of any mode and size.

        Raises:
            FczooError: The argument is not an image of PIL, or has more than 8 bits per channel.
        """
        if not isinstance(image, Image.Image):
            raise FczooError(
                f"the transform got {type(image).__name__}; give an image of PIL: Image.open(FILE)"
            )
        return torch.from_numpy(np.array(to_square(image, self.size, upright=True))).permute(
            2, 0, 1
        )


@dataclass(frozen=True)
class EvaluationView:
    """Step that resizes the middle of a square image and normalises it."""

    config: ViewConfig

    def __call__(self, pixels: Tensor) -> Tensor:
        """Return the input of the backbone, float32 [3, image_size, image_size].

        Args:
            pixels: uint8 [3, S, S].
        """
        view = self.config
        images = evaluation_view(pixels[None].float() / 255, view.image_size, view.test_crop)
        mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (view.mean, view.std))
        return images.sub(mean).div(std)[0]


def evaluation_transform(view: ViewConfig) -> Compose:
    """Return the torchvision transform from an image of PIL to a normalised tensor [3, S, S].

    Args:
        view: Steps of the evaluation.
    """
    return Compose([Square(view.stored_size), EvaluationView(view)])
