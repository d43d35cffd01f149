"""Numbers of rows that steps are padded to, so that all of them can be tried before the first request.

cuBLAS chooses a kernel by the number of rows, and the driver loads its code when it is first used, which takes memory:
with a few sizes everything is loaded at the start, and nothing can fail for want of memory later. Also the sizes of
captured graphs, whose memory the planner counts: the sizes are its own.
"""

from __future__ import annotations

from bisect import bisect_left

from holdfast.footprint.gpu import padded_sizes

__all__ = ["padded", "padded_sizes"]


def padded(rows: int, most: int) -> int:
    sizes = padded_sizes(most)
    return sizes[bisect_left(sizes, rows)]
