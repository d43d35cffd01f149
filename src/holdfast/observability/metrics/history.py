"""The last hour of a server as a bounded ring of samples: rates, requests, latencies, KV and memory.

It is fed by the counters that /metrics shows and keeps nothing of any request. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from holdfast.observability.ledger import Ledger
from holdfast.observability.metrics.registry import ServingMetrics
from holdfast.records import EngineStats

INTERVAL_S = 5.0
SAMPLES = 720
"""An hour of them, 0.4 MB."""
SHARES = (0.5, 0.95)

FIELDS = (
    "time_s", "prompt_tokens_per_s", "generation_tokens_per_s", "running", "waiting", "kv_share",
    "ttft_p50_s", "ttft_p95_s", "inter_token_p50_s", "inter_token_p95_s", "e2e_p50_s", "e2e_p95_s",
    "ended", "failed", "preemptions", "held_bytes",
)  # fmt: skip
"""Of a sample, in this order. Latencies are of what ended, or came, since the sample before; None: nothing did."""

Sample = tuple[float | None, ...]


class History:
    """Samples are numbered from 1, over the life of the server."""

    def __init__(
        self,
        metrics: ServingMetrics,
        stats: Callable[[], EngineStats],
        memory: Callable[[], Ledger | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics = metrics
        self._stats = stats
        self._memory = memory
        self._clock = clock
        self._latencies = metrics.latencies()
        self._samples: deque[Sample] = deque(maxlen=SAMPLES)
        self.newest = 0
        """The number of the last sample."""
        self._remember(stats())

    def _remember(self, stats: EngineStats) -> None:
        self._taken_s = self._clock()
        self._tokens = self._metrics.token_totals()
        self._ended = self._metrics.ended_totals()
        self._preemptions = stats.preemptions_total
        self._counts = [latency.counts() for latency in self._latencies]

    def take(self) -> None:
        """One sample more, of the time since the last."""
        stats, ledger = self._stats(), self._memory()
        elapsed_s = max(self._clock() - self._taken_s, 1e-9)
        tokens = zip(self._metrics.token_totals(), self._tokens, strict=True)
        ended = zip(self._metrics.ended_totals(), self._ended, strict=True)
        latencies = zip(self._latencies, self._counts, strict=True)
        self._samples.append(
            (
                round(time.time(), 1),
                *(round((now - then) / elapsed_s, 2) for now, then in tokens),
                stats.running,
                stats.waiting,
                round(stats.blocks_used / stats.blocks_total, 4) if stats.blocks_total else 0.0,
                *(
                    None if found is None else round(found, 6)
                    for latency, before in latencies
                    for found in latency.quantiles(before, SHARES)
                ),
                *(now - then for now, then in ended),
                max(0, stats.preemptions_total - self._preemptions),
                None if ledger is None else sum(tier.measured_bytes for tier in ledger.tiers),
            )
        )
        self.newest += 1
        self._remember(stats)

    def since(self, number: int) -> list[Sample]:
        """Those behind sample `number`, of those that are kept."""
        wanted = min(max(self.newest - number, 0), len(self._samples))
        return [self._samples[place] for place in range(len(self._samples) - wanted, len(self._samples))]

    def last(self, seconds: float) -> list[dict[str, float | None]]:
        """By their names."""
        recent = self.since(self.newest - int(seconds / INTERVAL_S))
        return [dict(zip(FIELDS, sample, strict=True)) for sample in recent]

    async def run(self, interval_s: float = INTERVAL_S) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(interval_s)
            self.take()
