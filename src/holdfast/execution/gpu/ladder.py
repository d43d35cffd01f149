"""Numbers of rows that steps are padded to, so that all of them can be tried before the first request.

cuBLAS chooses a kernel by the number of rows, and the driver loads its code when it is first used, which takes memory:
with a few sizes everything is loaded at the start, and nothing can fail for want of memory later. Also the sizes of
captured graphs.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import cache


@cache
def padded_sizes(most: int) -> tuple[int, ...]:
    """Ascending, `most` the last: padding costs a quarter at worst beyond 64 rows, an eighth beyond 256."""
    steps = (1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 1024, 32), *range(1024, most, 128))
    return (*(size for size in steps if size < most), most)


def padded(rows: int, most: int) -> int:
    sizes = padded_sizes(most)
    return sizes[bisect_left(sizes, rows)]
