"""What the front writes down of an engine process: what it holds, and counters that outlive it. Talks to nobody."""

from __future__ import annotations

import msgspec

from holdfast.hardware import resident
from holdfast.observability.ledger import ProcessMemory
from holdfast.records import EngineStats


def process_memory(name: str, pid: int) -> ProcessMemory | None:
    held = resident(pid)
    if held is None:
        return None
    return ProcessMemory(
        name=name,
        pid=pid,
        resident_bytes=held.now_bytes,
        peak_bytes=held.peak_bytes,
        files_bytes=held.files_bytes,
    )


def continued(before: EngineStats, now: EngineStats) -> EngineStats:
    """Counters go on where the process before left them."""
    return msgspec.structs.replace(
        now,
        steps_total=before.steps_total + now.steps_total,
        preemptions_total=before.preemptions_total + now.preemptions_total,
        prefix_queries_total=before.prefix_queries_total + now.prefix_queries_total,
        prefix_hits_total=before.prefix_hits_total + now.prefix_hits_total,
    )


def at_rest(stats: EngineStats) -> EngineStats:
    """Of an engine whose process was ended: it holds nothing, and has counted what it has counted."""
    return msgspec.structs.replace(
        stats, running=0, waiting=0, blocks_used=0, blocks_touched=0, step_tokens=0, device_bytes=0
    )
