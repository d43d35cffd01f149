"""What one rendering of a chat template may cost, and what it has left. Knows nothing of Jinja's nodes and filters.

    steps     nodes of a template that are run, items looked at, characters worked on: the same at every run
    seconds   of the thread's own processor time, looked at every few microseconds' worth of steps
    size      of one value, and of all values that are made together
    weight    of a nested value: what it is when written out. Lists that hold one list twice, thirty times over, are
              short until they are printed, compared or hashed

A single call into C cannot be interrupted and keeps every other thread of the process waiting. So each has a limit on
its operands such that it ends within milliseconds, and is charged by their size before it is made.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from jinja2.exceptions import SecurityError

MAX_VALUE_CHARS = 16_000_000
"""Of one value, and of the prompt: above any context window; copying it takes milliseconds."""
MAX_VALUE_BYTES = 2 * MAX_VALUE_CHARS
"""The same for text whose characters take two or four bytes each."""
MAX_MADE_BYTES = 256_000_000
"""Of all values one rendering makes together."""
MAX_ITEMS = 1_000_000
"""Of one list, and of a nested value with all that is in it."""
MAX_DEPTH = 128
"""Of values inside one another: Python compares, hashes and prints them by recursion in C."""
MAX_WRITTEN = 1_000_000
"""Weight of a nested value that one call may write out or hash."""
MAX_COMPARED = 100_000
"""Items of two nested values that one call compares."""
MAX_LISTED_CHARS = 100_000
"""Of a text that is taken apart into its characters, each of which becomes a value."""
MAX_SPREAD = 10_000
"""Arguments that one call may take from a list."""
MAX_NUMBER_BITS = 4096
MAX_STEPS = 10_000_000
MAX_CPU_S = 5.0
"""Of the thread's own time, so that a busy machine refuses nobody; real templates need milliseconds."""
_STEPS_A_LOOK = 128
"""At the clock, which costs more than a step."""
_CHARS_A_STEP = 64
"""Of a text that is searched or copied."""
_SMALL_CHARS = 4096
_SLICE_ITEMS = 1024

VIEWS: Any = (type({}.keys()), type({}.values()), type({}.items()))
CONTAINERS: Any = (list, tuple, dict, set, frozenset, *VIEWS)
_SIZED = (str, list, tuple, dict)


class SlowRenderingError(Exception):
    """A rendering that was to be quick is not: it is to be done again where nobody waits for it."""


