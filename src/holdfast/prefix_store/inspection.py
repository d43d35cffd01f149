"""A store looked at, proven and pruned from outside, while servers use it or not. Knows nothing of terminals."""

from __future__ import annotations

import contextlib
import shlex
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from holdfast.errors import ConfigurationError, ModelNotFoundError
from holdfast.prefix_store.files.calls import Calls
from holdfast.prefix_store.files.folder import LOCK, StoreFolder
from holdfast.prefix_store.files.index import DamagedIndexError, pages_in
from holdfast.prefix_store.files.memory import AlignedMemory
from holdfast.prefix_store.files.slab import Slab
from holdfast.prefix_store.files.uses import clear_uses
from holdfast.prefix_store.reading import PageReader, ReadResult
from holdfast.prefix_store.room import Room
from holdfast.prefix_store.stats import Counts, Rate
from holdfast.units import shorten

VERIFY_BYTES = 64 << 20
"""Read and checked at a time."""
_LOCK_S = 30.0


@dataclass(frozen=True, slots=True)
class StoredPrefixes:
    """Pages of one model and page size."""

    name: str
    """Of its files."""
    label: str
    page_bytes: int
    pages: int
    nbytes: int
    """On the disk, with slots that are being written or wait for another page."""
    oldest_use_s: float | None
    newest_use_s: float | None
    in_use: bool
    """By a process."""


@dataclass(frozen=True, slots=True)
class StoreListing:
    models: tuple[StoredPrefixes, ...]
    total_bytes: int
    written_today_bytes: int
    damaged: tuple[str, ...]
    """Files that are no index any more: they begin anew when their model is served."""


@dataclass(frozen=True, slots=True)
class VerifiedPrefixes:
    name: str
    label: str
    pages: int
    good: int
    bad: int
    gone: int
    """Evicted by a server meanwhile."""


@dataclass(frozen=True, slots=True)
class PruneResult:
    pages: int
    freed_bytes: int
    left_bytes: int


