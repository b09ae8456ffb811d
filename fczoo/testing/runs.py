"""Common parts of the checks: messages, and properties on many random cases."""

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
    """Raise AssertionError with ``sentence`` unless a condition holds, also under ``python -O``.

    Args:
        holds: The condition.
        sentence: What is wrong and what to do.

    Raises:
        AssertionError: ``holds`` is false.
    """
    if not holds:
        raise AssertionError(sentence)


def check_random_cases(
    check: Callable[[Draw], None], times: int = TIMES, seed: int | None = None
) -> None:
    """Call a check on many random cases.

    hypothesis chooses them, and shrinks a case that fails; where it is not installed they are drawn
    with the seeds 0, 1, 2, ...

    Args:
        check: Function of ``draw``; it raises AssertionError for a case that fails.
        times: Number of cases.
        seed: Seed of the cases, from which all of them follow; None: others each time.

    Raises:
        AssertionError: A case fails.
    """
    try:
        from hypothesis import HealthCheck, given, settings
        from hypothesis import seed as fix_seed
        from hypothesis import strategies as st
        from hypothesis.errors import Flaky
    except ImportError:
        for case in range(times):
            check(_draws(np.random.default_rng([seed or 0, case])))
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
            failures.append(error)
            raise

    failures: list[AssertionError] = []
    try:
        (attempt if seed is None else fix_seed(seed)(attempt))()
    except Flaky:  # a case that fails once and passes the next time has failed
        raise failures[-1] from None


def _draws(rng: np.random.Generator) -> Draw:
    return lambda low, high: int(rng.integers(low, high + 1))


@contextmanager
def quiet() -> Iterator[None]:
    """Silence fczoo's warnings inside; random cases give many."""
    log = logging.getLogger("fczoo")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def need_documented(cls: Any, label: str) -> None:
    """Raise AssertionError unless a registered entry and each of its options have a description.

    Args:
        cls: Registered class or function.
        label: Its name in messages.

    Raises:
        AssertionError: A docstring or the meaning of an option is missing.
    """
    need(
        cls.__doc__
        and not cls.__doc__.startswith(
            f"{cls.__name__}("
        ),  # not the docstring that dataclass generates
        f"{label} does not say what it is; write a docstring",
    )
    options = fields(cls) if is_dataclass(cls) else ()
    silent = [f.name for f in options if not f.metadata.get("meaning")]
    need(
        not silent,
        f"{label} does not say what {', '.join(silent)} means; declare it with fczoo.option",
    )


def need_one_line(error: Exception, label: str) -> None:
    """Raise AssertionError unless an error's message is one line that a user can read.

    Args:
        error: The error.
        label: Name of what raised it.

    Raises:
        AssertionError: The message is empty or has several lines.
    """
    need(
        re.fullmatch(r".*\S.*", str(error)),
        f"{label} refuses with {str(error)!r}; raise FczooError with one line",
    )
