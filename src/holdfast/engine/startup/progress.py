"""Progress for people, on standard error: loading a model, working through prompts. Without a terminal a long load
has lines in the log instead."""

from __future__ import annotations

import logging
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

APPEARS_AFTER_S = 2.0
LINE_EVERY_S = 15.0
"""Without a terminal."""
log = logging.getLogger("holdfast")

BARS = {"pin": ("pinning MiB of RAM", 1 << 20), "load": ("loading tensors", 1)}
"""Stages that have one: its words, and what it counts."""


class RequestProgress:
    """A bar over prompts with tokens a second; it appears only when the work takes longer than a moment."""

    def __init__(self, total: int, *, shown: bool) -> None:
        self._total = total
        self._shown = shown and sys.stderr.isatty()
        self._begun_s = time.monotonic()
        self._done = 0
        self._tokens = 0
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> RequestProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, *, tokens: int, finished: bool) -> None:
        self._tokens += tokens
        self._done += finished
        elapsed_s = time.monotonic() - self._begun_s
        if not self._shown or elapsed_s < APPEARS_AFTER_S:
            return
        if self._bar is None:
            self._open()
        assert self._bar is not None
        assert self._task is not None
        self._bar.update(self._task, completed=self._done, speed=f"{self._tokens / elapsed_s:,.0f} tok/s")

    def _open(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("prompts"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[speed]}"),
            console=Console(stderr=True),
        )
        self._task = self._bar.add_task("prompts", total=self._total, speed="")
        self._bar.start()


class LoadProgress:
    """Hears an engine's start-up stages; shows a bar over the tensors of a load that takes longer than a moment, and
    over memory that is pinned before it. Weights that are quantized meanwhile take minutes on a CPU."""

    def __init__(self, *, restarts: bool = True) -> None:
        """`restarts`: a bar for an engine that is started again too; not where a prompt has the terminal by then."""
        self._begun_s: float | None = time.monotonic()
        self._terminal = self._shown = sys.stderr.isatty()
        self._restarts = restarts
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._words = ""
        self._line_s = 0.0
        """When the log had one last."""

    def __enter__(self) -> LoadProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def __call__(self, stage: str, done: int, total: int) -> None:
        now_s = time.monotonic()
        self._begun_s = now_s if self._begun_s is None else self._begun_s
        if stage == "ready":
            self._close()
            self._begun_s = None  # An engine that is started again is timed anew.
            self._shown = self._shown and self._restarts
        elif stage in BARS and total and self._shown and now_s - self._begun_s > APPEARS_AFTER_S:
            words, unit = BARS[stage]
            self._show(words, done // unit, total // unit)
        elif stage in BARS and total and not self._terminal and now_s - max(self._begun_s, self._line_s) > LINE_EVERY_S:
            words, unit = BARS[stage]
            self._line_s = now_s
            log.info("%s: %s of %s", words, f"{done // unit:,}", f"{total // unit:,}")
        elif stage not in BARS:
            self._close()

    def _show(self, words: str, done: int, total: int) -> None:
        if words != self._words:
            self._close()
            self._words = words
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (TextColumn(words), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._task = self._bar.add_task("loading", total=total)
            self._bar.start()
        assert self._task is not None
        self._bar.update(self._task, completed=done)

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
