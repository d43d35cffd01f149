"""`PrefixStore`: KV pages of prefixes in a folder that several server processes and restarts share. Puts the parts
together, and keeps house. Knows nothing of tokens: keys are the caller's, and name content.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import shlex
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from holdfast.errors import ConfigurationError
from holdfast.prefix_store.files.calls import Calls
from holdfast.prefix_store.files.folder import LOCK_S, BusyError, StoreFolder, open_parent
from holdfast.prefix_store.files.index import KEY_BYTES, DamagedIndexError
from holdfast.prefix_store.files.slab import Slab, padded, slab_name
from holdfast.prefix_store.files.uses import FirstUses
from holdfast.prefix_store.health import RETRY_S, DiskHealth
from holdfast.prefix_store.reading import PageReader, ReadResult, Ticket
from holdfast.prefix_store.room import Room
from holdfast.prefix_store.stats import Counts, Rate, StoreStats
from holdfast.prefix_store.turns import Turns
from holdfast.prefix_store.writing import PageWriter, Source
from holdfast.units import format_bytes

log = logging.getLogger("holdfast")

BEAT_S = 1.0
"""Between looks at what other processes changed, and notes of what was used."""
OPEN_S = 10.0
"""Waited for another process that holds the lock, before the folder is only read."""
QUEUE_BYTES = 256 << 20
TELL_RATES_BEATS = 10


class PrefixStore:
    """One server's view of the folder. Thread-safe. Nothing but `open` raises: a page that cannot be read is a miss,
    one that cannot be written is dropped, both counted."""

    def __init__(
        self, folder: StoreFolder, slab: Slab | None, calls: Calls, health: DiskHealth,
        *, size_bytes: int, daily_write_bytes: int | None, queue_bytes: int, beat_s: float, turns: Turns | None = None
    ) -> None:  # fmt: skip
        self._folder, self._slab, self._calls, self._health = folder, slab, calls, health
        self._size_bytes, self._daily_write_bytes, self._beat_s = size_bytes, daily_write_bytes, beat_s
        self._counts = Counts()
        control = folder.seen
        self._read_rate, self._write_rate = Rate(control.read_rate or None), Rate(control.write_rate or None)
        self._used: dict[bytes, int] = {}
        """When pages were used last, in microseconds; not yet in the index. By key: a slot may be another's by then."""
        self._suspects: list[tuple[int, int]] = []
        """Slots and generations that are to leave the index."""
        self._used_lock = threading.Lock()
        self._closed = threading.Event()
        self._reader = (
            None
            if slab is None
            else PageReader(slab, self._counts, self._read_rate, self._suspect, self._health.damaged, turns)
        )
        self._writer: PageWriter | None = None
        self._uses: FirstUses | None = None
        if slab is not None and slab.writable:
            self._uses = FirstUses(slab.uses_path, calls)
            with contextlib.suppress(OSError):  # It is tried again with the first beat.
                self._uses.load()
            self._writer = PageWriter(
                folder, slab, Room(folder, slab, calls, self._stamp), calls, self._counts, self._write_rate, health,
                size_bytes=size_bytes, daily_write_bytes=daily_write_bytes, queue_bytes=queue_bytes,
                suspect=self._suspect, turns=turns,
            )  # fmt: skip
        self._keeper = threading.Thread(target=self._keep_house, name="kv-store", daemon=True)
        self._keeper.start()

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        size_bytes: int,
        page_bytes: int,
        model: bytes,
        daily_write_bytes: int | None = None,
        label: str = "",
        queue_bytes: int = QUEUE_BYTES,
        calls: Calls | None = None,
        beat_s: float = BEAT_S,
        retry_s: float = RETRY_S,
        lock_s: float = LOCK_S,
        turns: Turns | None = None,
    ) -> PrefixStore:
        """`model`: a digest of everything that the content of pages depends on besides their keys. `label`: for people.
        `turns`: of its disk, where others read from it too.
        ConfigurationError where the folder cannot be used at all. One that can only be read is served from."""
        if page_bytes <= 0 or size_bytes < page_bytes:
            raise ConfigurationError(
                "the KV store has no room for a single page",
                code="HF181",
                needed=f"at least {format_bytes(max(page_bytes, 1))}",
                found=format_bytes(size_bytes),
                fix="a larger --kv-store-size",
                field="kv_store_size",
            )
        calls = calls or Calls()
        opened = StoreFolder(folder, calls, create=True, lock_s=lock_s)
        # In a container a volume is often open to all, and nobody else there.
        if (parent := open_parent(folder)) is not None:
            log.warning(
                "KV store %s: all users can write %s, and so could put another folder in its place; chmod o-w %s",
                folder, parent, shlex.quote(str(parent)),
            )  # fmt: skip
        health = DiskHealth(folder, retry_s)
        slab = _open_slab(opened, calls, health, model, page_bytes, label, size_bytes)
        return cls(
            opened, slab, calls, health,
            size_bytes=size_bytes, daily_write_bytes=daily_write_bytes, queue_bytes=queue_bytes, beat_s=beat_s,
            turns=turns,
        )  # fmt: skip

    def has(self, keys: Sequence[bytes]) -> int:
        """How many of the first keys in a row are there, as far as is known: another process may have evicted one a
        moment ago."""
        if self._slab is None:
            return 0
        slots = self._slab.index.slots
        for count, key in enumerate(keys):
            if (key if len(key) == KEY_BYTES else padded(key)) not in slots:
                return count
        return len(keys)

    def read(self, pages: Sequence[tuple[bytes, memoryview]], done: Callable[[ReadResult], None]) -> Ticket:
        """Begins to read pages into memory of at least their size, which is the store's until `done` is called, by a
        thread of the store. Fastest into memory at multiples of 4 KiB. Reading counts as use."""
        if self._reader is None:
            ticket = Ticket(len(pages), done)
            ticket.miss("absent", len(pages))
            self._counts.miss("absent", len(pages))
            ticket.expect(1)
            threading.Thread(target=ticket.piece_done, daemon=True).start()
            return ticket
        self.use([key for key, _ in pages])
        return self._reader.read(pages, done)

    def write(self, key: bytes, page: Source, done: Callable[[bool], None] | None = None) -> bool:
        """Behind. False: dropped, and `done` is not called. Else it is, by a thread of the store, with whether the page
        is there now. `page`: a function that fills the memory it is given, called by that thread; or memory, which must
        stay as it is until `done` is called, and is copied at once where there is no `done`."""
        if self._writer is None:
            self._counts.drop("read only")
            return False
        return self._writer.write(padded(key), page.cast("B") if isinstance(page, memoryview) else page, done)

    def takes(self) -> bool:
        """Whether a page may be written now: else nobody need bring one."""
        return self._writer is not None and self._writer.takes()

    def room(self) -> int:
        """Pages that could wait to be written now."""
        return 0 if self._writer is None else self._writer.room()

    def awaits(self, key: bytes) -> bool:
        """It is there, or waits to be written: `write` would drop it."""
        return self._writer is not None and self._writer.awaits(padded(key))

    def use(self, keys: Sequence[bytes]) -> None:
        """These are wanted: others are evicted before them. Of a chain the end leaves first."""
        if self._slab is None or not self._slab.writable:  # Nobody would take note.
            return
        now_us = int(self._calls.now() * 1e6)
        slots = self._slab.index.slots
        with self._used_lock:
            for number, key in enumerate(keys):
                name = padded(key)
                if name in slots:
                    self._used[name] = now_us - number

    def used_before(self, keys: Sequence[bytes]) -> int:
        """How many of them in a row, from the first on, were `computed` before, in any process; as far as is
        remembered."""
        return 0 if self._uses is None else self._uses.count(keys)

    def computed(self, keys: Sequence[bytes]) -> None:
        """What they name was computed: next time is its second use."""
        if self._uses is not None:
            self._uses.note(keys)

    def forget(self, keys: Sequence[bytes]) -> None:
        """Of these that are there, or wait to be written, nobody finds any again, in any process."""
        if self._slab is None:
            return
        names, index = [padded(key) for key in keys], self._slab.index
        if self._writer is not None:
            self._writer.forget(names)
        for key in names:
            slot = index.slots.get(key)
            if slot is not None:
                self._suspect(key, slot, int(index.records[slot]["generation"]))

    def stats(self) -> StoreStats:
        dropped, missed = self._counts.reasons()
        slab, writer = self._slab, self._writer
        control = self._folder.seen.on(self._calls.now())
        pages = 0 if slab is None else len(slab.index.slots)
        return StoreStats(
            pages=pages,
            nbytes=0 if slab is None else pages * slab.slot_bytes,
            total_bytes=max(0, control.total_bytes),
            size_bytes=self._size_bytes,
            pages_read=self._counts["pages_read"],
            bytes_read=self._counts["bytes_read"],
            pages_written=self._counts["pages_written"],
            bytes_written=self._counts["bytes_written"],
            pages_evicted=self._counts["pages_evicted"],
            queued_bytes=0 if writer is None else writer.queued_bytes,
            dropped=dropped,
            missed=missed,
            read_bytes_per_second=self._read_rate.bytes_per_second,
            write_bytes_per_second=self._write_rate.bytes_per_second,
            written_today_bytes=control.written_bytes,
            daily_write_bytes=self._daily_write_bytes,
            direct=slab is not None and slab.direct,
            read_only=writer is None,
            failing=self._health.failing,
        )

    @property
    def how(self) -> str:
        """In a sentence: how pages are read and written, and why not better."""
        if self._slab is None or self._writer is None:
            return f"KV store {self._folder.path} is only read: {self._folder.read_only or self._health.failing}"
        if not self._slab.direct:
            reason = self._slab.buffered_reason
            return (
                f"KV store {self._folder.path} goes through the page cache: its file system refuses O_DIRECT ({reason})"
            )
        return f"KV store {self._folder.path} is read and written past the page cache"

    def close(self, timeout_s: float) -> None:
        """Writes what waits, as far as there is time. Calls of a disk that does not answer are left behind."""
        if self._closed.is_set():
            return
        until = time.monotonic() + timeout_s
        if self._writer is not None:
            self._writer.drain(timeout_s)
        self._closed.set()
        ended = True
        if self._reader is not None:
            self._reader.close()
        for part in (self._writer, self._reader):
            if part is not None:
                ended = part.join(max(0.0, until - time.monotonic()) + 0.1) and ended
        self._keeper.join(max(0.0, until - time.monotonic()) + 0.1)
        if not ended or self._keeper.is_alive():
            return
        if self._uses is not None:
            self._uses.close()
        if self._slab is not None:
            self._slab.close()
        self._folder.close()

    def _suspect(self, key: bytes, slot: int, generation: int) -> None:
        assert self._slab is not None
        self._slab.index.forget(key, slot, generation)
        with self._used_lock:
            self._suspects.append((slot, generation))

    def _keep_house(self) -> None:
        beats, closed = 0, False
        while not closed:
            closed = self._closed.wait(self._beat_s)
            beats += 1
            try:
                self._look_around(tell_rates=closed or beats % TELL_RATES_BEATS == 0)
            except Exception:
                log.exception("KV store: keeping house failed")
        if self._slab is not None and self._slab.writable:
            with contextlib.suppress(OSError):
                self._slab.sync()

    def _look_around(self, *, tell_rates: bool) -> None:
        slab = self._slab
        if slab is None:
            return
        self._health.tell_damaged()
        with self._used_lock:
            suspects, self._suspects = self._suspects, []
        try:
            if not slab.writable:
                if slab.index.changed():
                    slab.index.load()
                if self._folder.changed():
                    self._folder.look()
                return
            if slab.removed():
                raise FileNotFoundError(errno.ENOENT, "its files were removed while it was in use")
            noted = self._uses is not None and self._uses.noted
            changed = slab.index.changed() or self._folder.changed()  # That of other models counts in the bytes in use.
            if self._used or suspects or noted or tell_rates or changed:
                with self._folder.locked():
                    self._note(slab, suspects, tell_rates=tell_rates)
        except OSError as error:
            if not isinstance(error, BusyError):
                self._health.failed("its index cannot be kept", error)
            with self._used_lock:
                self._suspects = [*suspects, *self._suspects]

    def _stamp(self) -> None:
        """What was used goes to the index. Under the lock of the folder, after `refresh`."""
        with self._used_lock:
            used, self._used = self._used, {}
        if self._slab is not None:
            slots = self._slab.index.slots
            found = ((slots.get(key), when) for key, when in used.items())
            self._slab.index.stamp(sorted((slot, when) for slot, when in found if slot is not None))

    def _note(self, slab: Slab, suspects: list[tuple[int, int]], *, tell_rates: bool) -> None:
        slab.index.refresh()
        self._stamp()
        slab.index.free(sorted({slot for slot, generation in suspects if slab.index.is_generation(slot, generation)}))
        self._tell_uses()
        control = self._folder.control()
        if tell_rates:
            read, write = self._read_rate.bytes_per_second or 0.0, self._write_rate.bytes_per_second or 0.0
            self._folder.set_control(replace(control, read_rate=read, write_rate=write))

    def _tell_uses(self) -> None:
        """Pages are written and read without that record, too: a disk that is full or broken is found by them."""
        try:
            if self._uses is not None:
                self._uses.exchange()
        except OSError as error:
            self._health.tell(f"first uses are remembered by this process alone: {error.strerror or error}")


def _open_slab(
    folder: StoreFolder, calls: Calls, health: DiskHealth, model: bytes, page_bytes: int, label: str, size_bytes: int
) -> Slab | None:
    """None: nothing can be read either. What is there over the size leaves."""
    slab = None
    try:
        with folder.locked(OPEN_S):
            slab = Slab.create(folder.path, calls, model, page_bytes, label)
            room = Room(folder, slab, calls)
            if room.tidy() > size_bytes:
                room.evict(size_bytes)
            folder.control()
        return slab
    except OSError as error:
        if slab is not None:
            slab.close()
        folder.read_only = folder.read_only or error.strerror or str(error)
        health.tell(f"it can only be read: {folder.read_only}")
    try:
        slab = Slab(folder.path, slab_name(model, page_bytes), calls, writable=False)
        if not slab.is_of(model, page_bytes):
            slab.close()
            return None
        slab.index.load()
        folder.control()
        return slab
    except (OSError, DamagedIndexError):
        return None
