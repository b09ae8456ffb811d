"""Views of images: from uint8 pixels to normalised input of the backbone, on its device."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.errors import FczooError
from fczoo.core.registry import AUGMENTATIONS, register_augmentation
from fczoo.data.dataset import Images
from fczoo.data.feature_cache import FeatureFile

# images whose query features are computed at once: fixed, so that the order does not matter
QUERY_BLOCK = 64
DRAWS = 6  # random numbers for crop, flip and brightness of an image
ON_DEVICE = 8 << 30  # bytes of pixels that may be moved to an accelerator as a whole


@dataclass(frozen=True)
class Augment:
    """Random view of a training image: a crop, a flip, brightness, and what a plug-in adds.

    Subclasses set the attributes that they change.
    """

    # area of the random crop, which is resized to the input size
    scale: ClassVar[tuple[float, float] | None] = None
    ratio: ClassVar[tuple[float, float]] = (3 / 4, 4 / 3)  # its aspect ratio, log-uniform
    flip: ClassVar[float] = 0.0  # probability of a horizontal flip
    brightness: ClassVar[float] = 0.0  # factor drawn from 1 - b to 1 + b
    more_draws: ClassVar[int] = 0  # random numbers per image that ``change`` uses

    def change(self, images: Tensor, draws: Tensor) -> Tensor:
        """Transform images after crop, flip and brightness; by default return them unchanged.

        Args:
            images: Values in [0, 1], [B, 3, S, S].
            draws: Numbers [B, more_draws], uniform in [0, 1), one row per image.

        Returns:
            Values in [0, 1], [B, 3, S, S]; image i depends only on row i.
        """
        return images

    @property
    def draws(self) -> int:
        """Return the number of random numbers per image."""
        return DRAWS + self.more_draws

    @property
    def is_fixed(self) -> bool:
        """Return whether the view is the test view, so that results of it may be cached."""
        changes = type(self).change is not Augment.change
        return self.scale is None and not self.flip and not self.brightness and not changes


@register_augmentation("none")
class Unchanged(Augment):
    """No random change: training images look like test images."""


@register_augmentation("flip")
class Flip(Augment):
    """Horizontal flip with probability 0.5."""

    flip = 0.5


@register_augmentation("crop")
class Crop(Augment):
    """Crop of 50 to 100 % of the area, and flip."""

    scale = (0.5, 1.0)
    flip = 0.5


@register_augmentation("pilora")
class FlipAndBrightness(Augment):
    """Flip, and brightness of +-25 %, as in PILoRA's released code (HFlip, ColorJitter)."""

    flip = 0.5
    brightness = 63 / 255


@register_augmentation("fppl")
class SmallCrop(Augment):
    """Crop of 5 to 100 % of the area, and flip, as in FPPL's released code (RandomResizedCrop)."""

    scale = (0.05, 1.0)
    flip = 0.5


@register_augmentation("hgp")
class DefaultCrop(Augment):
    """Crop of 8 to 100 % of the area, and flip, as in fed-mammoth (RandomResizedCrop)."""

    scale = (0.08, 1.0)
    flip = 0.5


@register_augmentation("randomcrop")
class FixedSizeCrop(Augment):
    """Random square with 224/256 of the side, and flip, as in fed-mammoth on CUB-200."""

    scale = ((224 / 256) ** 2,) * 2
    ratio = (1, 1)
    flip = 0.5


def get_augment(spec: str) -> Augment:
    """Create an augmentation.

    Args:
        spec: ``NAME``, or ``NAME:VALUE`` if it has options.

    Raises:
        FczooError: The name is unknown (the message has the nearest ones), a value does not fit, or
            a plug-in registers something else.
    """
    augment = AUGMENTATIONS.create(spec)
    if not isinstance(augment, Augment):
        problem = f"augmentation {spec} is not a subclass of fczoo.data.views.Augment"
        raise FczooError(f"{problem}; derive it, with @dataclass(frozen=True) above the class")
    return augment


