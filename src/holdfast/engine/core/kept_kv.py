"""What is cached of prompts, kept in RAM beyond the end of an engine process that is put to sleep, and found again by
the next one. The pages are in a file without a name, which whoever holds it open keeps; an index names their prefixes.

    on a GPU   the file is the RAM tier itself: what the pool holds goes there, and nothing is copied twice
    on a CPU   pages of the pool go to the file one by one, and come back so: they are never there twice

Pages are only taken over by an engine that would have computed the same: see `kv_identity`.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, Protocol

import msgspec

from holdfast.checkpoints import ModelFiles
from holdfast.config import EngineConfig
from holdfast.engine.core.kv_store import computed_as, files_stamp, model_digest
from holdfast.engine.core.loop import EngineCore
from holdfast.models import ModelSpec
from holdfast.planner import Plan
from holdfast.records import SleepingKV
from holdfast.units import GIB, counted, format_bytes

log = logging.getLogger("holdfast")

SAVE_S, PIN_S = 60.0, 60.0
"""The longest that pages of a GPU are saved before it sleeps, and that pinned pages are waited for when it wakes."""

Entry = tuple[int, bytes, int]
"""KV group, chain hash, and the page in the file."""


class KeepingRunner(Protocol):
    @property
    def kv_scales(self) -> Any: ...

    @property
    def kv(self) -> Any: ...


def open_tier_file(config: EngineConfig, kept: SleepingKV | None) -> int | None:
    """For the RAM tier of a GPU: the one that was kept, or a new one; None: nobody will put it to sleep."""
    if not config.enable_sleep_mode or config.device != "cuda":
        return None
    if kept is not None:
        with contextlib.suppress(OSError):
            return os.open(kept.pages_path, os.O_RDWR | os.O_CLOEXEC)
    return os.memfd_create("holdfast-kv", os.MFD_CLOEXEC)


def kv_identity(
    config: EngineConfig, files: ModelFiles, spec: ModelSpec, plan: Plan, core: EngineCore, loaded_from: bytes
) -> bytes | None:
    """Of all that pages depend on besides their tokens; None: files were changed while they were loaded.
    `loaded_from`: `files_stamp` before."""
    if files_stamp(config, files) != loaded_from:
        return None
    layout, runner = core.scheduler.kv.layout, core.runner
    scales: Iterator[bytes] = runner.kv_scales.digest_parts()  # type: ignore[attr-defined]
    return model_digest(files, spec, layout, computed_as(config, plan, spec), scales)


class KVKeeper:
    """`runner`: with the pool. `tier_file`: of the RAM tier of a GPU; None: the pool itself is in RAM."""

    def __init__(self, core: EngineCore, runner: Any, identity: bytes, tier_file: int | None) -> None:
        self._core, self._runner, self._identity, self._tier_file = core, runner, identity, tier_file
        self._files: list[int] = []

    def keep(self, beat: Callable[[], None]) -> SleepingKV | None:
        """The engine computes nothing after this. None: there is nothing to keep, or the system has no memory for it:
        it sleeps all the same."""
        try:
            return self._keep(beat)
        except OSError as error:
            log.warning("what is cached of prompts cannot be kept while the engine sleeps: %s", error)
            return None

    def _keep(self, beat: Callable[[], None]) -> SleepingKV | None:
        began_s, kv = time.monotonic(), self._core.scheduler.kv
        if self._tier_file is None:
            file, entries = self._keep_pool(beat)
        else:
            self._core.save_prefixes(SAVE_S, beat)
            file, entries = self._tier_file, [] if kv.tiers is None else kv.tiers.host.entries()
            _give_back_others(file, sorted(page for _, _, page in entries), kv.layout.page_bytes, beat)
        if not entries:
            return None
        index = os.memfd_create("holdfast-kv-index", os.MFD_CLOEXEC)
        with os.fdopen(os.dup(index), "wb") as written:
            written.write(msgspec.msgpack.encode(entries))
        self._files += [file, index]
        nbytes = len(entries) * kv.layout.page_bytes
        said = "%s of KV (%s) stay in RAM while the engine sleeps; it took %.2f s to put them there"
        log.info(said, format_bytes(nbytes), counted(len(entries), "block"), time.monotonic() - began_s)
        own = f"/proc/{os.getpid()}/fd"
        return SleepingKV(
            identity=self._identity, pages_path=f"{own}/{file}", index_path=f"{own}/{index}", held_bytes=nbytes
        )

    def _keep_pool(self, beat: Callable[[], None]) -> tuple[int, list[Entry]]:
        kv, pool = self._core.scheduler.kv, self._runner.kv
        file, page_bytes = os.memfd_create("holdfast-kv", os.MFD_CLOEXEC), kv.layout.page_bytes
        entries = list[Entry]()
        for place, (group, key, page) in enumerate(kv.cached()):
            with pool.page_view(page) as view:
                _write(file, view, place * page_bytes)
            pool.drop_page(page)
            entries.append((group, key, place))
            beat()
        return file, entries

    def restore(self, kept: SleepingKV) -> None:
        """What cannot be had is computed again."""
        try:
            if kept.identity != self._identity:
                log.info("what was cached before the engine slept is of another model or other settings: it is dropped")
                return
            with open(kept.index_path, "r+b") as file:
                entries = msgspec.msgpack.decode(file.read(), type=list[Entry])
                if self._tier_file is None:
                    # Pages are taken out of the file: were this process to die now, another would find empty ones.
                    _write_again(file, [])
            restore = self._restore_pool if self._tier_file is None else self._restore_tier
            restored = restore(kept, entries) if entries else 0
        except (OSError, msgspec.DecodeError) as error:
            log.warning("what was cached before the engine slept could not be read: %s", error)
            return
        log.info("%s that were cached before the engine slept are there again", counted(restored, "block"))

    def _restore_pool(self, kept: SleepingKV, entries: list[Entry]) -> int:
        kv, pool = self._core.scheduler.kv, self._runner.kv
        page_bytes, room = kv.layout.page_bytes, kv.blocks_available
        file = os.open(kept.pages_path, os.O_RDWR | os.O_CLOEXEC)
        try:
            with mmap.mmap(file, os.fstat(file).st_size) as memory:
                given_back = 0
                for group, key, place in entries[-room:]:
                    page = kv.restore(group, key)
                    with pool.page_view(page) as view, memoryview(memory) as source:
                        view[:] = source[place * page_bytes : (place + 1) * page_bytes]
                    whole = (place + 1) * page_bytes // mmap.PAGESIZE * mmap.PAGESIZE
                    if whole > given_back:  # It is in the pool by now.
                        memory.madvise(mmap.MADV_REMOVE, given_back, whole - given_back)
                        given_back = whole
        finally:
            os.close(file)
        return min(room, len(entries))

    def _restore_tier(self, kept: SleepingKV, entries: list[Entry]) -> int:
        tiers = self._core.scheduler.kv.tiers
        assert self._tier_file is not None
        if tiers is None or not os.path.samestat(os.fstat(self._tier_file), os.stat(kept.pages_path)):
            return 0  # In the second case it could not be opened: pages of the tier hold nothing.
        wanted, until_s = 1 + max((page for _, _, page in entries), default=0), time.monotonic() + PIN_S
        # Where pinning failed, nobody waits for what will not come.
        while (ready := self._runner.host_pages()) < wanted and not self._runner.host_settled():
            if time.monotonic() >= until_s:
                break
            time.sleep(0.01)
        if ready < wanted and self._runner.host_settled():
            entries = _give_up_behind(
                self._tier_file, kept.index_path, entries, ready, self._core.scheduler.kv.layout.page_bytes
            )
        tiers.host.expect(entries)
        tiers.grow_host(ready)
        return len(tiers.host)


def _give_up_behind(file: int, index_path: str, entries: list[Entry], pages: int, page_bytes: int) -> list[Entry]:
    """So many pages of a tier are pinned, and no more will be: the others would stay in RAM with nobody to read them.
    What is left of `entries`."""
    left = [entry for entry in entries if entry[2] < pages]
    with open(index_path, "r+b") as index:  # First: were this process to die, the next would find empty pages.
        _write_again(index, left)
    size, begin = os.fstat(file).st_size, -(-pages * page_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    if begin < size:
        with mmap.mmap(file, size) as memory:
            memory.madvise(mmap.MADV_REMOVE, begin, size - begin)
    lost = counted(len(entries) - len(left), "block")
    log.warning("%s that were cached before the engine slept are given up: they could not be pinned", lost)
    return left


def _write_again(index: BinaryIO, entries: list[Entry]) -> None:
    index.seek(0)
    index.truncate()
    index.write(msgspec.msgpack.encode(entries))


def _give_back_others(file: int, pages: list[int], page_bytes: int, beat: Callable[[], None]) -> None:
    """Of the file's memory, all but these pages, as far as it is whole pages of the system: a tier has all of it from
    its start on."""
    if not (size := os.fstat(file).st_size):
        return
    with mmap.mmap(file, size) as memory:
        before = 0
        for first, end in (*((page * page_bytes, (page + 1) * page_bytes) for page in pages), (size, size)):
            begin, whole = -(-before // mmap.PAGESIZE) * mmap.PAGESIZE, first // mmap.PAGESIZE * mmap.PAGESIZE
            for part in range(begin, whole, GIB):
                memory.madvise(mmap.MADV_REMOVE, part, min(GIB, whole - part))
                beat()
            before = end


def _write(file: int, view: memoryview, offset: int) -> None:
    while len(view):
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written
