"""Kept models as PyTorch modules: the view of an image, the forward, and the tensors it reads."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fczoo.backbones.plugged_vit import TensorBuffers
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
    """Transform of an image of PIL to the input of the backbone, as the run's evaluation took it."""

    stored_size: int  # side in pixels of the stored square
    image_size: int  # side of the input in pixels
    test_crop: float  # part of each side that the view shows
    mean: tuple[float, ...]
    std: tuple[float, ...]
    resize: Resize = "crop"  # part of an image that the stored square shows

    def __call__(self, image: Image.Image) -> Tensor:
        """Make an image square and resize it as data sets of files do, and normalise it.

        An orientation tag turns the image first, as in a data set of users.

        Args:
            image: Image of any mode and size.

        Returns:
            Input of the backbone, float32 [3, image_size, image_size].

        Raises:
            FczooError: The argument is not an image of PIL, or has more than 8 bits per channel.
        """
        if not isinstance(image, Image.Image):
            raise FczooError(
                f"the transform got {type(image).__name__}; give an image of PIL: Image.open(FILE)"
            )
        square = np.array(to_square(image, self.stored_size, upright=True, resize=self.resize))
        return self.normalise(torch.from_numpy(square).permute(2, 0, 1))

    def normalise(self, pixels: Tensor) -> Tensor:
        """Resize the middle of a stored square and normalise it.

        Args:
            pixels: uint8 [3, S, S].

        Returns:
            Input of the backbone, float32 [3, image_size, image_size].
        """
        images = evaluation_view(pixels[None].float() / 255, self.image_size, self.test_crop)
        mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (self.mean, self.std))
        return images.sub(mean).div(std)[0]


def prediction_batch(inputs: Collection[str], backbone: Backbone, images: Tensor) -> Batch:
    """Return a batch of images with the inputs that a method declares.

    Args:
        inputs: Declared inputs of the method, ``Training.inputs``.
        backbone: Frozen backbone.
        images: Normalised images [B, 3, S, S].
    """
    labels = torch.zeros(len(images), dtype=torch.int64, device=images.device)
    nothing, none = images.new_empty(len(images), 0), images.new_empty(0)
    # torch.export of torch 2.6 cannot read tensors that are defaults of fields, so all are given
    return Batch(
        x=images if "images" in inputs else nothing,
        y=labels,
        w=torch.ones_like(labels, dtype=images.dtype),
        query=backbone(images) if "query" in inputs else nothing,
        teacher=images.new_empty(0, 0),
        class_count=none,
        position=labels.new_empty(0),
        draws=images.new_empty(0, 0),
        epoch=labels.new_empty(0),
        client=labels.new_empty(0),
    )


def prediction_tensors(method: Method, backbone: Backbone, state: Tree, task: Task) -> Tree:
    """Return the tensors of a state that ``predict`` and ``features`` read.

    Both run once on a blank image. A tensor is read if an operation of torch, its shape or its
    length uses it. A declaration by each method could be forgotten; this cannot.

    Args:
        method: Method of the state.
        backbone: Frozen backbone.
        state: The server's state.
        task: Last learned task.

    Returns:
        A part of the state, in the same order.
    """
    size = backbone.config.image_size
    image = torch.zeros(1, 3, size, size, dtype=backbone.dtype, device=backbone.device)
    label = torch.zeros(1, dtype=torch.int64, device=image.device)
    # any numbers will do: the query of an image does not depend on the state, and takes a forward
    query = image.new_ones(1, backbone.dim) if "query" in method.training().inputs else None
    batch = whole_batch(image, label, query)
    with torch.no_grad(), _ReadRecorder() as recorder:
        method.predict(backbone, dict(state), batch, task)
        method.features(backbone, dict(state), batch)
    return {name: value for name, value in state.items() if id(value) in recorder.read}


class _ReadRecorder(TorchFunctionMode):
    """Recorder of the identities of all tensors that functions of torch get."""

    def __init__(self) -> None:
        super().__init__()
        self.read: set[int] = set()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.read.update(map(id, _tensors((args, kwargs or {}))))
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
    """The global model of a run, for inference: images -> logits over the classes seen.

    Attributes:
        classes: Names of the classes, in the order of the logits.
        transform: Transform of an image of PIL to a tensor [3, S, S], with the pixels of the
            run's evaluation.
        method: Method that was trained.
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
        """Compute logits, or scores of methods without logits.

        Args:
            images: Images [B, 3, S, S], each as ``transform`` returns it.

        Returns:
            Logits [B, classes]. They are minus infinity for a class of which no client had images:
            as in the run's evaluation it is never predicted.

        Raises:
            FczooError: The images have another shape or type.
        """
        batch = prediction_batch(self._inputs, self._backbone, self._check(images))
        logits = self.method.predict(self._backbone, self._state, batch, self.task)
        return logits.masked_fill(~self.has_images, -torch.inf)

    def features(self, images: Tensor) -> Tensor:
        """Compute the features [B, D] that the classifier reads.

        Args:
            images: Images [B, 3, S, S], each as ``transform`` returns it.

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
        """Return the tensors of the method, by the names that it gives them."""
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
                f"a kept model is for inference only; train {self.method.name} with `fczoo bench`"
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
        """Return one line about the model."""
        return (
            f"{self.method.name} on {self.record.dataset}, {len(self.classes)} classes, "
            f"{self._config.name}"
        )
