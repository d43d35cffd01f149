"""What fits."""

from holdfast.footprint.cpu import Limits
from holdfast.planner.serve.cpu_plan import Plan, make_plan, settle_pool

__all__ = ["Limits", "Plan", "make_plan", "settle_pool"]
