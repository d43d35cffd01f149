"""What fits."""

from holdfast.planner.footprint import Limits
from holdfast.planner.plan import Plan, make_plan

__all__ = ["Limits", "Plan", "make_plan"]
