"""How far a batch is, on standard error: a bar for people at a terminal, a plain line now and then for a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from holdfast.errors import printable
from holdfast.units import format_duration

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

LINE_EVERY_S = 30.0
LOST_SAID = 10
"""Lines without an answer that are named; the others are counted."""


class BatchProgress:
    """Within its `with` block a bar stands where standard error is a terminal."""

    def __init__(self, *, total: int, done: int, refused: int = 0, generated: Callable[[], int]) -> None:
        """`done`: by earlier runs, `refused` of them with an error. `generated`: tokens so far."""
        self._total = total
        self._done = done
        self._generated = generated
        self._failed = refused
        self.lost = 0
        """Lines that were asked, and have no answer for a reason of the server's own."""
        self._began_s = self._said_s = time.monotonic()
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> BatchProgress:
        if sys.stderr.isatty():
            self._open()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def answered(self, good: bool) -> None:
        self._done += 1
        self._failed += not good
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._done, speed=self._speed())
        elif self._bar is None and time.monotonic() - self._said_s >= LINE_EVERY_S:
            self._said_s = time.monotonic()
            print(f"holdfast: {self.story()}", file=sys.stderr, flush=True)

    def lose(self, why: str) -> None:
        self.lost += 1
        if self.lost <= LOST_SAID:
            print(f"holdfast: {printable(why)}", file=sys.stderr, flush=True)

    def story(self) -> str:
        """Where it stands, in one line."""
        failed = f", {self._failed:,} of them errors" if self._failed else ""
        took = format_duration(time.monotonic() - self._began_s)
        return f"{self._done:,} of {self._total:,} lines answered{failed}; {self._speed()}, {took}"

    def _speed(self) -> str:
        return f"{self._generated() / max(time.monotonic() - self._began_s, 1e-3):,.0f} tok/s"

    def _open(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("lines"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[speed]}"),
            console=Console(stderr=True),
        )
        self._task = self._bar.add_task("lines", total=self._total, completed=self._done, speed="")
        self._bar.start()
