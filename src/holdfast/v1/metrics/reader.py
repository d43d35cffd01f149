"""Where vLLM keeps the kinds of `LLM.get_metrics`, for code that imports them from there. Owns nothing."""

from holdfast.observability.metrics.snapshot import Counter, Gauge, Histogram, Metric, Vector

__all__ = ["Counter", "Gauge", "Histogram", "Metric", "Vector"]
