"""The store of KV pages on disk that an engine opens: its size, and the digest of all that its pages depend on besides
their tokens. Hashing whole weights would take longer than loading them: headers, sizes, times and samples do."""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from holdfast.checkpoints import ModelFiles
from holdfast.config import EngineConfig
from holdfast.errors import EngineError
from holdfast.execution.link.disk_turns import SHARE, DiskTurns, turns_of
from holdfast.footprint.cpu import KV_QUEUE_BYTES, KV_STORE_USUAL_BYTES
from holdfast.kvcache import KVLayout
from holdfast.models import ModelSpec
from holdfast.observability.decisions import Decision
from holdfast.planner import Plan
from holdfast.records import KVStoreUse
from holdfast.units import format_bytes

if TYPE_CHECKING:
    from holdfast.prefix_store import PrefixStore

log = logging.getLogger("holdfast")

VERSION = 1
"""Of how pages are laid out and computed: another one reads no page of this."""
DAILY = 10
"""Times its size that may be written in a day, where that was not set."""
SAMPLES, SAMPLE_BYTES = 64, 4096
IN_FILES = frozenset({"tensors", "spellings", "pooling"})
"""Of a model's spec: what the files themselves say, and what is done after all layers."""


@dataclass(frozen=True, slots=True)
class OpenedStore:
    store: PrefixStore
    decision: Decision
    use: Callable[[], KVStoreUse]
    disk_share: float
    """That its pages have of their disk beside steps, at most; 1: these read no layers from it."""


def open_kv_store(
    config: EngineConfig, files: ModelFiles, spec: ModelSpec, plan: Plan, scales: Iterator[bytes], loaded_from: bytes
) -> OpenedStore | None:
    """`scales`: of its KV pages, as bytes. `loaded_from`: `files_stamp` before the weights were loaded. None: no store
    was asked for."""
    if config.kv_store is None:
        return None
    if files_stamp(config, files) != loaded_from:
        raise EngineError(
            "the model's files changed while they were loaded, so pages of the KV store cannot be named after them",
            needed="files that stay as they are",
            found="other sizes, times or bytes than before",
            fix="start the server again",
        )
    from holdfast.prefix_store import PrefixStore  # With numpy, which a front end does without.
    from holdfast.prefix_store.stats import DropReason, MissReason

    folder = Path(config.kv_store).expanduser()
    size, why = settled_size(config.kv_store_size, folder)
    turns = turns_beside_layers(config, plan, folder)
    daily, layout = config.kv_store_daily_writes or DAILY * size, plan.engine.layout
    store = PrefixStore.open(
        folder,
        size_bytes=size,
        page_bytes=layout.page_bytes,
        model=model_digest(files, spec, layout, computed_as(config, plan, spec), scales),
        daily_write_bytes=daily,
        label=f"{files.name} {plan.kv_dtype}",
        queue_bytes=KV_QUEUE_BYTES,
        turns=turns,
    )
    budget = f"{DAILY} times its size" if config.kv_store_daily_writes is None else "set with kv_store_daily_writes"
    value = f"{format_bytes(size)} in {folder}, {format_bytes(daily)} written a day at most"
    behind = "" if turns is None else "; behind the layers that steps read from the same disk"
    decision = Decision("kv_store", value, f"size: {why}; a day's writes: {budget}; {store.how}{behind}", "set")

    def use() -> KVStoreUse:
        stats = store.stats()
        return KVStoreUse(
            held_bytes=stats.total_bytes,
            total_bytes=size,
            written_today_bytes=stats.written_today_bytes,
            dropped_writes_total=sum(stats.dropped.values()),
            # With those of which there is none yet: a counter that begins at 1 has no increase.
            dropped_by_reason={reason: stats.dropped.get(reason, 0) for reason in get_args(DropReason)},
            missed_by_reason={reason: stats.missed.get(reason, 0) for reason in get_args(MissReason)},
            waited_s_by_use={} if turns is None else turns.waits(),
            failing=stats.failing is not None,
        )

    return OpenedStore(store, decision, use, 1.0 if turns is None else SHARE)


