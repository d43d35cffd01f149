"""What to set where a plan fits by less than its estimates may be off, and nothing that was asked for is safe.

Each setting is planned before it is named. Whether a plan is that close is judged elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from holdfast.errors import ConfigurationError
from holdfast.planner.advice.presets import ROUND_TOKENS, Configuration, safe_configuration
from holdfast.planner.advice.remedy import LEAST_CONTEXT, MODEST, with_settings
from holdfast.planner.advice.warnings import WITHIN_ERROR, PlanWarning
from holdfast.planner.fit.search import Fit, Question, fit

NOTHING_HELPS = "no setting that was tried leaves that margin: test it before relying on it, or use a smaller model"


def with_fixes(warnings: tuple[PlanWarning, ...], found: Fit, safe: Configuration | None) -> tuple[PlanWarning, ...]:
    """The same warnings; one that sends people to a safe configuration names a setting where there is none."""
    if safe is not None or not found.fits:
        return warnings
    return tuple(replace(warning, fix=_fix(found)) if warning.code == WITHIN_ERROR else warning for warning in warnings)


def _fix(found: Fit) -> str:
    for flags, question in _candidates(found):
        try:
            other = fit(question)
        except ConfigurationError:
            continue
        if other.fits and safe_configuration(other) is not None:
            return f"{flags} leaves that margin"
    return NOTHING_HELPS


def _candidates(found: Fit) -> Iterator[tuple[str, Question]]:
    """What costs nothing first."""
    question, limits = found.question, found.limits
    modest = {name: min(value, getattr(limits, name)) for name, value in MODEST.items()}
    if question.traffic is None and question.machine.kind == "gpu":
        flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in modest.items())
        yield flags, with_settings(question, **modest)
    if all(rank.device.gpu is not None and rank.device.gpu.fp8 for rank in found.ranks) and found.kv_dtype != "fp8":
        yield "--kv-cache-dtype fp8", with_settings(question, kv_cache_dtype="fp8")
    room = min(max(0, rank.room_bytes - rank.uncertain_bytes) for rank in found.ranks)
    length = min(rank.kv.longest(room, limits.max_model_len) for rank in found.ranks) // ROUND_TOKENS * ROUND_TOKENS
    if length >= LEAST_CONTEXT and question.traffic is None:
        yield f"--max-model-len {length}", with_settings(question, max_model_len=length)
