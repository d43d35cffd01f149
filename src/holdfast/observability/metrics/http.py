"""Requests by path and status, under the names that a vLLM server has them (those of FastAPI's instrumentator).

Owns these series and how few labels they have: whatever clients send, their number does not grow. Knows no server.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, GCCollector, Histogram, PlatformCollector, ProcessCollector
from prometheus_client import Summary as Sizes

OTHER = "none"
"""The handler of paths that are not there, as the instrumentator calls it."""
METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE"})
_FEW_BUCKETS_S = (0.1, 0.5, 1.0)
_MANY_BUCKETS_S = (
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    1.5,
    2.0,
    2.5,
    3.0,
    3.5,
    4.0,
    4.5,
    5.0,
    7.5,
    10.0,
    30.0,
    60.0,
)


class HttpMetrics:
    """One a server, beside `ServingMetrics` in the same registry; with what the system says of this process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._total = Counter(
            "http_requests",
            "Number of requests by method, status and handler.",
            ["method", "status", "handler"],
            registry=registry,
        )
        self._duration = Histogram(
            "http_request_duration_seconds",
            "Latency by method and handler.",
            ["method", "handler"],
            buckets=_FEW_BUCKETS_S,
            registry=registry,
        )
        self._fine_duration = Histogram(
            "http_request_duration_highr_seconds",
            "Latency of all requests.",
            buckets=_MANY_BUCKETS_S,
            registry=registry,
        )
        self._taken = Sizes(
            "http_request_size_bytes", "Size of request bodies by handler.", ["handler"], registry=registry
        )
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        GCCollector(registry=registry)

    def count(self, method: str, handler: str, status: int, duration_s: float, *, taken_bytes: int) -> None:
        method = method if method in METHODS else "OTHER"
        self._total.labels(method, f"{status // 100}xx", handler).inc()
        self._duration.labels(method, handler).observe(duration_s)
        self._fine_duration.observe(duration_s)
        self._taken.labels(handler).observe(taken_bytes)
