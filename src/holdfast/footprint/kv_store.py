"""What a store of KV pages on disk takes of RAM, part by part: execution and the store allocate by it."""

from __future__ import annotations

from holdfast.units import GIB, MIB

STAGING_BYTES, QUEUE_BYTES = 32 * MIB, 64 * MIB
"""That pages come through from the disk, and that those wait in which are to be written there."""
STAGING_PLACES = 64
WORK_BYTES = 16 * MIB
"""Of its threads: what they write and check at once."""
USUAL_BYTES = 100 * GIB
"""On disk, at most, where no size was set."""
INDEX_BYTES = 260
"""For each page that the store may have: its record, its key and its place in a table."""
ALIGNED = 4096


def staging_stride(page_bytes: int) -> int:
    """From one page in memory to the next: reads past the page cache go to multiples of it."""
    return -(-page_bytes // ALIGNED) * ALIGNED


def staging_places(page_bytes: int) -> int:
    """Pages that come from the disk at once."""
    return max(1, min(STAGING_PLACES, STAGING_BYTES // staging_stride(page_bytes)))


def kv_store_terms(size_bytes: int, page_bytes: int, *, ways: int = 1) -> dict[str, int]:
    """When a store of so many bytes on disk is full. `ways`: 2 where pages also leave through buffers, as they do from
    a GPU."""
    return {
        "buffers": ways * staging_places(page_bytes) * staging_stride(page_bytes),
        "queue": QUEUE_BYTES,
        "work": WORK_BYTES,
        "index": size_bytes // page_bytes * INDEX_BYTES,
    }


def kv_store_bytes(size_bytes: int, page_bytes: int) -> int:
    """Of RAM, on a CPU."""
    return sum(kv_store_terms(size_bytes, page_bytes).values())
