"""What was set by hand of layers or experts in RAM, against what the planner would place by itself: said only where
that is faster."""

from __future__ import annotations

from holdfast.planner.advice.remedy import without_hand
from holdfast.planner.advice.throughput import shown_rate, throughput
from holdfast.planner.fit.expert_placement import ExpertPlacement, place_larger
from holdfast.planner.fit.placement import Placement, may_stream, pinned_room
from holdfast.planner.fit.search import Question, fit

WORTH = 1.05
"""Times the tokens a second; less is within what two estimates of one machine differ by."""


def faster_without(question: Question, placed: Placement | ExpertPlacement) -> str | None:
    """`placed`: as was asked for. None: it does not run so, or is as fast, or RAM is not known that the other takes."""
    left, rate = without_hand(question)[0], throughput(placed.plan) if placed.fits else None
    if rate is None or pinned_room(question) is None:
        return None
    found = fit(left)
    if not found.fits:
        other = place_larger(left) if may_stream(left) else None
        if other is None or not other.fits:
            return None
        found = other.plan
    faster = throughput(found)
    if faster is None or faster.one.estimate.tokens_per_s < WORTH * rate.one.estimate.tokens_per_s:
        return None
    shown, length = shown_rate(faster.one.estimate.tokens_per_s), found.limits.max_model_len
    context = "" if length == placed.plan.limits.max_model_len else f", with a context of {length:,}"
    return f"leave {question.settings.offload.flag} out: about {shown} tokens/s of one sequence{context}"
