"""Two ready configurations, both planned.

safe  fits even if every estimate is too low, and with every admitted sequence at full length: nothing is preempted
max   all memory, the longest context that its steps leave, and as many sequences of the usual length as fit

Where no safe one exists, the setting that would give one is searched for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from holdfast.planner.advice.quantized_remedies import smaller_kv
from holdfast.planner.advice.remedy import (
    LEAST_CONTEXT,
    MODEST,
    is_absolute,
    planned,
    with_settings,
)
from holdfast.planner.advice.search import first_that_fits
from holdfast.planner.advice.warnings import WITHIN_ERROR, PlanWarning, safe_utilization
from holdfast.planner.compat.vllm_release import Vllm
from holdfast.planner.engines.command import Command
from holdfast.planner.engines.commands import commands
from holdfast.planner.fit.search import USEFUL_TOKENS, Plan, Question, fit
from holdfast.planner.inputs.question import MOST_UTILIZATION
from holdfast.planner.sizing.default_limits import CPU_RUNGS, GPU_RUNGS
from holdfast.units import counted

NOTHING_HELPS = "no setting that was tried leaves that margin: test it before relying on it, or use a smaller model"
SAFE_SEQUENCES = 4
"""Where the context is left to us, so many of full length go side by side, as far as the model's context allows."""
ROUND_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    fit: Plan
    max_num_seqs: int
    reason: str
    asked_model_len: int | None = None
    """By the user; None: the context was left to us, and an engine that holds less of it is told so."""

    @property
    def settings(self) -> Mapping[str, object]:
        share = {} if is_absolute(self.fit.question) else {"gpu_memory_utilization": self.fit.utilization}
        return share | {
            "max_model_len": self.fit.limits.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.fit.limits.max_num_batched_tokens,
            "kv_cache_dtype": self.fit.kv_dtype,
            "tensor_parallel_size": self.fit.tensor_parallel,
            "pipeline_parallel_size": self.fit.pipeline_parallel,
        }

    def commands(self, vllm: Vllm | None = None) -> dict[str, Command]:
        question = with_settings(self.fit.question, max_model_len=self.asked_model_len)
        return commands(replace(self.fit, question=question), sequences=self.max_num_seqs, vllm=vllm)

    def sized_otherwise(self, vllm: Vllm) -> Iterator[str]:
        """Where vLLM's own sizing holds less than this."""
        told = self.commands(vllm)["vllm"].max_model_len
        if told is not None and told < self.fit.limits.max_model_len:
            yield f"as {vllm.name} sizes it: --max-model-len {told}"


def safe_configuration(asked: Plan) -> Configuration | None:
    """With the largest step that leaves room for errors; a size that was set stays. None: nothing that serves what was
    requested is safe here."""
    question = _with_share(asked, safe_utilization(asked))
    step = fit(question).limits.max_num_batched_tokens
    rungs = GPU_RUNGS if question.machine.kind == "gpu" else CPU_RUNGS
    lower = [rung.step_tokens for rung in rungs if rung.step_tokens < step]
    steps = [step, *(lower if question.settings.max_num_batched_tokens is None else ())]
    found = first_that_fits(steps, lambda size: _safe(with_settings(question, max_num_batched_tokens=size)))
    return None if found is None else found[1]


def _safe(question: Question) -> Configuration | None:
    base = fit(question)
    length = _safe_length(base)
    if length < min(LEAST_CONTEXT, base.question.model.spec.max_position):
        return None
    # What is set aside beside KV grows with the sequences: one alone leaves room for more than many do.
    alone = _with_sequences(question, length, 1)
    held = max(_safely_held(base, length), 0 if alone is None else _safely_held(alone, length))
    sequences = min(base.limits.max_num_seqs, held)
    while sequences >= 1:
        found = _with_sequences(question, length, sequences)
        # The pool of a shorter context may be smaller: on a CPU it has a usual size, and holds one of full length.
        held = sequences // 2 if found is None else _safely_held(found, length)
        if found is not None and held >= sequences:
            return Configuration(
                fit=found,
                max_num_seqs=sequences,
                reason=_safe_reason(question, length, sequences),
                asked_model_len=question.settings.max_model_len,
            )
        sequences = min(sequences - 1, held)
    return None


def _with_sequences(question: Question, length: int, sequences: int) -> Plan | None:
    traffic = question.traffic
    if traffic is not None and sequences < traffic.concurrency:
        question = replace(question, traffic=replace(traffic, concurrency=sequences))
    return planned(with_settings(question, max_model_len=length, max_num_seqs=sequences))


