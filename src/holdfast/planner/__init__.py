"""What fits."""

from holdfast.planner.footprint import Limits
from holdfast.planner.plan import Plan, make_plan, settle_pool

__all__ = ["Limits", "Plan", "make_plan", "settle_pool"]
