"""How many examples hypothesis draws: a third in `make test`, which draws the same ones at every run and so finds
nothing new in more of them, and all in long runs."""

from __future__ import annotations

import hypothesis


def examples(count: int) -> int:
    return max(5, count // 3) if in_quick_run() else count


def in_quick_run() -> bool:
    """Of `make test`; asked for when a file of tests is read."""
    return hypothesis.settings.default.derandomize