class ImageStore:
    """The images of one split with a backbone: test and augmented views, cached frozen features."""

    def __init__(
        self,
        images: Images,
        backbone: Backbone,
        test_crop: float = 1.0,
        make_feature_file: Callable[[], FeatureFile] | None = None,
    ):
        """Create a store.

        Args:
            images: Images of one split.
            backbone: Frozen backbone, which gives input size, normalisation and device.
            test_crop: Part of each side that the test view shows.
            make_feature_file: Function that returns the file of the frozen features when they are
                first needed.
        """
        self.backbone, self.test_crop = backbone, test_crop
        self._make_feature_file = make_feature_file
        pixels = torch.from_numpy(images.pixels).permute(0, 3, 1, 2)
        self.pixels = pixels.to(backbone.device) if pixels.numel() < ON_DEVICE else pixels
        self.labels = torch.from_numpy(images.labels).to(backbone.device)
        self._mean = torch.tensor(backbone.config.mean, device=backbone.device).view(1, 3, 1, 1)
        self._std = torch.tensor(backbone.config.std, device=backbone.device).view(1, 3, 1, 1)
        self._reset_queries()

    def with_labels(self, labels: np.ndarray) -> "ImageStore":
        """Return the same images with other labels; they share their pixels.

        Args:
            labels: Labels [N].
        """
        store = copy.copy(self)
        store.labels = torch.from_numpy(labels).to(self.labels.device)
        store._reset_queries()
        return store

    def without_test_crop(self) -> "ImageStore":
        """Return the same images whose test view shows them whole; they share their pixels."""
        store = copy.copy(self)
        store.test_crop = 1.0
        store._reset_queries()
        return store

    def _reset_queries(self) -> None:
        self._features = torch.empty(0)
        self._computed = torch.zeros(math.ceil(len(self.labels) / QUERY_BLOCK), dtype=torch.bool)
        self._file: FeatureFile | None = None

    def view(self, index: Tensor) -> Tensor:
        """Compute the test view: the middle ``test_crop`` of each side, resized and normalised.

        Args:
            index: Positions [B].

        Returns:
            Images [B, 3, S, S].
        """
        size = self.backbone.config.image_size
        return self._normalise(evaluation_view(self._raw(index), size, self.test_crop))

    def training_view(self, index: Tensor, augment: Augment, draws: Tensor) -> Tensor:
        """Compute the training view.

        Args:
            index: Positions [B].
            augment: Random view.
            draws: Numbers [B, augment.draws], uniform in [0, 1), one row per image.

        Returns:
            Images [B, 3, S, S].
        """
        draws = draws.to(self.backbone.device)
        raw, size = self._raw(index), self.backbone.config.image_size
        x_offset, y_offset, width, height = _crops(augment, draws)
        columns = resampling(raw.shape[-1], size, x_offset, width)
        columns = torch.where((draws[:, 4] < augment.flip).view(-1, 1, 1), columns.flip(1), columns)
        x = _resample(raw, resampling(raw.shape[-2], size, y_offset, height), columns)
        if augment.brightness:
            x.mul_(1 + augment.brightness * (2 * draws[:, 5].view(-1, 1, 1, 1) - 1)).clamp_(0, 1)
        changed = augment.change(x, draws[:, DRAWS:])
        if changed.shape != x.shape:
            problem = f"{type(augment).__name__}.change returned shape {list(changed.shape)}"
            raise FczooError(
                f"{problem} for images {list(x.shape)}; return images of the same shape"
            )
        return self._normalise(changed)

    @torch.no_grad()
    def query(self, index: Tensor) -> Tensor:
        """Return the frozen features of the test view, computed once per image.

        Args:
            index: Positions [B].

        Returns:
            Features [B, D].
        """
        if not self._computed.all():  # else the host need not know which images these are
            self._load_cached_features()
            for block in torch.unique(index.cpu() // QUERY_BLOCK).tolist():
                if not self._computed[block]:
                    self._compute(block)
            if self._file and self._computed.all():
                self._file.save(self._features)
                self._file = None
        return self._features[index.to(self._features.device)].clone()

    def _load_cached_features(self) -> None:
        """Load the cached features of an earlier run once."""
        if self._make_feature_file is None or self._file:
            return
        self._file = self._make_feature_file()
        features = self._file.load()
        if features is not None and len(features) == len(self.labels):
            self._features, self._file = features.to(self.backbone.device), None
            self._computed[:] = True

    def _compute(self, block: int) -> None:
        rows = torch.arange(block * QUERY_BLOCK, min((block + 1) * QUERY_BLOCK, len(self.labels)))
        features = self.backbone(self.view(rows))
        if not len(self._features):
            self._features = features.new_empty(len(self.labels), features.shape[1])
        self._features[rows.to(features.device)] = features
        self._computed[block] = True

    def _raw(self, index: Tensor) -> Tensor:
        return self.pixels[index.to(self.pixels.device)].to(self.backbone.device).float() / 255

    def _normalise(self, x: Tensor) -> Tensor:
        # in place, because new memory costs more than the arithmetic
        return x.sub_(self._mean).div_(self._std).to(self.backbone.dtype)


class ConstantFeatures(ImageStore):
    """A store with constant query features, to count or time the other operations of a step."""

    @classmethod
    def like(cls, store: ImageStore) -> "ConstantFeatures":
        """Return a store of the same images.

        Args:
            store: Another store; it does not change.
        """
        known = cls.__new__(cls)
        vars(known).update(vars(store))
        return known

    def query(self, index: Tensor) -> Tensor:
        dtype = torch.promote_types(self.backbone.dtype, torch.float32)
        return torch.ones(len(index), self.backbone.dim, dtype=dtype, device=self.backbone.device)


def evaluation_view(images: Tensor, size: int, test_crop: float) -> Tensor:
    """Resize the middle of each image.

    Args:
        images: Values in [0, 1], [B, 3, H, H].
        size: Side of the result in pixels.
        test_crop: Part of each side that the view shows.

    Returns:
        Images [B, 3, size, size]; the same tensor if there is nothing to resize.
    """
    if images.shape[-1] == size and test_crop == 1:
        return images
    extent = torch.tensor([test_crop], device=images.device)
    middle = resampling(images.shape[-1], size, (1 - extent) / 2, extent)[0]
    return _resample(images, middle, middle)


def resampling(pixels: int, size: int, start: Tensor, extent: Tensor) -> Tensor:
    """Compute bicubic weights that map a part of an image's axis to ``size`` points.

    If the part shrinks, the kernel widens accordingly (antialias); weights beyond the image are
    dropped. It is the kernel of PIL's and torch's antialiased bicubic resampling.

    Args:
        pixels: Pixels of the axis.
        size: Points of the result.
        start: Start [B] of the part, as a fraction of the axis.
        extent: Length [B] of the part, as a fraction of the axis.

    Returns:
        Weights [B, size, pixels]; each row sums to 1.
    """
    step = extent * pixels / size  # source pixels a point
    centre = (
        start[:, None] * pixels + (torch.arange(size, device=start.device) + 0.5) * step[:, None]
    )
    gap = centre[:, :, None] - (torch.arange(pixels, device=start.device) + 0.5)
    # in place, because new memory costs more than the arithmetic
    gap.div_(step.clamp(min=1)[:, None, None]).abs_().clamp_(max=2)
    # (1.5 g - 2.5) g^2 + 1 for g < 1
    inner_weights = gap.mul(1.5).sub_(2.5).mul_(gap.square()).add_(1)
    # ((-0.5 g + 2.5) g - 4) g + 2, which is 0 at g = 2
    outer_weights = gap.mul(-0.5).add_(2.5).mul_(gap).sub_(4).mul_(gap).add_(2)
    weights: Tensor = torch.where(gap < 1, inner_weights, outer_weights)
    return weights.div_(weights.sum(-1, keepdim=True))


def _resample(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Resample images [B, 3, H, W] by weights [S, pixels] or [B, S, pixels] for either axis.

    Two matrix products are faster than gathering pixels, on any device.
    """
    wide: Tensor = (x.flatten(1, 2) @ columns.mT).unflatten(1, x.shape[1:3])
    return (rows.unsqueeze(-3) @ wide).clamp_(0, 1)


def _crops(augment: Augment, draws: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return left, top, width and height [B] of random crops as fractions, within the image.

    Without crops they are [1]: all images are kept whole and share the weights of their resampling.
    """
    if augment.scale is None:
        zero, one = torch.zeros(1, device=draws.device), torch.ones(1, device=draws.device)
        return zero, zero, one, one
    low, high = augment.scale
    area = low + (high - low) * draws[:, 0]
    stretch = (
        math.log(augment.ratio[0]) + math.log(augment.ratio[1] / augment.ratio[0]) * draws[:, 1]
    )
    width = (area.sqrt() * torch.exp(stretch / 2)).clamp(max=1)
    height = (area.sqrt() * torch.exp(-stretch / 2)).clamp(max=1)
    return draws[:, 2] * (1 - width), draws[:, 3] * (1 - height), width, height
