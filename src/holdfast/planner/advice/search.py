"""The one search for remedies: candidate changes in, those that were planned and fit out, in the same order.

Knows neither questions nor plans: what a change is, and how it is planned, is the caller's. `plan` searches the table
of remedies.py, `serve` and the doctor their own candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from holdfast.errors import HoldfastError

C = TypeVar("C")
P = TypeVar("P")


def that_fit(changes: Iterable[C], plan: Callable[[C], P | None]) -> Iterator[tuple[C, P]]:
    """Lazy: what the caller does not take is not planned. `plan` returns None, or raises, where it does not fit."""
    for change in changes:
        try:
            found = plan(change)
        except HoldfastError:
            continue
        if found is not None:
            yield change, found


def first_that_fits(changes: Iterable[C], plan: Callable[[C], P | None]) -> tuple[C, P] | None:
    return next(that_fit(changes, plan), None)
