"""The store of KV pages on disk that an engine opens: its size, and the digest of all that its pages depend on besides
their tokens. Hashing whole weights would take longer than loading them: headers, sizes, times and samples do."""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast.checkpoints import ModelFiles
from holdfast.config import EngineConfig
from holdfast.footprint.cpu import KV_QUEUE_BYTES
from holdfast.kvcache import KVLayout
from holdfast.models import ModelSpec
from holdfast.observability.decisions import Decision
from holdfast.planner import Plan
from holdfast.prefix_store import PrefixStore
from holdfast.records import KVStoreUse
from holdfast.units import GIB, format_bytes

log = logging.getLogger("holdfast")

VERSION = 1
"""Of how pages are laid out and computed: another one reads no page of this."""
USUAL_BYTES = 100 * GIB
DAILY = 10
"""Times its size that may be written in a day, where that was not set."""
SAMPLES, SAMPLE_BYTES = 64, 4096


@dataclass(frozen=True, slots=True)
class OpenedStore:
    store: PrefixStore
    decision: Decision
    use: Callable[[], KVStoreUse]


def open_kv_store(
    config: EngineConfig, files: ModelFiles, spec: ModelSpec, plan: Plan, scales: Iterator[bytes]
) -> OpenedStore | None:
    """`scales`: of its KV pages, as bytes. None: no store was asked for."""
    if config.kv_store is None:
        return None
    folder = Path(config.kv_store).expanduser()
    size, why = config.kv_store_size, "set with kv_store_size"
    if size is None:
        free = shutil.disk_usage(_existing(folder)).free
        size = min(USUAL_BYTES, free // 2)
        why = f"half of {format_bytes(free)} free, at most {format_bytes(USUAL_BYTES)}"
    layout = plan.engine.layout
    store = PrefixStore.open(
        folder,
        size_bytes=size,
        page_bytes=layout.page_bytes,
        model=model_digest(files, spec, layout, _computed_as(config, plan), scales),
        daily_write_bytes=config.kv_store_daily_writes or DAILY * size,
        label=f"{files.name} {plan.kv_dtype}",
        queue_bytes=KV_QUEUE_BYTES,
    )
    decision = Decision("kv_store", f"{format_bytes(size)} in {folder}", f"{why}; {store.how}", "set")

    def use() -> KVStoreUse:
        stats = store.stats()
        return KVStoreUse(
            folder=str(folder),
            held_bytes=stats.total_bytes,
            total_bytes=size,
            written_today_bytes=stats.written_today_bytes,
            dropped_writes_total=sum(stats.dropped.values()),
            failing=stats.failing is not None,
        )

    return OpenedStore(store, decision, use)


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def _computed_as(config: EngineConfig, plan: Plan) -> tuple[object, ...]:
    """What else decides which numbers come out."""
    engine = plan.engine
    return plan.dtype, plan.kv_dtype, engine.quantize, engine.expand_weights, engine.compiled, config.load_format


def model_digest(
    files: ModelFiles, spec: ModelSpec, layout: KVLayout, computed_as: tuple[object, ...], scales: Iterator[bytes]
) -> bytes:
    """Equal only where pages of equal tokens may take each other's place."""
    digest = hashlib.blake2b(digest_size=32, person=b"holdfast-kvmodel")
    for part in (VERSION, spec, layout, computed_as, files.format):
        _add(digest, repr(part).encode())
    for path in files.weights if computed_as[-1] != "dummy" else ():
        for piece in _file_parts(path):
            _add(digest, piece)
    for piece in scales:
        _add(digest, piece)
    return digest.digest()


def _add(digest: hashlib.blake2b, part: bytes) -> None:
    digest.update(len(part).to_bytes(8, "little"))
    digest.update(part)


def _file_parts(path: Path) -> Iterator[bytes]:
    """Its size and time, and pieces of it from the header to the end."""
    with path.open("rb") as file:
        there = path.stat()
        yield f"{there.st_size} {there.st_mtime_ns}".encode()
        last = max(0, there.st_size - SAMPLE_BYTES)
        for number in range(SAMPLES):
            file.seek(last * number // (SAMPLES - 1))
            yield file.read(SAMPLE_BYTES)
