"""The figures that engines print while they serve: tokens a second, requests, KV in use, hits in the prefix cache.

Keeps a bounded number of samples however long the log is; says what they show, and no more.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from statistics import median

_VLLM = re.compile(
    r"Avg generation throughput: (?P<generation>[\d.]+) tokens?/s, Running: (?P<running>\d+) reqs?,"
    r"(?: Swapped: \d+ reqs?,)?(?: Deferred: \d+ reqs?,)? (?:Waiting|Pending): (?P<waiting>\d+) reqs?"
    r"(?:,.*?GPU KV cache usage: (?P<kv>[\d.]+)%)?(?:.*?Prefix cache hit rate: (?:GPU: )?(?P<hits>[\d.]+)%)?"
)
_SGLANG = re.compile(
    r"Decode batch.*?#running-req: (?P<running>\d+).*?(?:token usage|full token usage): (?P<kv>[\d.]+)"
    r".*?gen throughput \(token/s\): (?P<generation>[\d.]+).*?#queue-req: (?P<waiting>\d+)"
)
SAMPLES = 4096
ENOUGH = 30
"""Samples under load before anything is said of them."""
FULL_PERCENT = 95.0
"""From which on, while others wait, it is KV that they wait for."""
SOME_FULL = 6
REPORTS, FEW_RUNNING, MANY_WAITING = 3, 2, 8
"""A queue that stands: so many reports at least, so few requests that run and so many that wait in each."""
TOGETHER = 2
"""Requests at once, at least, for speeds to be compared: one alone is idle between its steps."""
DECAYED = 0.4
UNUSED_PERCENT = 30.0


@dataclass(frozen=True, slots=True)
class ThroughputSample:
    generation: float
    running: int
    waiting: int
    kv_percent: float
    hits_percent: float | None


class Statistics:
    def __init__(self) -> None:
        self.samples: list[ThroughputSample] = []
        self._every, self._seen = 1, 0
        self.full_and_waiting = 0
        """Samples in a row, at most."""
        self._in_a_row = 0

    def read(self, text: str) -> bool:
        if "hroughput" not in text:
            return False
        found = _VLLM.search(text)
        share = 1.0
        if found is None:
            found, share = _SGLANG.search(text), 100.0
        if found is None:
            return False
        row = found.groupdict()
        hits = row.get("hits")
        self._add(
            ThroughputSample(
                float(row["generation"]),
                int(row["running"]),
                int(row["waiting"]),
                float(row["kv"] or 0) * share,
                None if hits is None else float(hits),
            )
        )
        return True

    def _add(self, sample: ThroughputSample) -> None:
        full = sample.kv_percent >= FULL_PERCENT and sample.waiting > 0
        self._in_a_row = self._in_a_row + 1 if full else 0
        self.full_and_waiting = max(self.full_and_waiting, self._in_a_row)
        self._seen += 1
        if self._seen % self._every == 0:
            self.samples.append(sample)
        if len(self.samples) > SAMPLES:
            self.samples = self.samples[::2]
            self._every *= 2

    @property
    def starved(self) -> bool:
        """KV full while requests wait, for more than a moment."""
        return self.full_and_waiting >= SOME_FULL

    def stands(self) -> dict[str, float] | None:
        """Few run and many wait in every report, with KV to spare: the queue does not move."""
        few = all(
            one.running <= FEW_RUNNING and one.waiting >= MANY_WAITING and one.kv_percent < FULL_PERCENT
            for one in self.samples
        )
        if len(self.samples) < REPORTS or not few:
            return None
        last = self.samples[-1]
        return {"running": float(last.running), "waiting": float(last.waiting), "samples": float(len(self.samples))}

    def decay(self) -> tuple[float, float] | None:
        """Tokens a second in the first and the last third under the same load, where it fell and stayed down."""
        busy = [sample for sample in self.samples if sample.running > 0 and sample.generation > 0]
        third = len(busy) // 3
        if third < ENOUGH // 2:
            return None
        first, last = busy[:third], busy[-third:]
        if min(median(one.running for one in part) for part in (first, last)) < TOGETHER:
            return None
        if median(one.running + one.waiting for one in last) < median(one.running + one.waiting for one in first):
            return None
        before, after = median(one.generation for one in first), median(one.generation for one in last)
        return (before, after) if after < DECAYED * before else None

    def unused_prefixes(self) -> float | None:
        """The hit rate, where it stays low under load."""
        rates = [one.hits_percent for one in self.samples if one.hits_percent is not None and one.running > 0]
        if len(rates) < ENOUGH or rates[-1] >= UNUSED_PERCENT:
            return None
        return rates[-1]
