"""What a process knows of an index that others change."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from prefix_pages import key_of

from holdfast.prefix_store.files.calls import Calls
from holdfast.prefix_store.files.index import RECORD, PageIndex, Records


def pages(first: int, count: int) -> Records:
    records = np.zeros(count, RECORD)
    records["key"] = [key_of(number).ljust(32, b"\0") for number in range(first, first + count)]
    records["check"], records["used"] = 7, 1
    records["generation"] = range(first + 1, first + count + 1)
    return records


def test_what_is_known_is_not_named_anew_when_it_is_looked_who_used_it(tmp_path: Path) -> None:
    """As before pages are evicted: others stamp theirs, and tell nobody."""
    path = tmp_path / "pages.index"
    PageIndex.create(path, Calls(), b"model".ljust(32), 4096, "")
    ours, theirs = PageIndex(path, Calls(), os.O_RDWR), PageIndex(path, Calls(), os.O_RDWR)
    for index in (ours, theirs):
        index.load()
    ours.change(range(20), pages(0, 20))
    theirs.refresh()
    theirs.stamp([(3, 1234)])
    named = ours.slots
    ours.load()
    assert ours.slots is named
    assert ours.records["used"].tolist() == [1, 1, 1, 1234, *[1] * 16]
    ours.forget(key_of(5).ljust(32, b"\0"), 5, 6)
    ours.load()
    assert len(ours.slots) == 19, "a page that was found damaged is not found again"
    theirs.change([4], pages(40, 1))
    theirs.change([20], pages(41, 1))
    ours.load()
    assert sorted(ours.slots.values()) == [0, 1, 2, 3, 4, *range(6, 21)]
    assert ours.find(key_of(40).ljust(32, b"\0")) is not None
    assert ours.find(key_of(4).ljust(32, b"\0")) is None
    for index in (ours, theirs):
        index.close()
