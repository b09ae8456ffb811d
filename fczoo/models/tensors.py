"""Tensors of a server's state that prediction reads."""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fczoo.core.backbone import Backbone
from fczoo.core.method import Method
from fczoo.core.tree import Tree
from fczoo.core.types import Batch, Task, whole_batch


def prediction_batch(inputs: Collection[str], backbone: Backbone, images: Tensor) -> Batch:
    """Return a batch of images with the inputs that a method declares.

    Args:
        inputs: Declared inputs of the method, ``Training.inputs``.
        backbone: Frozen backbone.
        images: Normalised images [B, 3, S, S].
    """
    labels = torch.zeros(len(images), dtype=torch.int64, device=images.device)
    query = backbone(images) if "query" in inputs else None
    return whole_batch(
        images if "images" in inputs else images.new_empty(len(images), 0), labels, query
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
    with torch.no_grad():
        batch = prediction_batch(method.training().inputs, backbone, image)
        with _ReadRecorder() as recorder:
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
