"""The heaviest step that limits allow, as a plan. Decides nothing, measures nothing."""

from __future__ import annotations

from holdfast.execution.batch import RunnerLimits
from holdfast.kvcache.groups import KVLayout
from holdfast.records import Row, SamplingParams, SequenceStart, StepPlan, TableWrite
from holdfast.records.sampling import MAX_LOGPROBS

PROFILED_PAST = 1024
"""Tokens before the profiled chunk: enough that its attention joins a past and itself."""


def heaviest_plan(limits: RunnerLimits, layout: KVLayout, *, scored: int | None = None) -> StepPlan:
    """One prompt chunk as large as the token budget behind some past, one single token at the end of the context,
    every other slot a single token; all sample with every option on, and prompts are scored: all tokens of this step,
    or so many of each row. All rows share one page of the pool."""
    everything = SamplingParams(
        temperature=1.0,
        top_k=1000,
        top_p=0.999,
        min_p=1e-9,
        repetition_penalty=1.1,
        seed=0,
        logprobs=MAX_LOGPROBS,
        prompt_logprobs=MAX_LOGPROBS,
    )
    slots = min(limits.max_num_seqs, limits.max_num_batched_tokens)
    left = limits.max_num_batched_tokens - slots
    starts, writes, rows = [], [], []
    for slot in range(slots):
        count = min(limits.max_model_len, 1 + left)
        length = min(limits.max_model_len, count + PROFILED_PAST) if left else 1
        if slot == slots - 1:
            length = limits.max_model_len
        left -= count - 1
        starts.append(SequenceStart(slot, "profile", [0] * length, length, everything))
        blocks = [1] * layout.blocks_for(length)
        writes += [TableWrite(slot, group.index, 0, blocks) for group in layout.groups]
        first, told = length - count, count - 1 if scored is None else min(count - 1, scored)
        rows.append(Row(slot, first, count, True, *((first, first + told) if told else ())))
    return StepPlan(step_id=0, starts=starts, table_writes=writes, rows=rows)
