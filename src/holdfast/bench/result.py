"""`BenchResult`: everything that one run found, which is the JSON of `--json` (docs/bench.md)."""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.bench.client.worker import ClientReport
from holdfast.bench.measure.figures import Figures
from holdfast.bench.measure.load_points import LoadPoint
from holdfast.bench.measure.objectives import Objective
from holdfast.bench.measure.rate_points import RatePoint
from holdfast.bench.measure.samples import ServerSample
from holdfast.bench.measure.steadiness import Drift, Stall
from holdfast.bench.measure.verdict import BenchVerdict
from holdfast.bench.target import Target

VERSION = 1
"""Of the JSON. Names are added under it; one that changes its meaning or goes makes a new one."""


class RequestColumns(msgspec.Struct, frozen=True, kw_only=True):
    """One entry a request, in the order of sending; seconds. None: it failed, or was too short."""

    intended_s: list[float]
    """After the start of the run, as is what follows."""
    sent_s: list[float]
    end_s: list[float]
    ttft_s: list[float | None]
    tpot_s: list[float | None]
    prompt_tokens: list[int]
    output_tokens: list[int]
    error: list[str]
    cancelled: list[bool]
    adapter: list[str]
    turn: list[int]


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """One entry a bin of time."""

    bin_s: float
    output_tokens_per_s: list[float]
    in_flight: list[float]
    ttft_p50_s: list[float | None]
    """Of requests sent in it."""
    ttft_p99_s: list[float | None]
    itl_p50_s: list[float | None]
    """Of tokens that came in it."""
    itl_p99_s: list[float | None]


class BenchResult(msgspec.Struct, frozen=True, kw_only=True):
    version: int = VERSION
    holdfast: str
    date: str
    target: Target
    engine: str | None
    """Whose names its metrics have."""
    engine_settings: dict[str, str]
    load: dict[str, Any]
    phases: list[dict[str, Any]]
    slo: list[Objective] = []
    """What was promised; empty: nothing."""
    interrupted: bool = False
    """By Ctrl-C: figures are of what was answered until then."""
    window_s: tuple[float, float]
    """What `peak` is of, after the start of the run."""
    peak: Figures
    whole: Figures
    points: list[LoadPoint]
    knee: LoadPoint | None
    rate_points: list[RatePoint] = []
    """Of a search for the knee by rates."""
    rate_knee: RatePoint | None = None
    throughput_drift: Drift | None
    ram_drift: Drift | None
    vram_drift: Drift | None
    stall: Stall | None
    clients: list[ClientReport]
    samples: list[ServerSample]
    timeline: Timeline
    itl_histogram: list[tuple[float, int]]
    """Upper edge in seconds, and how many gaps up to it and above the edge before."""
    requests: RequestColumns
    verdict: BenchVerdict
