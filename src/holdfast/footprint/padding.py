"""Numbers of rows that steps on a GPU are padded to, and so how many graphs there will be. No torch."""

from __future__ import annotations

from functools import cache


@cache
def padded_sizes(most: int) -> tuple[int, ...]:
    """Ascending, `most` the last: padding costs a quarter at worst beyond 64 rows, an eighth beyond 256."""
    steps = (1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 1024, 32), *range(1024, most, 128))
    return (*(size for size in steps if size < most), most)