class StoreInspection:
    """Of an existing store. ConfigurationError where there is none, or where it cannot be changed."""

    def __init__(self, folder: Path, calls: Calls | None = None) -> None:
        self._calls = calls or Calls()
        if not (folder / LOCK).exists():
            there = "no such folder" if not folder.exists() else "no files of one"
            raise ConfigurationError(
                f"there is no KV store in {folder}",
                code="HF182",
                needed="the folder of a server's --kv-store",
                found=there,
                fix="holdfast kv-store ls DIR, as the server was started with --kv-store DIR",
                field="kv_store",
            )
        self._folder = StoreFolder(folder, self._calls, create=False)

    def __enter__(self) -> StoreInspection:
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.close()

    def listing(self) -> StoreListing:
        models, damaged = [], []
        with contextlib.ExitStack() as lock:
            with contextlib.suppress(OSError):  # Of a folder that can only be read.
                lock.enter_context(self._folder.locked(_LOCK_S))
            for name in self._folder.slab_names():
                try:
                    with self._slab(name, writable=False) as slab:
                        models.append(_described(slab))
                except DamagedIndexError:
                    damaged.append(f"{name}.index")
                except FileNotFoundError:
                    continue
        total = sum(one.nbytes for one in models)
        return StoreListing(tuple(models), total, self._folder.control().written_bytes, tuple(damaged))

    def verify(self, *, forget: bool, progress: Callable[[int, int], None]) -> list[VerifiedPrefixes]:
        """Every page is read and proven. `forget`: those that are not what they should be leave the index. `progress`
        is told the bytes done and all."""
        listing = self.listing()
        total = sum(model.pages * model.page_bytes for model in listing.models)
        found, done = [], 0
        for model in listing.models:
            with contextlib.suppress(FileNotFoundError), self._slab(model.name, writable=forget) as slab:

                def told(nbytes: int, before: int = done) -> None:
                    progress(before + nbytes, total)

                found.append(self._verify(slab, forget, told))
            done += model.pages * model.page_bytes
        return found

    def prune(self, *, size_bytes: int | None, unused_s: float | None, model: str | None) -> PruneResult:
        """Pages leave: of this model (a part of its label or the beginning of its name; None: of all) those that were
        not used for so long (None: all); with a size the least recently used of these, until all that the store has is
        no more than that. ModelNotFoundError where there is no such model: then nothing leaves."""
        with self._locked():
            room = Room(self._folder, None, self._calls)
            before = room.tidy()
            with room.slabs() as slabs:
                named = [slab for slab in slabs if model is None or _is_named(slab, model)]
                if model is not None and not named:
                    raise self._no_model(model, slabs)
                pages = 0 if size_bytes is not None else sum(self._forget(slab, unused_s) for slab in named)
                names = {slab.name for slab in named}
            if size_bytes is not None:
                pages = room.evict(size_bytes, among=lambda slab: self._unused(slab, unused_s) & (slab.name in names))
            left = room.tidy()
        return PruneResult(pages, before - left, left)

    def _no_model(self, model: str, slabs: Sequence[Slab]) -> ModelNotFoundError:
        there = ", ".join(slab.index.label or slab.name[:12] for slab in slabs)
        return ModelNotFoundError(
            f"no model in the KV store has {shorten(model)!r} in its name, nor does its id begin with it",
            found=shorten(there or "no model", 400),
            fix=f"holdfast kv-store ls {shlex.quote(str(self._folder.path))}",
        )

    def _forget(self, slab: Slab, unused_s: float | None) -> int:
        if unused_s is None:
            clear_uses(slab.uses_path, self._calls)
        slots = np.flatnonzero(self._unused(slab, unused_s)).tolist()
        slab.index.free(slots)
        slab.give_back()
        return len(slots)

    def _unused(self, slab: Slab, unused_s: float | None) -> NDArray[np.bool_]:
        """Pages only: what is being written is another's. None: all of them."""
        there = pages_in(slab.index.records)
        return (
            there if unused_s is None else there & (slab.index.records["used"] < (self._calls.now() - unused_s) * 1e6)
        )

    def _verify(self, slab: Slab, forget: bool, progress: Callable[[int], None]) -> VerifiedPrefixes:
        suspects: list[tuple[int, int]] = []
        lock = threading.Lock()

        def suspect(key: bytes, slot: int, generation: int) -> None:
            with lock:
                suspects.append((slot, generation))

        counts, memory = Counts(), AlignedMemory()
        reader = PageReader(slab, counts, Rate(), suspect)
        keys = sorted(slab.index.slots, key=slab.index.slots.__getitem__)
        at_once = max(1, VERIFY_BYTES // slab.slot_bytes)
        views = memory.pieces(min(at_once, len(keys)), slab.slot_bytes)
        try:
            for first in range(0, len(keys), at_once):
                batch = keys[first : first + at_once]
                results: list[ReadResult] = []
                reader.read(list(zip(batch, views, strict=False)), results.append).wait()
                progress(min(first + at_once, len(keys)) * slab.page_bytes)
        finally:
            reader.close()
        missed = counts.reasons()[1]
        gone = missed.get("evicted", 0) + missed.get("absent", 0)
        bad = sum(missed.values()) - gone
        if forget and bad:
            with self._locked():
                slab.index.load()
                slots = [slot for slot, generation in suspects if slab.index.is_generation(slot, generation)]
                slab.index.free(slots)
                slab.give_back()
        return VerifiedPrefixes(slab.name, slab.index.label, len(keys), counts["pages_read"], bad, gone)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            with self._folder.locked(_LOCK_S):
                yield
        except ModelNotFoundError:  # An OSError as well.
            raise
        except OSError as error:
            raise ConfigurationError(
                f"the KV store in {self._folder.path} cannot be changed",
                code="HF180",
                needed="a folder for KV pages alone, that its owner can write",
                found=error.strerror or str(error),
                fix="check the disk, and who owns the folder",
                field="kv_store",
            ) from error

    @contextlib.contextmanager
    def _slab(self, name: str, *, writable: bool) -> Iterator[Slab]:
        slab = Slab(self._folder.path, name, self._calls, writable=writable)
        try:
            slab.index.load()
            yield slab
        finally:
            slab.close()


def _described(slab: Slab) -> StoredPrefixes:
    records = slab.index.records
    used = records["used"][pages_in(records)] / 1e6
    in_use = not slab.index.lock_alone()
    return StoredPrefixes(
        name=slab.name,
        label=slab.index.label,
        page_bytes=slab.page_bytes,
        pages=len(used),
        nbytes=slab.index.taken_bytes(),
        oldest_use_s=float(used.min()) if len(used) else None,
        newest_use_s=float(used.max()) if len(used) else None,
        in_use=in_use,
    )


def _is_named(slab: Slab, model: str) -> bool:
    return slab.name.startswith(model) or model.lower() in slab.index.label.lower()