def _safe_reason(question: Question, length: int, sequences: int) -> str:
    traffic = question.traffic
    waits = f"; the rest of {traffic.concurrency} is queued" if traffic and sequences < traffic.concurrency else ""
    fit = "fits" if sequences == 1 else "fit together"
    of = f"{counted(sequences, 'sequence')} of {counted(length, 'token')}"
    return f"{of} {fit} even with every estimate at its worst{waits}"


def _with_share(asked: Plan, share: float) -> Question:
    budget = {} if is_absolute(asked.question) else {"utilization": share}
    return with_settings(asked.question, tensor_parallel=asked.tensor_parallel, **budget)


def _safe_length(base: Plan) -> int:
    """As asked; as long as the traffic is; or what leaves room for several."""
    question, most = base.question, base.question.model.spec.max_position
    if question.settings.max_model_len is not None:
        return question.settings.max_model_len
    if question.traffic is not None:
        return min(most, -(-question.traffic.length // ROUND_TOKENS) * ROUND_TOKENS)
    room = min(rank.safe_bytes for rank in base.ranks)
    length = 0
    for share in range(SAFE_SEQUENCES, 0, -1):
        length = min(rank.kv.longest(room, most, sequences=share) for rank in base.ranks)
        if length >= min(USEFUL_TOKENS, most):
            break
    return length if length == most else length // ROUND_TOKENS * ROUND_TOKENS


def _safely_held(base: Plan, length: int) -> int:
    if length < 1:
        return 0
    return min(int(rank.kv.concurrency(rank.safe_bytes, length)) for rank in base.ranks)


def max_configuration(asked: Plan) -> Configuration | None:
    question = with_settings(_with_share(asked, max(asked.utilization, MOST_UTILIZATION)), max_model_len=None)
    most = planned(question)
    if most is None:
        return None
    # Never more than the pool holds, whatever was set: what is said here must be so. Fewer leave room for a longer
    # context, of which there are no more.
    sequences = max(1, min(most.limits.max_num_seqs, int(most.concurrency(most.usual_tokens))))
    limits = {"max_num_seqs": sequences, "max_num_batched_tokens": most.limits.max_num_batched_tokens}
    fewer = planned(with_settings(question, **limits)) or most
    length = max(most.limits.max_model_len, fewer.limits.max_model_len)
    found = planned(with_settings(question, **limits, max_model_len=length))
    if found is None:
        return None
    return Configuration(fit=found, max_num_seqs=sequences, reason=_max_reason(found, most.longest_tokens, sequences))


def _max_reason(found: Plan, longest: int, sequences: int) -> str:
    """`longest`: what memory holds with the lowest limits."""
    context, step = "the longest context", found.limits.max_num_batched_tokens
    if found.limits.max_model_len < longest:
        context += f" with steps of {counted(step, 'token')} ({longest:,} with the smallest steps, for one sequence)"
    return f"{context}, and {counted(sequences, 'sequence')} of {counted(found.usual_tokens, 'token')} at once"


def with_margin(warnings: tuple[PlanWarning, ...], found: Plan, safe: Configuration | None) -> tuple[PlanWarning, ...]:
    """The same warnings; one that refers to a safe configuration names a setting where there is none."""
    if safe is not None or not found.fits:
        return warnings
    return tuple(replace(one, fix=_margin(found)) if one.code == WITHIN_ERROR else one for one in warnings)


def _margin(found: Plan) -> str:
    """What to set where a plan fits by less than its estimates may be off: the cheapest that leaves that margin."""

    def plan(settings: dict[str, object]) -> Configuration | None:
        other = fit(with_settings(found.question, **settings))
        return safe_configuration(other) if other.fits else None

    best = first_that_fits(_settings_with_margin(found), plan)
    if best is None:
        return NOTHING_HELPS
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in best[0].items()) + " leaves that margin"


def _settings_with_margin(found: Plan) -> Iterator[dict[str, object]]:
    question, limits = found.question, found.limits
    if question.traffic is None and question.machine.kind == "gpu":
        yield {name: min(value, getattr(limits, name)) for name, value in MODEST.items()}
    if smaller_kv(found) == "fp8":
        yield {"kv_cache_dtype": "fp8"}
    room = min(max(0, rank.room_bytes - rank.uncertain_bytes) for rank in found.ranks)
    length = min(rank.kv.longest(room, limits.max_model_len) for rank in found.ranks) // ROUND_TOKENS * ROUND_TOKENS
    if length >= LEAST_CONTEXT and question.traffic is None:
        yield {"max_model_len": length}
