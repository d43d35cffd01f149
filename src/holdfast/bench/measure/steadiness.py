"""Whether a server stays as it was: throughput and memory of the last fifth of the peak against the second, and the
longest time in which no stream that was under way got anything."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

import msgspec
import numpy as np

from holdfast.bench.client.answers import TimedAnswer
from holdfast.bench.measure.figures import BLOCK_EVENTS, token_blocks, tokens_between
from holdfast.bench.measure.samples import ServerSample

FIFTHS = 5
ROUNDED_S = 5e-4
"""What a moment of a long run may be off by in four bytes."""
BINS_OF_A_FIFTH = 6
"""How much these differ within a fifth says by how much two fifths differ by chance."""
FEWEST_REQUESTS = 20
"""Of a fifth with fewer, throughput says when they happened to come."""


class Drift(msgspec.Struct, frozen=True, kw_only=True):
    """`early`: the second fifth, once everything is warm. `late`: the last."""

    early: float
    late: float
    noise: float = 0.0
    """The standard error of their difference; 0: not known."""
    pools: float = 0.0
    """Of memory, the part of `early` that was taken by plan: weights and pools."""
    pools_grew: float = 0.0
    """By so much until `late`: a pool, or layers, that were given up and taken back. Below 0: given up meanwhile."""

    @property
    def share(self) -> float:
        return self.late / self.early - 1 if self.early else 0.0


class Stall(msgspec.Struct, frozen=True, kw_only=True):
    at_s: float
    """After the start of the run."""
    seconds: float
    streams: int
    """Under way meanwhile."""


def _fifth(number: int, begin_s: float, end_s: float) -> tuple[float, float]:
    fifth = (end_s - begin_s) / FIFTHS
    return begin_s + number * fifth, begin_s + (number + 1) * fifth


def throughput_drift(answers: Sequence[TimedAnswer], begin_s: float, end_s: float) -> Drift | None:
    """In output tokens a second. None: too few requests were under way to tell."""
    low, high = _fifth(1, begin_s, end_s)
    if sum(answer.sent_s < high and answer.end_s >= low for answer in answers) < FEWEST_REQUESTS:
        return None
    edges = np.linspace(begin_s, end_s, FIFTHS * BINS_OF_A_FIFTH + 1)
    counts = tokens_between(answers, edges)
    rates = (counts / np.diff(edges)).reshape(FIFTHS, BINS_OF_A_FIFTH)
    means = rates.mean(axis=1)
    # The median: a server that slows down within a fifth must not count as noise.
    noise = math.sqrt(2 * np.median(rates.var(axis=1, ddof=1)) / BINS_OF_A_FIFTH)
    return Drift(early=float(means[1]), late=float(means[-1]), noise=noise) if means[1] else None


def memory_drift(samples: Sequence[ServerSample], begin_s: float, end_s: float, *, vram: bool) -> Drift | None:
    """In bytes, without the KV cache where the server says how much of it it touched: that fills up, and is planned."""
    held, pools = [], []
    for number in (1, FIFTHS - 1):
        low, high = _fifth(number, begin_s, end_s)
        within = [sample for sample in samples if low <= sample.at_s < high]
        values = [value for sample in within if (value := sample.vram_bytes if vram else sample.steady_ram_bytes)]
        if not values:
            return None
        held.append(float(median(values)))
        planned = median(sample.vram_pools_bytes if vram else sample.ram_pools_bytes for sample in within)
        pools.append(min(held[-1], float(planned)))
    grew = pools[1] - pools[0] if all(pools) else 0.0  # Of what the server did not tell of both, nothing is known.
    return Drift(early=held[0], late=held[1], pools=pools[0], pools_grew=grew)


def longest_stall(
    answers: Sequence[TimedAnswer], start_s: float, within: tuple[float, float] | None = None
) -> Stall | None:
    """Between two moments in which anything came, of those that some stream spans. `within`: both lie there."""
    streams = [answer for answer in answers if answer.first_s is not None]
    # Four bytes each are exact to a tenth of a millisecond within an hour, and stalls are of a second.
    parts = [(times - start_s).astype(np.float32) for times, _ in token_blocks(streams)]
    times = np.concatenate(parts) if parts else np.empty(0, np.float32)
    times.sort()
    if within is not None:
        times = times[slice(*np.searchsorted(times, np.array(within) - start_s))]
    begins = np.sort([answer.first_s - start_s - ROUNDED_S for answer in streams if answer.first_s is not None])
    ends = np.sort([answer.end_s - start_s + ROUNDED_S for answer in streams])
    found = None
    for at in range(0, len(times) - 1, BLOCK_EVENTS):
        lows, highs = times[at : at + BLOCK_EVENTS], times[at + 1 : at + 1 + BLOCK_EVENTS]
        lows = lows[: len(highs)]
        # Nothing begins or ends between two neighbours: what has begun at the first and not ended before the second.
        spanning = np.searchsorted(begins, lows, "right") - np.searchsorted(ends, highs, "left")
        gaps = np.where(spanning > 0, highs - lows, 0)
        place = int(gaps.argmax())
        if gaps[place] > (0 if found is None else found.seconds):
            found = Stall(at_s=float(lows[place]), seconds=float(gaps[place]), streams=int(spanning[place]))
    return found
