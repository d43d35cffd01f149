"""Room for new pages: which slots they get, and which pages of any model leave for them, the least recently used first.

Everything here needs the lock of the folder. Knows nothing of threads.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from holdfast.prefix_store.calls import Calls
from holdfast.prefix_store.folder import StoreFolder
from holdfast.prefix_store.slab import DamagedIndexError, Slab

ABANDONED_US = 60_000_000
"""A page that is being written for longer than this was left by a process that ended."""
AHEAD = 256
"""A part of this many of the whole is evicted at once: finding what leaves reads all indexes."""


class Room:
    def __init__(self, folder: StoreFolder, own: Slab | None, calls: Calls) -> None:
        self._folder, self._own, self._calls = folder, own, calls
        self._others: dict[str, Slab] = {}

    def take(self, pages: int, size_bytes: int) -> tuple[list[int], int]:
        """Slots of the own slab, ascending, fewer where there is no room; and how many pages of any model left."""
        assert self._own is not None
        own, evicted = self._own, 0
        slots = self._unused(pages, size_bytes)
        if len(slots) < pages:
            needed = max(pages * own.slot_bytes, size_bytes // AHEAD)
            evicted = self.evict(size_bytes - needed, keep_own_space=True)
            slots = self._unused(pages, size_bytes)
        return slots, evicted

    def _unused(self, pages: int, size_bytes: int) -> list[int]:
        own = self._own
        assert own is not None
        free = own.records["generation"] == 0
        held = np.flatnonzero(free & (own.records["used"] != 0))[:pages].tolist()
        room = max(0, size_bytes - self._folder.control().total_bytes) // own.slot_bytes
        more = min(pages - len(held), room)
        given_back = np.flatnonzero(free & (own.records["used"] == 0))[:more].tolist()
        end = len(own.records)
        return sorted([*held, *given_back, *range(end, end + more - len(given_back))])

    def evict(self, target_bytes: int, *, keep_own_space: bool = False) -> int:
        """Until no more than this is in use. `keep_own_space`: that of the own slab's pages is not given back to the
        file system, and counted as free. Returns the number of pages; counts the whole anew."""
        slabs = self.slabs()
        total = sum(slab.taken_bytes() for slab in slabs)
        given_back = [slab for slab in slabs if not (keep_own_space and slab is self._own)]
        total -= sum(slab.give_back() for slab in given_back)
        free = self._held_bytes() if keep_own_space else 0
        leaving = _oldest(slabs, total - free - target_bytes, int(self._calls.now() * 1e6))
        for slab, slots in leaving:
            slab.free(slots)
        total -= sum(slab.give_back() for slab in given_back)
        evicted = sum(len(slots) for _, slots in leaving)
        self._count(total)
        return evicted

    def recount(self) -> int:
        total = sum(slab.taken_bytes() for slab in self.slabs())
        self._count(total)
        return total

    def slabs(self) -> list[Slab]:
        """All in the folder, as they are now."""
        names = set(self._folder.slab_names())
        for name in [name for name in self._others if name not in names]:
            self._others.pop(name).close()
        slabs = [] if self._own is None else [self._own]
        for name in sorted(names):
            if self._own is not None and name == self._own.name:
                continue
            # A damaged one takes no room that could be given to others: it begins anew when its model is served.
            with contextlib.suppress(DamagedIndexError, FileNotFoundError):
                if name not in self._others:
                    self._others[name] = Slab(self._folder.path, name, self._calls, writable=True)
                slabs.append(self._others[name])
        for slab in slabs:
            slab.load()
        return slabs

    def remove_empty(self) -> None:
        """Files of models that have no page any more, where no process uses them."""
        for slab in self.slabs():
            if slab is not self._own and not slab.taken_bytes():
                self.remove(slab)

    def remove(self, slab: Slab) -> bool:
        """False: another process uses it."""
        if not slab.lock_alone():
            return False
        self._calls.unlink(slab.index_path)
        with contextlib.suppress(FileNotFoundError):
            self._calls.unlink(slab.pages_path)
        self._others.pop(slab.name, slab).close()
        return True

    def close(self) -> None:
        for slab in self._others.values():
            slab.close()
        self._others.clear()

    def _held_bytes(self) -> int:
        own = self._own
        assert own is not None
        held = (own.records["generation"] == 0) & (own.records["used"] != 0)
        return int(np.count_nonzero(held)) * own.slot_bytes

    def _count(self, total: int) -> None:
        self._folder.set_control(replace(self._folder.control(), total_bytes=total))


def _oldest(slabs: Sequence[Slab], needed_bytes: int, now_us: int) -> list[tuple[Slab, list[int]]]:
    """Slots whose pages are to leave, by slab."""
    if needed_bytes <= 0 or not slabs:
        return []
    used, owner, slots, sizes = [], [], [], []
    for number, slab in enumerate(slabs):
        records = slab.records
        writing = (records["generation"] != 0) & ~records["check"].any(axis=1)
        abandoned = writing & (records["used"] + np.uint64(ABANDONED_US) < now_us)
        able = np.flatnonzero((records["generation"] != 0) & (~writing | abandoned))
        # A time to come is one that a clock made that was wrong.
        stamps = np.minimum(records["used"][able], np.uint64(now_us))
        used.append(np.where(abandoned[able], np.uint64(0), stamps))
        slots.append(able)
        owner.append(np.full(len(able), number))
        sizes.append(np.full(len(able), slab.slot_bytes))
    order = np.argsort(np.concatenate(used), kind="stable")
    leaving = order[: int(np.searchsorted(np.cumsum(np.concatenate(sizes)[order]), needed_bytes)) + 1]
    owners, places = np.concatenate(owner)[leaving], np.concatenate(slots)[leaving]
    chosen = [(slab, places[owners == number].tolist()) for number, slab in enumerate(slabs)]
    return [(slab, found) for slab, found in chosen if found]
