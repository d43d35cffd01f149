"""What somebody who watches a server should know, each with what helps: of its state, its load, its memory, its log.

Rules over numbers that are there anyway; the doctor looks closer (`holdfast doctor URL`). Changes nothing.
"""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from holdfast.engine.interface import Engine
from holdfast.observability.ledger import Ledger
from holdfast.records import EngineInfo, EngineStats
from holdfast.server.http.errors import without_paths
from holdfast.server.ui.machine import MachineTier
from holdfast.units import counted, format_bytes, shorten

ERROR, WARNING, NOTE = "error", "warning", "note"
LOG_LINES = 20
LOG_CHARS = 400
LOOK_BACK_S = 60.0
"""Of what is said of the load: a moment's burst is none."""
KV_FULL, KV_SPARE, RAM_SHORT = 0.95, 0.5, 0.03
_CODE = re.compile(r"\bHFW?\d{2,3}\b")

Samples = Sequence[Mapping[str, float | None]]


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    level: str
    """error, warning or note."""
    text: str
    fix: str | None = None
    time_s: float | None = None
    """Of a line of the log; others hold now."""


class LogNotices(logging.Handler):
    """The last warnings and errors of the log, without paths of files. Lines of the log have nothing of prompts."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.kept: deque[Notice] = deque(maxlen=LOG_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = shorten(without_paths(record.getMessage()), LOG_CHARS)
        except Exception:
            self.handleError(record)
            return
        level = ERROR if record.levelno >= logging.ERROR else WARNING
        code = _CODE.search(text)
        fix = None if code is None else f"holdfast explain {code[0]}"
        self.kept.append(Notice(level=level, text=text, fix=fix, time_s=round(record.created, 1)))


def notices(
    engine: Engine,
    info: EngineInfo | None,
    ledger: Ledger | None,
    recent: Samples,
    machine: Sequence[MachineTier],
    log: LogNotices,
) -> list[Notice]:
    """What holds now, then the newest lines of the log that do not say the same."""
    now = [
        *_of_state(engine),
        *([] if info is None else _of_load(info, engine.stats(), recent)),
        *_of_memory(ledger, machine),
        *([] if info is None else _of_plan(info)),
    ]
    said = {notice.text for notice in now}
    return [*now, *(line for line in reversed(log.kept) if line.text not in said)]


def _of_state(engine: Engine) -> Iterator[Notice]:
    failure = engine.failure or engine.unresponsive
    if failure is not None:
        yield Notice(level=ERROR, text=failure.message, fix=failure.fix or f"holdfast explain {failure.code}")
    elif engine.sleeping:
        yield Notice(level=NOTE, text="the engine is sleeping and holds no memory", fix="POST /wake_up")
    if engine.restarts:
        hung = f", {engine.hangs} of them because it hung" if engine.hangs else ""
        text = f"restarts of the engine process: {engine.restarts}{hung}"
        yield Notice(level=WARNING, text=text, fix="holdfast doctor LOG says why, of the server's log")


def _of_load(info: EngineInfo, stats: EngineStats, recent: Samples) -> Iterator[Notice]:
    """Of what a queue waits for, one thing, as the doctor has it."""
    preempted = sum(int(sample["preemptions"] or 0) for sample in recent)
    running = [int(sample["running"] or 0) for sample in recent]
    waiting = min((int(sample["waiting"] or 0) for sample in recent), default=0)
    kv_shares = [sample["kv_share"] or 0.0 for sample in recent]
    if preempted:
        fewer = max(1, int(min((count for count in running if count), default=1) * 0.9))
        text = f"{counted(preempted, 'request')} preempted within a minute: more run than the KV cache holds"
        yield Notice(level=WARNING, text=text, fix=f"--max-num-seqs {fewer}, or --kv-cache-dtype fp8")
    elif waiting and min(kv_shares) >= KV_FULL:
        text = f"the KV cache is full, and {counted(waiting, 'request')} or more wait"
        yield Notice(
            level=WARNING, text=text, fix="a larger --kv-cache-memory-bytes, --kv-cache-dtype fp8, or another server"
        )
    elif waiting and max(kv_shares) <= KV_SPARE and min(running) >= info.max_num_seqs:
        text = (
            f"{counted(waiting, 'request')} or more wait for one of {info.max_num_seqs} places, "
            f"while the KV cache is at most {max(kv_shares):.0%} full"
        )
        fix = f"--max-num-seqs {2 * info.max_num_seqs}: more tokens/s in all, fewer for each request"
        yield Notice(level=NOTE, text=text, fix=fix)


def _of_memory(ledger: Ledger | None, machine: Sequence[MachineTier]) -> Iterator[Notice]:
    for tier in () if ledger is None else ledger.tiers:
        beyond = tier.measured_bytes - tier.budget_bytes
        if beyond > 0:
            text = f"{tier.tier}: {format_bytes(beyond)} more are held than the budget has"
            yield Notice(level=WARNING, text=text, fix="holdfast ps -v names the term that grew")
    for one in machine:
        if one.tier == "ram" and one.free_bytes < RAM_SHORT * one.total_bytes:
            text = f"{one.name}: {format_bytes(one.free_bytes)} of {format_bytes(one.total_bytes)} are free"
            largest = f"end {one.holders[0].name} (pid {one.holders[0].pid}), or " if one.holders else ""
            yield Notice(level=ERROR, text=text, fix=f"{largest}serve with a smaller --ram")


def _of_plan(info: EngineInfo) -> Iterator[Notice]:
    for line in info.lowered:
        yield Notice(
            level=WARNING,
            text=f"lowered to fit in memory: {line}",
            fix="holdfast plan MODEL shows what helps, and what it costs",
        )
