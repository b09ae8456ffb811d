"""Messages between a server and a site, as bytes of ``fczoo.federation.checkpoint``.

The server calls all sites to enrol, then sends them the requests that workers get
(``federation.spread``), with the name of the run. A site responds with its enrolment, with an
upload, or with the reason of its refusal.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Any, TypeVar

import msgspec
import torch

from fczoo.core.errors import first_line
from fczoo.core.files import Count, convert_json
from fczoo.core.method import Method
from fczoo.core.payload import ROW_DIMENSIONS
from fczoo.core.tree import Tree
from fczoo.federation.checkpoint import form_of, header_size, pack, unpack
from fczoo.federation.client import ClientRequest
from fczoo.federation.remote import asked_in

CALL, ENROLMENT, UPLOAD, REFUSAL = (
    "fczoo-call-1",
    "fczoo-enrolment-1",
    "fczoo-upload-1",
    "fczoo-refusal-1",
)

NUMBER_BYTES = 8  # of a number in an upload
HEADER_BYTES = 2**16  # of names and shapes per tensor, and of plain values

LARGEST_HEADER = 2**22  # bytes of names, shapes and plain values, which become Python objects

T = TypeVar("T")
# number of images of one task, at most as many as a server has memory for
Images = Annotated[int, msgspec.Meta(ge=0, le=10_000_000)]


class InvalidMessage(ValueError):
    """Bytes that are not a message, or another message."""


class Call(msgspec.Struct, frozen=True):
    """Start of a run, or its continuation after its server has ended."""

    run: Annotated[str, msgspec.Meta(max_length=64)]  # its unique name, which the ledger stores
    terms: dict[str, Any]  # see ``terms_of``
    goes_on: bool = False


class Enrolment(msgspec.Struct, frozen=True):
    """All that the server learns about a site's images before the first round."""

    images: list[Images]  # number of images of each task
    # labels of which it has images, in order of arrival; None: not reported
    classes: list[Count] | None


class About(msgspec.Struct, frozen=True):
    """Plain values of a site's upload."""

    question: str  # seal of the request, see ``serialization.seal_of``
    images: Count  # number of images behind the upload
    loss: float | None  # mean training loss; None: not trained, or not reported
    exemplars: list[Count]  # number of stored images of each task


class Refusal(msgspec.Struct, frozen=True):
    """Reason of a site's refusal."""

    reason: str


def serialize(form: str, about: msgspec.Struct, tensors: Tree | None = None) -> bytes:
    """Serialize a message.

    Args:
        form: Form of the message, such as ``CALL``.
        about: Plain values.
        tensors: Tensors by name. None: no tensors.

    Returns:
        The bytes.
    """
    return pack(form, {"payload": tensors or {}}, msgspec.to_builtins(about))


def deserialize(form: str, content: bytes, kind: type[T]) -> tuple[T, Tree]:
    """Deserialize a message and its tensors.

    Args:
        form: Form that the message must have.
        content: Bytes of the message.
        kind: Type of its plain values.

    Returns:
        Plain values, and tensors by name.

    Raises:
        Damaged: The bytes are not such a message.
    """
    with _as_invalid_message(content):
        trees, notes = unpack(form, content)
        return convert_json(notes, kind), trees.get("payload", {})


def is_call(content: bytes) -> bool:
    """Return whether a message calls a site to enrol.

    Args:
        content: Bytes of the message.

    Raises:
        Damaged: The bytes are not a message.
    """
    with _as_invalid_message(content):
        return form_of(content) == CALL


def refusal_reason(content: bytes) -> str | None:
    """Return the reason of a refusal, or None for another message.

    Args:
        content: Bytes of the message.

    Raises:
        Damaged: The bytes are not a message.
    """
    with _as_invalid_message(content):
        is_refusal = form_of(content) == REFUSAL
    return deserialize(REFUSAL, content, Refusal)[0].reason if is_refusal else None


def read_request(content: bytes, device: torch.device) -> tuple[ClientRequest, str]:
    """Deserialize a site's request.

    Args:
        content: Bytes of the message.
        device: Device of the site, to which the tensors are moved.

    Returns:
        The request, and the name of the run.

    Raises:
        Damaged: The bytes are not a request.
    """
    with _as_invalid_message(content):
        request, notes = asked_in(content, device)
        state, control = (
            move_to_device(request.state, device),
            move_to_device(request.control, device),
        )
        local_request = request._replace(
            state=state, control=control, ctx=replace(request.ctx, shared=state)
        )
        return local_request, str(notes["run"])


def upload_limit(request: ClientRequest, size: int, method: Method, width: int) -> int:
    """Return how many bytes the answer to a request may have, by what the method declares.

    Trained tensors and control variates are as large as those in the request. A declaration leaves
    the side D of a statistic open; D is at most the largest dimension of the tensors in the
    request, the width of the backbone or an option of the method.

    Args:
        request: The request.
        size: Its bytes.
        method: Method of the run.
        width: Features of the backbone.
    """
    tensors, classes = request.state.values(), request.ctx.task.stop
    options = [value for value in vars(method).values() if isinstance(value, int)]
    side = max([width, *options, *(side for value in tensors for side in value.shape)]) + 1
    # second moments of the inputs of every layer in the request, or of features
    moments = max(side**2, sum(max(value.shape, default=1) ** 2 for value in tensors))
    total = size
    for group in method.training().uploads.values():
        if group.statistics:
            numbers = classes * sum(side ** ROW_DIMENSIONS.get(n, 1) for n in group.statistics)
            total += NUMBER_BYTES * numbers
        elif group.content == "second moments":
            total += NUMBER_BYTES * moments
        else:  # whole tensors like those in the request, or one row like them per class
            total += (classes if group.layout == "samples" else 1) * size + NUMBER_BYTES * side
    return total + HEADER_BYTES * (1 + len(request.state))


def move_to_device(tree: Mapping[str, torch.Tensor], device: torch.device) -> Tree:
    """Move tensors to a device; sites and server may have different kinds.

    Args:
        tree: Tensors by name.
        device: Target device.

    Returns:
        Tensors on this device.
    """
    return {name: value.to(device) for name, value in tree.items()}


@contextmanager
def _as_invalid_message(content: bytes) -> Iterator[None]:
    """Raise InvalidMessage for errors inside, and for a header that is too large to be read."""
    try:
        if (size := header_size(content)) > LARGEST_HEADER:
            raise ValueError(f"its header has {size} bytes, at most {LARGEST_HEADER} are read")
        yield
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidMessage(first_line(error)) from error
