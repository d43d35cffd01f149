"""Logs: plain lines for people on stderr, JSON lines for machines, and a throughput line now and then.

Owns formats and where they go. It never decides what is worth saying about a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import msgspec

from holdfast.observability.decisions import said_at_start
from holdfast.observability.line_format import line_format
from holdfast.observability.metrics.registry import ServingMetrics
from holdfast.records import EngineInfo, EngineStats

log = logging.getLogger("holdfast.stats")


class LineHandler(logging.Handler):
    """Writes whole lines, by default to standard error as it is at that moment: a progress bar of rich puts itself in
    its place, and draws lines above the bar. `write_line` may be replaced by whoever has the cursor."""

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__()
        self._stream = stream
        self.write_line: Callable[[str], None] = self.write_plain

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.write_line(self.format(record))
        except Exception:
            self.handleError(record)

    def write_plain(self, line: str) -> None:
        stream = self._stream or sys.stderr
        stream.write(line + "\n")
        stream.flush()


def set_up_logging(level: str = "info", stream: TextIO | None = None) -> None:
    """Plain lines of the `holdfast` loggers to stderr. Calling it again replaces the handler."""
    handler = LineHandler(stream)
    handler.setFormatter(line_format("%(name)s"))
    root = logging.getLogger("holdfast")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False


@contextlib.contextmanager
def log_lines_to(write_line: Callable[[str], None]) -> Iterator[None]:
    """Within the block, lines of the log are handed to somebody who knows where the cursor is. Called by any thread,
    one at a time."""
    handlers = [one for one in logging.getLogger("holdfast").handlers if isinstance(one, LineHandler)]
    for handler in handlers:
        handler.write_line = write_line
    try:
        yield
    finally:
        for handler in handlers:
            handler.write_line = handler.write_plain


def write_log_line(line: str) -> None:
    """One that another process has formatted."""
    for handler in logging.getLogger("holdfast").handlers:
        if isinstance(handler, LineHandler):
            with handler.lock or contextlib.nullcontext():
                handler.write_line(line)
            return
    print(line, file=sys.stderr, flush=True)


def json_lines(target: Path | TextIO | None = None) -> Callable[[dict[str, Any]], None]:
    """A function that writes one JSON line a call, flushed; to a file it appends. None: standard error, as it is at
    that moment."""
    stream = target.open("a", encoding="utf-8") if isinstance(target, Path) else target

    def write(line: dict[str, Any]) -> None:
        now = stream or sys.stderr
        now.write(msgspec.json.encode(line).decode() + "\n")
        now.flush()

    return write


def ready_lines(info: EngineInfo, served_names: Sequence[str] = ()) -> list[str]:
    """What people, and tools that read vLLM's log, look for when a server has started."""
    concurrency = info.max_concurrency or info.kv_tokens / info.max_model_len
    named = f", served as {', '.join(served_names)}" if served_names and tuple(served_names) != (info.model,) else ""
    return [
        f"Model {info.model}: {_count(info.parameters)} parameters, dtype {info.dtype}, device {info.device}{named}",
        f"Context: {info.max_model_len:,} tokens. Batch: {info.max_num_seqs} sequences, "
        f"{info.max_num_batched_tokens:,} tokens per step",
        f"# KV blocks: {info.blocks:,} of {info.block_size} tokens, dtype {info.kv_dtype}, "
        f"prefix caching {'on' if info.prefix_caching else 'off'}",
        f"KV cache size: {info.kv_tokens:,} tokens{_in_fewer_bits(info)}",
        f"Maximum concurrency for {info.max_model_len:,} tokens per request: {concurrency:.2f}x",
        *[f"Decision: {line}" for line in info.decisions if said_at_start(line)],
    ]


def detail_lines(info: EngineInfo, *, parallel_size: int = 1) -> list[str]:
    """What explains a start-up: for whoever asks for it."""
    others = [line for line in info.decisions if not said_at_start(line)]
    return [
        f"Parallel size: {parallel_size}",
        f"Attention backend: {info.attention_backend}",
        *[f"Decision: {line}" for line in others],
    ]


def _in_fewer_bits(info: EngineInfo) -> str:
    """Of bytes: how many tokens there are may be limited by more than memory."""
    share = {"float32": "a quarter", "float16": "half", "bfloat16": "half"}.get(info.dtype)
    return f", in {info.kv_dtype}: {share} of {info.dtype}'s bytes" if info.kv_dtype.startswith("fp8") and share else ""


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:,.2f}B" if parameters >= 1e9 else f"{parameters / 1e6:,.0f}M"


class ThroughputLog:
    """The periodic line. `line` is pure given the clock, so that it can be tested without waiting."""

    def __init__(
        self, metrics: ServingMetrics, stats: Callable[[], EngineStats], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._metrics = metrics
        self._stats = stats
        self._clock = clock
        self._last_s = clock()
        self._last_prompt, self._last_generated = metrics.token_totals()
        self._was_busy = False

    def line(self) -> str | None:
        """None when nothing happened since the last line and nothing had happened before it either."""
        now_s, stats = self._clock(), self._stats()
        elapsed_s = max(now_s - self._last_s, 1e-9)
        prompt, generated = self._metrics.token_totals()
        prompt_rate = (prompt - self._last_prompt) / elapsed_s
        generated_rate = (generated - self._last_generated) / elapsed_s
        self._last_s, self._last_prompt, self._last_generated = now_s, prompt, generated
        busy = bool(prompt_rate or generated_rate or stats.running or stats.waiting)
        quiet, self._was_busy = not busy and not self._was_busy, busy
        if quiet:
            return None
        usage = 100 * stats.blocks_used / stats.blocks_total if stats.blocks_total else 0.0
        hits = 100 * stats.prefix_hits_total / stats.prefix_queries_total if stats.prefix_queries_total else 0.0
        return (
            f"Avg prompt throughput: {prompt_rate:.1f} tokens/s, Avg generation throughput: {generated_rate:.1f} "
            f"tokens/s, Running: {stats.running} reqs, Waiting: {stats.waiting} reqs, "
            f"KV cache usage: {usage:.1f}%, Prefix cache hit rate: {hits:.1f}%"
        )

    async def run(self, interval_s: float = 10.0) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(interval_s)
            line = self.line()
            if line is not None:
                log.info("%s", line)
