"""Runs a blocking call with a time limit, so that a slow or silent server cannot hold up a plan. Knows no protocol."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def within(seconds: float, ask: Callable[[], T]) -> T:
    """What `ask` gives or raises; TimeoutError when it takes longer, and then it is left to itself."""
    answers: list[T] = []
    errors: list[Exception] = []

    def work() -> None:
        try:
            answers.append(ask())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=work, name="asking", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not answers:
        raise TimeoutError(f"no complete response within {seconds:g} s")
    return answers[0]
