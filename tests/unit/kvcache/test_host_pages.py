"""The books of RAM below the pool: which pages it hands out."""

from __future__ import annotations

from holdfast.kvcache.host_pages import HostPages


def test_pages_are_handed_out_in_order_also_after_a_reset() -> None:
    """So that what is saved together lies together, and is copied in one piece."""
    host = HostPages(1, 0, lambda key: None)
    host.grow(64)
    for turn in range(3):
        taken = [host.reserve(0, bytes([turn, number])) for number in range(64)]
        assert taken == [*range(64)]
        for page in range(64):
            host.arrived(page)
        host.clear()
        host.recount()
