"""Says on stderr how far a download is: a bar for people at a terminal, a few plain lines for a log."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from holdfast.units import format_bytes


def say(text: str, *, progress: bool) -> None:
    if progress:
        print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def byte_progress(label: str, total_bytes: int, *, progress: bool) -> Iterator[Callable[[int], None]]:
    """Yields a function that takes the bytes done so far."""
    if not progress:
        yield lambda done: None
    elif sys.stderr.isatty():
        with _bar(label, total_bytes) as update:
            yield update
    else:
        yield _lines(label, total_bytes)


@contextlib.contextmanager
def _bar(label: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=total_bytes)
        yield lambda done: bar.update(task, completed=min(done, total_bytes))


def _lines(label: str, total_bytes: int) -> Callable[[int], None]:
    reported = 0

    def update(done: int) -> None:
        nonlocal reported
        quarters = min(4, done * 4 // max(total_bytes, 1))
        if quarters > reported:
            reported = quarters
            say(f"{label}: {quarters * 25}% of {format_bytes(total_bytes)}", progress=True)

    return update
