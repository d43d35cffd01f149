"""Room for new pages: which slots they get, and which pages of any model leave for them, the least recently used first.

Everything here needs the lock of the folder. Knows nothing of threads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from holdfast.prefix_store.files.calls import Calls
from holdfast.prefix_store.files.folder import StoreFolder
from holdfast.prefix_store.files.index import DamagedIndexError, Records
from holdfast.prefix_store.files.slab import Slab
from holdfast.prefix_store.files.uses import remembers

ABANDONED_US = 60_000_000
"""A page that is being written for longer than this was left by a process that ended."""
AHEAD = 256
"""A part of this many of the whole is evicted at once: finding what leaves reads all indexes."""
Among = Callable[[Slab], NDArray[np.bool_]]


class Room:
    """`own`: the slab that new pages go to; None: no page does. `before_evicting`: called when pages are to leave."""

    def __init__(
        self, folder: StoreFolder, own: Slab | None, calls: Calls, before_evicting: Callable[[], None] | None = None
    ) -> None:
        self._folder, self._own, self._calls, self._before_evicting = folder, own, calls, before_evicting

    def take(self, pages: int, size_bytes: int) -> tuple[list[int], int]:
        """Slots of the own slab, ascending, fewer where there is no room; and how many pages of any model left."""
        assert self._own is not None
        slots, evicted = self._unused(self._own, pages, size_bytes), 0
        if len(slots) < pages:
            needed = max(pages * self._own.slot_bytes, size_bytes // AHEAD)
            evicted = self.evict(size_bytes - needed, keep_own_space=True)
            slots = self._unused(self._own, pages, size_bytes)
        return slots, evicted

    def _unused(self, own: Slab, pages: int, size_bytes: int) -> list[int]:
        held = own.index.held()[:pages]
        total = max(self._folder.control().total_bytes, own.index.taken_bytes())
        room = max(0, size_bytes - total) // own.slot_bytes
        more = min(pages - len(held), room)
        given_back = (own.index.records["generation"] == 0) & (own.index.records["used"] == 0)
        again = np.flatnonzero(given_back)[:more].tolist()
        end = len(own.index.records)
        return sorted([*held, *again, *range(end, end + more - len(again))])

    def evict(self, target_bytes: int, *, keep_own_space: bool = False, among: Among | None = None) -> int:
        """Until no more than this is in use. `keep_own_space`: that of the own slab's pages is not given back to the
        file system, and counts as free. `among`: slots that may leave, of a slab; None: all. Returns the number of
        pages; counts the whole anew."""
        if self._before_evicting is not None:
            self._before_evicting()
        now_us = int(self._calls.now() * 1e6)
        with self.slabs() as slabs:
            total = sum(slab.index.taken_bytes() for slab in slabs)
            giving = [slab for slab in slabs if not (keep_own_space and slab is self._own)]
            total -= sum(slab.give_back() for slab in giving)
            free = 0
            if keep_own_space and self._own is not None:
                free = len(self._own.index.held()) * self._own.slot_bytes
            leaving = _oldest(slabs, total - free - target_bytes, now_us, among)
            for slab, slots in leaving:
                slab.index.free(slots)
            total -= sum(slab.give_back() for slab in giving)
        self.count(total)
        return sum(len(slots) for _, slots in leaving)

    def tidy(self) -> int:
        """Forgets what processes left that ended in the middle of a page, and files without pages that nobody uses, and
        of whose model nothing was computed lately. Returns the bytes in use, which are counted anew."""
        now_us = int(self._calls.now() * 1e6)
        with self.slabs() as slabs:
            for slab in slabs:
                slab.index.free(np.flatnonzero(_abandoned(slab.index.records, now_us)).tolist())
                unused = slab is not self._own and not slab.index.taken_bytes()
                if unused and not remembers(slab.uses_path, self._calls):
                    self.remove(slab)
            total = sum(slab.index.taken_bytes() for slab in slabs)
        self.count(total)
        return total

    @contextlib.contextmanager
    def slabs(self) -> Iterator[list[Slab]]:
        """All in the folder, as they are now; others than the own one are closed after."""
        with contextlib.ExitStack() as opened:
            slabs = [] if self._own is None else [self._own]
            for name in self._folder.slab_names():
                if self._own is not None and name == self._own.name:
                    continue
                # A damaged one has no pages any more; it begins anew when its model is served.
                with contextlib.suppress(DamagedIndexError, FileNotFoundError):
                    slab = Slab(self._folder.path, name, self._calls, writable=True)
                    opened.callback(slab.close)
                    slabs.append(slab)
            for slab in slabs:
                slab.index.load()
            yield slabs

    def remove(self, slab: Slab) -> bool:
        """Its files. False: another process uses them."""
        if not slab.index.lock_alone():
            return False
        self._calls.unlink(slab.index.path)
        for path in (slab.pages_path, slab.uses_path):
            with contextlib.suppress(FileNotFoundError):
                self._calls.unlink(path)
        return True

    def count(self, total_bytes: int) -> None:
        self._folder.set_control(replace(self._folder.control(), total_bytes=total_bytes))


def _writing(records: Records) -> NDArray[np.bool_]:
    return np.asarray((records["generation"] != 0) & ~records["check"].any(axis=1))


def _abandoned(records: Records, now_us: int) -> NDArray[np.bool_]:
    since = np.minimum(records["used"], np.uint64(now_us))  # A time to come is one that a wrong clock made.
    return np.asarray(_writing(records) & (np.uint64(now_us) - since > ABANDONED_US))


def _oldest(slabs: Sequence[Slab], needed_bytes: int, now_us: int, among: Among | None) -> list[tuple[Slab, list[int]]]:
    """Slots whose pages are to leave, by slab."""
    if needed_bytes <= 0 or not slabs:
        return []
    used, owner, slots, sizes = [], [], [], []
    for number, slab in enumerate(slabs):
        records = slab.index.records
        abandoned = _abandoned(records, now_us)
        able = (records["generation"] != 0) & (~_writing(records) | abandoned)
        able = np.flatnonzero(able if among is None else able & among(slab))
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
