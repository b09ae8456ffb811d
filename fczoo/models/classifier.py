"""Stored models as PyTorch modules: image transform, forward, and the tensors that it reads."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fczoo.backbones.wrapped_vit import TensorBuffers
from fczoo.core.backbone import Backbone
from fczoo.core.errors import FczooError
from fczoo.core.method import Method
from fczoo.core.tree import Tree
from fczoo.core.types import Batch, Task, whole_batch
from fczoo.data.dataset import Resize
from fczoo.data.image_files import to_square
from fczoo.data.views import evaluation_view
from fczoo.federation.model_record import ModelRecord


@dataclass(frozen=True)
class EvaluationTransform:
    """Transform of a PIL image to the input of the backbone, as in the run's evaluation."""

    stored_size: int  # side of the stored square in pixels
    image_size: int  # side of the input in pixels
    test_crop: float  # fraction of each side that the central crop keeps
    mean: tuple[float, ...]
    std: tuple[float, ...]
    resize: Resize = "crop"  # how an image becomes the stored square

    def __call__(self, image: Image.Image) -> Tensor:
        """Make an image square, resize it as data sets of image files do, and normalise it.

        An EXIF orientation is applied first, as in data sets of users.

        Args:
            image: Image of any mode and size.

        Returns:
            Input of the backbone, float32 [3, image_size, image_size].

        Raises:
            FczooError: The argument is not a PIL image, or has more than 8 bits per channel.
        """
        if not isinstance(image, Image.Image):
            raise FczooError(
                f"the transform got {type(image).__name__}; give a PIL image: Image.open(FILE)"
            )
        square = np.array(to_square(image, self.stored_size, upright=True, resize=self.resize))
        return self.normalise(torch.from_numpy(square).permute(2, 0, 1))

    def normalise(self, pixels: Tensor) -> Tensor:
        """Resize the central crop of a stored square and normalise it.

        Args:
            pixels: uint8 [3, S, S].

        Returns:
            Input of the backbone, float32 [3, image_size, image_size].
        """
        images = evaluation_view(pixels[None].float() / 255, self.image_size, self.test_crop)
        mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (self.mean, self.std))
        return images.sub(mean).div(std)[0]


def prediction_batch(inputs: Collection[str], backbone: Backbone, images: Tensor) -> Batch:
    """Create a batch of images with the inputs that a method declares.

    Args:
        inputs: Declared inputs of the method, ``Training.inputs``.
        backbone: Frozen backbone.
        images: Normalised images [B, 3, S, S].
    """
    labels = torch.zeros(len(images), dtype=torch.int64, device=images.device)
    empty_rows, empty = images.new_empty(len(images), 0), images.new_empty(0)
    # all fields are given: torch.export of torch 2.6 cannot handle tensors as defaults of fields
    return Batch(
        x=images if "images" in inputs else empty_rows,
        y=labels,
        w=torch.ones_like(labels, dtype=images.dtype),
        query=backbone(images) if "query" in inputs else empty_rows,
        teacher=images.new_empty(0, 0),
        class_count=empty,
        position=labels.new_empty(0),
        draws=images.new_empty(0, 0),
        epoch=labels.new_empty(0),
        client=labels.new_empty(0),
    )


def prediction_tensors(method: Method, backbone: Backbone, state: Tree, task: Task) -> Tree:
    """Return the tensors of a state that ``predict`` and ``features`` read.

    Both run once on a blank image. A tensor counts as read if a torch operation uses it, its shape
    or its length. Unlike a declaration by each method, this cannot be forgotten.

    Args:
        method: Method of the state.
        backbone: Frozen backbone.
        state: The server's state.
        task: Last learned task.

    Returns:
        The tensors that are read, in the order of the state.
    """
    size = backbone.config.image_size
    image = torch.zeros(1, 3, size, size, dtype=backbone.dtype, device=backbone.device)
    label = torch.zeros(1, dtype=torch.int64, device=image.device)
    # any values suffice: the query does not depend on the state, and ones avoid a forward pass
    query = image.new_ones(1, backbone.dim) if "query" in method.training().inputs else None
    batch = whole_batch(image, label, query)
    with torch.no_grad(), _ReadRecorder() as recorder:
        method.predict(backbone, dict(state), batch, task)
        method.features(backbone, dict(state), batch)
    return {name: value for name, value in state.items() if id(value) in recorder.tensor_ids}


