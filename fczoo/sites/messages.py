"""What passes between a server and a site, as bytes of ``fczoo.federation.wire``; nothing else does.

The server calls all sites to enrol, then asks them as it would ask workers (``federation.spread``), with the
name of the run. A site answers with its enrolment, with an upload, or says why it refuses.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Any, TypeVar

import msgspec
import torch

from fczoo.core.errors import first_line
from fczoo.core.files import Count, typed
from fczoo.core.tree import Tree
from fczoo.federation.client_side import Asked
from fczoo.federation.spread import asked_in
from fczoo.federation.wire import form_of, pack, unpack

CALL, ENROLMENT, UPLOAD, REFUSAL = "fczoo-call-1", "fczoo-enrolment-1", "fczoo-upload-1", "fczoo-refusal-1"

T = TypeVar("T")
Images = Annotated[int, msgspec.Meta(ge=0, le=10_000_000)]  # of one task: what a server makes room for


class Damaged(ValueError):
    """Bytes that are no message, or another one."""


class Call(msgspec.Struct, frozen=True):
    """A run begins, or goes on after its server has ended."""

    run: str  # its name, of which there is no second
    terms: dict[str, Any]  # see ``terms_of``
    goes_on: bool = False


class Enrolment(msgspec.Struct, frozen=True):
    """All that the server is told of a site's images before the first round."""

    images: list[Images]  # of each task
    classes: list[Count] | None  # that it has images of, in order of arrival; None: it does not say


class About(msgspec.Struct, frozen=True):
    """What a site says beside the tensors of its upload."""

    question: str  # seal of what was asked, see ``wire.seal_of``
    images: Count  # behind the upload
    loss: float | None  # mean of its training; None: there was none, or it does not say
    exemplars: list[Count]  # images that it keeps of those of each task


class Refusal(msgspec.Struct, frozen=True):
    """Why a site does not take part."""

    reason: str


def written(form: str, about: msgspec.Struct, tensors: Tree | None = None) -> bytes:
    """A message of a form."""
    return pack(form, {"payload": tensors or {}}, msgspec.to_builtins(about))


def read(form: str, content: bytes, kind: type[T]) -> tuple[T, Tree]:
    """What a message of a form says, and its tensors. Raises Damaged for any other bytes."""
    with _checked():
        trees, notes = unpack(form, content)
        return typed(notes, kind), trees.get("payload", {})


def is_call(content: bytes) -> bool:
    """Whether a site is called to enrol. Raises Damaged for bytes that are no message."""
    with _checked():
        return form_of(content) == CALL


def refused(content: bytes) -> str | None:
    """The reason, where the message is a refusal. Raises Damaged for bytes that are no message."""
    with _checked():
        is_refusal = form_of(content) == REFUSAL
    return read(REFUSAL, content, Refusal)[0].reason if is_refusal else None


def question_in(content: bytes, device: torch.device) -> tuple[Asked, str]:
    """What a site is asked, with all tensors on its device, and in which run.

    Raises Damaged for bytes that are no question.
    """
    with _checked():
        asked, notes = asked_in(content, device)
        state, control = placed(asked.state, device), placed(asked.control, device)
        here = asked._replace(state=state, control=control, ctx=replace(asked.ctx, shared=state))
        return here, str(notes["run"])


def placed(tree: Mapping[str, torch.Tensor], device: torch.device) -> Tree:
    """The tensors on a device: a site's need not be of the server's kind."""
    return {name: value.to(device) for name, value in tree.items()}


@contextmanager
def _checked() -> Iterator[None]:
    try:
        yield
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(first_line(error)) from error
