"""A kept model as a module of torch."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fczoo.core.backbone import Backbone
from fczoo.core.errors import FczooError
from fczoo.core.method import Method
from fczoo.core.tree import Tree
from fczoo.federation.model_record import ModelRecord
from fczoo.models.tensors import prediction_batch
from fczoo.models.transform import ViewConfig, evaluation_transform


class _TensorTree(nn.Module):
    """Named tensors as buffers, which follow the module to its device."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        super().__init__()
        for name, value in tensors.items():
            self.register_buffer(_buffer_name(name), value)
        self.names = tuple(tensors)

    def tree(self) -> Tree:
        """Return the tensors by their own names, in order."""
        return {name: self.get_buffer(_buffer_name(name)) for name in self.names}


def _buffer_name(name: str) -> str:
    """Return the name of a tensor's buffer, without dots and apart from those of functions."""
    return f"/{name.replace('.', '/')}"


class Classifier(nn.Module):
    """The global model of a run, for inference: images -> logits over the classes seen.

    Attributes:
        classes: Names of the classes, in the order of the logits.
        transform: torchvision transform from an image of PIL to a tensor [3, S, S], with the
            pixels of the run's evaluation.
        method: Method that was trained.
        task: Last learned task.
        record: Content of ``model.json``.
    """

    def __init__(self, record: ModelRecord, method: Method, backbone: Backbone, state: Tree):
        super().__init__()
        self.record, self.method, self.task = record, method, record.task
        self._inputs = method.training().inputs
        self.classes = tuple(record.classes)
        config = backbone.config
        self.transform = evaluation_transform(
            ViewConfig(
                record.stored_size, config.image_size, record.test_crop, config.mean, config.std
            )
        )
        self._config, self._sha256 = config, backbone.sha256
        self._weights, self._tensors = _TensorTree(backbone.weights), _TensorTree(state)
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
        return logits.masked_fill(~self.get_buffer("has_images"), -torch.inf)

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
