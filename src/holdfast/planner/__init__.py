"""What fits."""

from holdfast.footprint.cpu import Limits
from holdfast.planner.fit.result import Plan
from holdfast.planner.serve.cpu_plan import make_cpu_plan
from holdfast.planner.serve.settle import coming_bytes, largest_pool, settle_pool

__all__ = ["Limits", "Plan", "coming_bytes", "largest_pool", "make_cpu_plan", "settle_pool"]