class Budget:
    """What one rendering has left. Whatever goes too far raises SecurityError."""

    def __init__(self, cpu_s: float, patience_s: float | None = None) -> None:
        """`patience_s`: less than a rendering may take; at its end SlowRenderingError is raised."""
        self._steps = MAX_STEPS
        self._made_bytes = MAX_MADE_BYTES
        self._until_look = _STEPS_A_LOOK
        self._cpu_s = cpu_s
        self._patience_s = patience_s
        self._end_s = time.thread_time() + (cpu_s if patience_s is None else patience_s)

    def step(self, count: int = 1) -> None:
        self._steps -= count
        self._until_look -= count
        if self._until_look < 0:
            self._look()

    def _look(self) -> None:
        self._until_look = _STEPS_A_LOOK
        if self._steps < 0:
            raise SecurityError(f"more than {MAX_STEPS} steps in one rendering")
        if time.thread_time() > self._end_s:
            if self._patience_s is not None:
                raise SlowRenderingError
            raise SecurityError(f"more than {self._cpu_s:g} s in one rendering")

    def work(self, chars: int) -> None:
        """Charges a call that looks at this many characters."""
        if chars > _CHARS_A_STEP:
            self.step(chars // _CHARS_A_STEP)

    def made(self, value: Any) -> Any:
        """Charges a new value by its own length; its items were charged when they were made."""
        if isinstance(value, _SIZED):
            size = len(value)
            if size > _SMALL_CHARS:
                size = self._checked_bytes(value, size)
                self.work(size)
            self._made_bytes -= size
            if self._made_bytes < 0:
                raise SecurityError(f"more than {MAX_MADE_BYTES} characters created in one rendering")
        elif isinstance(value, int):
            check_number(value)
        return value

    def _checked_bytes(self, value: str | list[Any] | tuple[Any, ...] | dict[Any, Any], size: int) -> int:
        if not isinstance(value, str):
            if size > MAX_ITEMS:
                raise SecurityError(f"a value of more than {MAX_ITEMS} items")
            return 8 * size
        self.room_for(size)
        size_bytes = value.__sizeof__()
        if size_bytes > MAX_VALUE_BYTES:
            raise SecurityError(f"a value of more than {MAX_VALUE_BYTES} bytes")
        return size_bytes

    def room_for(self, chars: float) -> None:
        if chars > MAX_VALUE_CHARS:
            raise SecurityError(f"a value of more than {MAX_VALUE_CHARS} characters")

    def limit(self, count: float, most: int, what: str) -> None:
        if count > most:
            raise SecurityError(f"more than {most} {what}")

    def weigh(self, *values: Any, most: int = 8 * MAX_ITEMS) -> int:
        """Characters of nested values written out, where each place counts, however often it is the same thing."""
        chars, items = self._measured(values, most // 8)
        self.limit(chars + 8 * items, most, "characters in a nested value")
        return chars + 8 * items

    def _measured(self, values: Sequence[Any], most_items: int) -> tuple[int, int]:
        """Characters and items."""
        chars = items = depth = 0
        level = values
        while level:
            inner: list[Any] = []
            for start in range(0, len(level), _SLICE_ITEMS):
                piece = level[start : start + _SLICE_ITEMS]
                self.step(len(piece))
                for value in piece:
                    if isinstance(value, str):
                        chars += len(value)
                    elif isinstance(value, CONTAINERS):
                        items += len(value)
                        self.limit(items, min(most_items, MAX_ITEMS), "items in a nested value")
                        inner.extend(value)
                        if isinstance(value, dict):
                            inner.extend(value.values())
                self.room_for(chars)
            depth += 1
            self.limit(depth, MAX_DEPTH, "levels of nesting")
            level = inner
        return chars, items

    def written(self, *values: Any) -> int:
        """Their weight, where one call writes them out or hashes them. A text by itself is only copied."""
        chars = 0
        nested = []
        for value in values:
            if isinstance(value, str):
                chars += len(value)
            elif isinstance(value, CONTAINERS):
                nested.append(value)
        self.work(chars)
        if not nested:
            return chars
        weight = self.weigh(*nested, most=MAX_WRITTEN)
        self.work(4 * weight)
        return chars + weight

    def compared(self, left: Any, right: Any) -> None:
        """Texts are compared as fast as memory is read, nested values item by item."""
        if isinstance(left, CONTAINERS) or isinstance(right, CONTAINERS):
            chars, _ = self._measured((left, right), MAX_COMPARED)
            self.work(chars // 4)
        elif isinstance(left, str) and isinstance(right, str):
            self.work(min(len(left), len(right)) // 4)

    def listed(self, items: Iterable[Any], most: int = MAX_ITEMS) -> list[Any]:
        """A list of them, each charged; for what may be endless, or slow to say the next."""
        if isinstance(items, str):
            self.limit(len(items), MAX_LISTED_CHARS, "characters to split")
        if isinstance(items, str | list | tuple | dict):
            self.limit(len(items), most, "items")
            self.step(len(items) // 4)
            return list(items)
        found: list[Any] = []
        for item in items:
            self.step()
            found.append(item)
            if len(found) > most:
                raise SecurityError(f"more than {most} items")
        return found


def check_number(value: int) -> None:
    """No larger number ever comes to be: with these, all that Python does is a matter of microseconds."""
    if value.bit_length() > MAX_NUMBER_BITS:
        raise SecurityError(f"a number of more than {MAX_NUMBER_BITS} bits")


class _Running(threading.local):
    budget: Budget
    patience_s: float | None = None


_running = _Running()


@contextmanager
def rendering(cpu_s: float | None = None) -> Iterator[Budget]:
    """Around each rendering; a template runs in one thread from beginning to end. `cpu_s`: where it is to have less."""
    _running.budget = Budget(MAX_CPU_S if cpu_s is None else cpu_s, _running.patience_s)
    try:
        yield _running.budget
    finally:
        del _running.budget


@contextmanager
def impatient(patience_s: float) -> Iterator[None]:
    """Renderings of this thread that take longer end in SlowRenderingError, and so does every compilation."""
    before, _running.patience_s = _running.patience_s, patience_s
    try:
        yield
    finally:
        _running.patience_s = before


def is_impatient() -> bool:
    return _running.patience_s is not None


def budget() -> Budget:
    """Of the rendering that this thread is in."""
    return _running.budget
