"""What the checks share: one sentence for what is wrong, and a property tried on many random cases."""

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

Draw = Callable[[int, int], int]
"""``draw(low, high)``: a whole number, both ends included."""

TIMES = 40  # random cases of each property


def need(holds: Any, sentence: str) -> None:
    """Raise AssertionError with ``sentence`` unless something holds. Unlike ``assert``, also under ``python
    -O``."""
    if not holds:
        raise AssertionError(sentence)


def tried(check: Callable[[Draw], None], times: int = TIMES) -> None:
    """Call ``check(draw)`` on many random cases: those that hypothesis finds, which also shrinks a case
    that fails, or, where it is not installed, the cases of the seeds 0, 1, 2, ..."""
    try:
        from hypothesis import HealthCheck, given, settings
        from hypothesis import strategies as st
        from hypothesis.errors import Flaky
    except ImportError:
        for seed in range(times):
            check(_draws(np.random.default_rng(seed)))
        return

    @settings(
        max_examples=times,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def attempt(data: Any) -> None:
        try:
            check(lambda low, high: data.draw(st.integers(low, high)))
        except AssertionError as error:
            failed.append(error)
            raise

    failed: list[AssertionError] = []
    try:
        attempt()
    except Flaky:  # what fails once and passes the next time has failed
        raise failed[-1] from None


def _draws(rng: np.random.Generator) -> Draw:
    return lambda low, high: int(rng.integers(low, high + 1))


@contextmanager
def quiet() -> Iterator[None]:
    """Without fczoo's warnings, of which random cases give many."""
    log = logging.getLogger("fczoo")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def need_documented(cls: Any, label: str) -> None:
    """Raise AssertionError where a registered class or function, or an option of it, does not say what it
    means."""
    need(
        cls.__doc__ and not cls.__doc__.startswith(f"{cls.__name__}("),  # not the one that dataclass makes up
        f"{label} does not say what it is; write a docstring",
    )
    options = fields(cls) if is_dataclass(cls) else ()
    silent = [f.name for f in options if not f.metadata.get("meaning")]
    need(not silent, f"{label} does not say what {', '.join(silent)} means; declare it with fczoo.option")


def need_one_line(error: Exception, label: str) -> None:
    """Raise AssertionError unless an error's message is one line that a user can read."""
    need(
        re.fullmatch(r".*\S.*", str(error)),
        f"{label} refuses with {str(error)!r}; raise FczooError with one line",
    )
