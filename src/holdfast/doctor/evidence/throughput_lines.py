"""The figures that engines print while they serve: tokens a second, requests, KV in use, hits in the prefix cache.

Keeps a bounded number of samples however long the log is. What they mean is in the rules (`over = "figures"`).
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

    def numbers(self) -> dict[str, float]:
        """By the names that rules use: those that there are samples enough for."""
        numbers = {"reports": float(len(self.samples)), "full_in_a_row": float(self.full_and_waiting)}
        if self.samples:
            last = self.samples[-1]
            numbers |= {"last_running": float(last.running), "last_waiting": float(last.waiting)}
            numbers["most_running"] = float(max(one.running for one in self.samples))
            numbers["least_waiting"] = float(min(one.waiting for one in self.samples))
            numbers["most_kv_percent"] = max(one.kv_percent for one in self.samples)
        rates = [one.hits_percent for one in self.samples if one.hits_percent is not None and one.running > 0]
        if len(rates) >= ENOUGH:
            numbers["hit_percent"] = rates[-1]
        busy = [sample for sample in self.samples if sample.running > 0 and sample.generation > 0]
        third = len(busy) // 3
        if third >= ENOUGH // 2:
            thirds = (busy[:third], busy[-third:])
            numbers["least_together"] = min(median(one.running for one in part) for part in thirds)
            numbers["load_before"], numbers["load_after"] = (
                median(one.running + one.waiting for one in part) for part in thirds
            )
            numbers["before"], numbers["after"] = (median(one.generation for one in part) for part in thirds)
        return numbers