class _ReadRecorder(TorchFunctionMode):
    """Mode that records the identities of all tensors that torch functions receive."""

    def __init__(self) -> None:
        super().__init__()
        self.tensor_ids: set[int] = set()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.tensor_ids.update(map(id, _tensors((args, kwargs or {}))))
        return func(*args, **(kwargs or {}))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


class Classifier(nn.Module):
    """Global model of a run, for inference: it maps images to logits over the classes seen.

    Attributes:
        classes: Names of the classes, in the order of the logits.
        transform: Transform of a PIL image to a tensor [3, S, S], as in the run's evaluation.
        method: Method of the run.
        task: Last learned task.
        record: Content of ``model.json``.
        has_images: Whether clients had images of each class, bool [classes].
    """

    has_images: Tensor

    def __init__(self, record: ModelRecord, method: Method, backbone: Backbone, state: Tree):
        super().__init__()
        self.record, self.method, self.task = record, method, record.task
        self._inputs = method.training().inputs
        self.classes = tuple(record.classes)
        config = backbone.config
        view = config.image_size, record.test_crop, config.mean, config.std
        self.transform = EvaluationTransform(record.stored_size, *view, record.resize)
        self._config, self._sha256 = config, backbone.sha256
        self._weights, self._tensors = TensorBuffers(backbone.weights), TensorBuffers(state)
        self.register_buffer("has_images", torch.tensor(record.has_images), persistent=False)
        self._bind()
        super().train(False)

    def forward(self, images: Tensor) -> Tensor:
        """Compute logits, or scores for methods without logits.

        Args:
            images: Images [B, 3, S, S] from ``transform``.

        Returns:
            Logits [B, classes]. Classes without images at any client have minus infinity: as in the
            run's evaluation, they are never predicted.

        Raises:
            FczooError: The images have another shape or type.
        """
        batch = prediction_batch(self._inputs, self._backbone, self._check(images))
        logits = self.method.predict(self._backbone, self._state, batch, self.task)
        return logits.masked_fill(~self.has_images, -torch.inf)

    def features(self, images: Tensor) -> Tensor:
        """Compute the features [B, D] from which the method predicts.

        Args:
            images: Images [B, 3, S, S] from ``transform``.

        Raises:
            FczooError: The images have another shape or type.
        """
        batch = prediction_batch(self._inputs, self._backbone, self._check(images))
        return self.method.features(self._backbone, self._state, batch)

    @property
    def backbone(self) -> Backbone:
        """Return the frozen backbone."""
        return self._backbone

    @property
    def state(self) -> Tree:
        """Return the tensors of the method by name."""
        return dict(self._state)

    def train(self, mode: bool = True) -> "Classifier":
        """Refuse training; ``eval()`` has no effect.

        Args:
            mode: Whether to train.

        Raises:
            FczooError: ``mode`` is true.
        """
        if mode:
            raise FczooError(
                f"a stored model is for inference only; train {self.method.name} with `fczoo bench`"
            )
        return super().train(False)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "Classifier":
        """Apply a function to all tensors, as ``to`` and ``double`` do."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._bind()
        return self

    def _bind(self) -> None:
        """Build the backbone and the state from the buffers."""
        self._backbone = Backbone(self._config, self._weights.tree(), self._sha256, copy=False)
        self._state = self._tensors.tree()

    def _check(self, images: Tensor) -> Tensor:
        """Return the images in the data type and on the device of the backbone."""
        size = self._config.image_size
        if not isinstance(images, Tensor) or not images.is_floating_point():
            raise FczooError(
                "images are not a tensor of floating-point numbers; give "
                "torch.stack([model.transform(image), ...])"
            )
        if images.ndim != 4 or images.shape[1:] != (3, size, size):
            raise FczooError(
                f"images have shape {list(images.shape)}; give [B, 3, {size}, {size}], normalised "
                "as model.transform returns them"
            )
        return images.to(self._backbone.device, self._backbone.dtype)

    def extra_repr(self) -> str:
        """Describe the model in one line."""
        return (
            f"{self.method.name} on {self.record.dataset}, {len(self.classes)} classes, "
            f"{self._config.name}"
        )