def turns_beside_layers(config: EngineConfig, plan: Plan, folder: Path) -> DiskTurns | None:
    """None: no layers are read from the disk that the folder is on. Rows of an embedding may be: a step reads so little
    of it that pages beside it need no turns."""
    streamed = plan.engine.streamed
    if streamed is None or not streamed.read_bytes or config.nvme_path is None:
        return None
    turns = turns_of(_existing(folder).stat().st_dev)
    return turns if turns is turns_of(Path(config.nvme_path).stat().st_dev) else None


def settled_size(asked: int | None, folder: Path) -> tuple[int, str]:
    """And why. More than there is room for may be meant: other files may leave."""
    if asked is None:
        return usual_size(folder)
    if asked > (room := room_bytes(folder)):
        log.warning(
            "kv_store_size is %s, but %s has room for %s, with what the store holds already: pages are dropped when the"
            " disk is full",
            format_bytes(asked), folder, format_bytes(room),
        )  # fmt: skip
    return asked, "set with kv_store_size"


def usual_size(folder: Path) -> tuple[int, str]:
    """Where none was set, and why."""
    free = room_bytes(folder)
    return min(
        KV_STORE_USUAL_BYTES, free // 2
    ), f"half of {format_bytes(free)} free, at most {format_bytes(KV_STORE_USUAL_BYTES)}"


def room_bytes(folder: Path) -> int:
    """What the store takes already counts as free: else the usual size would halve with each restart."""
    return shutil.disk_usage(_existing(folder)).free + sum(
        path.stat().st_blocks * 512 for path in folder.glob("*.pages")
    )


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def computed_as(config: EngineConfig, plan: Plan, spec: ModelSpec) -> tuple[object, ...]:
    """What else decides which numbers come out."""
    engine = plan.engine
    ropes = dict.fromkeys((spec.rope, *(layer.rope for layer in spec.layers if layer.rope is not None)))
    # Which of its factors such a rotation has goes by the longest that a sequence may get.
    long = [plan.limits.max_model_len > rope.original_max_position for rope in ropes if rope.scaling == "longrope"]
    device = "cpu" if engine.gpu is None else "gpu"
    made = plan.dtype, plan.kv_dtype, engine.quantize, engine.expand_weights, engine.compiled
    return *made, engine.compiled_attention, device, long, config.load_format


def model_digest(
    files: ModelFiles, spec: ModelSpec, layout: KVLayout, computed_as: tuple[object, ...], scales: Iterator[bytes]
) -> bytes:
    """Equal only where pages of equal tokens may take each other's place."""
    digest = hashlib.blake2b(digest_size=32, person=b"holdfast-kvmodel")
    for part in (VERSION, spec, layout, computed_as, files.format):
        _add(digest, _described(part).encode())
    for path in files.weights if computed_as[-1] != "dummy" else ():
        for piece in _file_parts(path):
            _add(digest, piece)
    for piece in scales:
        _add(digest, piece)
    return digest.digest()


def files_stamp(config: EngineConfig, files: ModelFiles) -> bytes:
    """Of the weights as they lie there now; empty where nobody asks."""
    if (config.kv_store is None and not config.enable_sleep_mode) or config.load_format == "dummy":
        return b""
    digest = hashlib.blake2b(digest_size=32)
    for path in files.weights:
        for piece in _file_parts(path):
            _add(digest, piece)
    return digest.digest()


def _described(part: object) -> str:
    """All of it: `repr` leaves out what is too long for people, and of sets the order is another in each process."""
    if is_dataclass(part) and not isinstance(part, type):
        names = (one.name for one in fields(part) if one.compare and one.name not in IN_FILES)
        return f"{type(part).__name__}({', '.join(f'{name}={_described(getattr(part, name))}' for name in names)})"
    if isinstance(part, tuple | list):
        return f"({', '.join(map(_described, part))})"
    if isinstance(part, Mapping):
        return f"{{{', '.join(sorted(f'{_described(key)}: {_described(one)}' for key, one in part.items()))}}}"
    if isinstance(part, set | frozenset):
        return f"{{{', '.join(sorted(map(_described, part)))}}}"
    return repr(part)


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
