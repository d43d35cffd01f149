"""What fits."""

from holdfast.footprint.cpu import Limits
from holdfast.planner.serve.cpu_plan import make_plan, settle_pool
from holdfast.planner.serve.plan import Plan

__all__ = ["Limits", "Plan", "make_plan", "settle_pool"]
