"""Messages between server and site, in the format of ``fczoo.federation.checkpoint``.

The server first calls all sites to enrol. Then it sends the same requests as to remote workers
(``fczoo.federation.remote``), with the name of the run. A site responds with its enrolment, an
upload, or the reason of its refusal.
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
from fczoo.federation.checkpoint import format_of, header_size, pack, unpack
from fczoo.federation.client import ClientRequest
from fczoo.federation.remote import unpack_request

CALL, ENROLMENT, UPLOAD, REFUSAL = (
    "fczoo-call-1",
    "fczoo-enrolment-1",
    "fczoo-upload-1",
    "fczoo-refusal-1",
)

NUMBER_BYTES = 8  # bytes per element of an upload
HEADER_BYTES = 2**16  # bytes for name and shape per tensor, and for plain values

LARGEST_HEADER = 2**22  # bytes of names, shapes and plain values, which become Python objects

T = TypeVar("T")
# number of images of one task; the limit bounds the server's memory
Images = Annotated[int, msgspec.Meta(ge=0, le=10_000_000)]


class InvalidMessage(ValueError):
    """Error for bytes that are not a valid message of the expected kind."""


class Call(msgspec.Struct, frozen=True):
    """Call to enrol in a new run, or in one that resumes after its server stopped."""

    run: Annotated[str, msgspec.Meta(max_length=64)]  # unique name, which the ledger stores
    terms: dict[str, Any]  # see ``terms_of``
    resumes: bool = False  # the run resumes


class Enrolment(msgspec.Struct, frozen=True):
    """Enrolment of a site: all that the server learns about its images before the first round."""

    images: list[Images]  # number of images of each task
    # labels with images, numbered in order of arrival; None: not reported
    classes: list[Count] | None


class UploadInfo(msgspec.Struct, frozen=True):
    """Plain values of a site's upload."""

    question: str  # seal of the request, see ``fczoo.federation.checkpoint.content_hash``
    images: Count  # number of images behind the upload
    loss: float | None  # mean training loss; None: not trained, or not reported
    exemplars: list[Count]  # number of stored images of each task


class Refusal(msgspec.Struct, frozen=True):
    """Reason of a site's refusal."""

    reason: str


def serialize(form: str, info: msgspec.Struct, tensors: Tree | None = None) -> bytes:
    """Serialize a message.

    Args:
        form: Form of the message, such as ``CALL``.
        info: Plain values.
        tensors: Tensors by name. None: no tensors.

    Returns:
        The bytes.
    """
    return pack(form, {"payload": tensors or {}}, msgspec.to_builtins(info))


def deserialize(form: str, content: bytes, kind: type[T]) -> tuple[T, Tree]:
    """Deserialize a message and its tensors.

    Args:
        form: Form that the message must have.
        content: Bytes of the message.
        kind: Type of its plain values.

    Returns:
        Plain values, and tensors by name.

    Raises:
        InvalidMessage: The bytes are not such a message.
    """
    with _as_invalid_message(content):
        trees, notes = unpack(form, content)
        return convert_json(notes, kind), trees.get("payload", {})


def is_call(content: bytes) -> bool:
    """Return whether a message calls a site to enrol.

    Args:
        content: Bytes of the message.

    Raises:
        InvalidMessage: The bytes are not a message.
    """
    with _as_invalid_message(content):
        return format_of(content) == CALL


def refusal_reason(content: bytes) -> str | None:
    """Return the reason of a refusal, or None for another message.

    Args:
        content: Bytes of the message.

    Raises:
        InvalidMessage: The bytes are not a message.
    """
    with _as_invalid_message(content):
        is_refusal = format_of(content) == REFUSAL
    return deserialize(REFUSAL, content, Refusal)[0].reason if is_refusal else None


def read_request(content: bytes, device: torch.device) -> tuple[ClientRequest, str]:
    """Deserialize a site's request.

    Args:
        content: Bytes of the message.
        device: Device of the site, to which the tensors are moved.

    Returns:
        The request, and the name of the run.

    Raises:
        InvalidMessage: The bytes are not a request.
    """
    with _as_invalid_message(content):
        request, notes = unpack_request(content, device)
        state, control = (
            move_to_device(request.state, device),
            move_to_device(request.control, device),
        )
        local_request = request._replace(
            state=state, control=control, ctx=replace(request.ctx, shared=state)
        )
        return local_request, str(notes["run"])


def upload_limit(request: ClientRequest, size: int, method: Method, width: int) -> int:
    """Estimate the largest size of an upload in bytes, from the method's declaration.

    Trained tensors and control variates are as large as those in the request. The declaration does
    not give the dimension D of a statistic. D is at most the largest dimension of a tensor in the
    request, the width of the backbone, or an option of the method.

    Args:
        request: The request.
        size: Size of the request in bytes.
        method: Method of the run.
        width: Feature dimension of the backbone.
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
    """Move tensors to a device; server and sites may have different devices.

    Args:
        tree: Tensors by name.
        device: Target device.

    Returns:
        Tensors on this device.
    """
    return {name: value.to(device) for name, value in tree.items()}


@contextmanager
def _as_invalid_message(content: bytes) -> Iterator[None]:
    """Convert errors inside to InvalidMessage; raise it also for a header that is too large."""
    try:
        if (size := header_size(content)) > LARGEST_HEADER:
            raise ValueError(f"its header has {size} bytes, but the limit is {LARGEST_HEADER}")
        yield
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidMessage(first_line(error)) from error
