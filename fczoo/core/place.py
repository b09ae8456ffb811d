"""Where a run is, so that a warning can say it."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_place: ContextVar[str] = ContextVar("place", default="")


@contextmanager
def at(place: str) -> Iterator[None]:
    """Inside it, warnings are about ``place``, such as a task or a client in it."""
    token = _place.set(place)
    try:
        yield
    finally:
        _place.reset(token)


def place() -> str:
    """What ``at`` was told last; empty outside of it."""
    return _place.get()
