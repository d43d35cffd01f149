"""The books of RAM below the pool: which pages it hands out, and what pages hold that come later."""

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


def test_what_pages_hold_is_found_as_they_come_and_looked_for_no_longer() -> None:
    """Pages are pinned piece by piece after a server woke up; with every step it is asked whether there are more."""
    host, pooled = HostPages(1, 0, lambda key: None), (0, b"in the pool")
    host.expect([(0, b"forgotten", 0), (*pooled, 1), (0, b"first", 3), (0, b"second", 2), (0, b"computed", 4)])
    host.forget(0, b"forgotten")
    host.grow(2, lambda key: key == pooled)
    host.check_doubles([pooled])
    assert dict(host.pages(0)) == {b"in the pool": 1}
    assert host.reserve(0, b"computed") == 0
    host.grow(5)
    assert dict(host.pages(0)) == {b"in the pool": 1, b"first": 3, b"second": 2}
    host.arrived(0)
    host.recount()
    assert not host._expected
    assert [host.reserve(0, bytes([number])) for number in range(3)] == [4, 3, 2], "free ones, then the oldest"
    host.grow(5)
    host.recount()
