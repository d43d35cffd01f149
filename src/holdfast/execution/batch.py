"""Turns a StepPlan into the arrays a step computes from, against static buffers with one slot a sequence.

Checks a plan whole before anything of it is applied: a wrong plan changes nothing. Knows no arithmetic.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import numpy.typing
import torch

from holdfast.errors import EngineError
from holdfast.execution.lora.products import PlacedRows
from holdfast.execution.ops import AttentionBackend, StepRows
from holdfast.footprint.cpu import Limits
from holdfast.kvcache.groups import KVLayout
from holdfast.records import BlockCopy, Row, SequenceStart, StepPlan, TableWrite


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerLimits:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_loras: int = 0
    """Places of LoRA adapters."""

    @staticmethod
    def of(planned: Limits, max_loras: int = 0) -> RunnerLimits:
        return RunnerLimits(
            max_num_seqs=planned.max_num_seqs,
            max_num_batched_tokens=planned.max_num_batched_tokens,
            max_model_len=planned.max_model_len,
            max_loras=max_loras,
        )


def as_planned(limits: RunnerLimits) -> Limits:
    """The same under the planner's name, for its arithmetic."""
    return Limits(
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    tokens: torch.Tensor
    positions: torch.Tensor
    sampling_tokens: torch.Tensor
    """Index into `tokens` of each sampling row's last token, in the plan's order."""
    sampling_slots: numpy.typing.NDArray[numpy.int64]
    sampling_lengths: numpy.typing.NDArray[numpy.int64]
    """Tokens known to each sampling row: where the sampled one goes."""
    scored_tokens: torch.Tensor
    """Index into `tokens` of each that is scored, row by row in the plan's order."""
    scored_targets: torch.Tensor
    """The known token behind each."""
    scored_slots: list[int]
    token_rows: tuple[torch.Tensor, ...]
    """A group: the row of KVPool.token_rows (place 0, keys) each token's key goes to."""
    fresh_pages: torch.Tensor
    """Pages that get their first token in this step and are not filled by it."""
    attention_plans: tuple[Any, ...]
    """A group: what its attention backend planned."""
    adapted: PlacedRows | None = None
    """Which tokens have LoRA adapters; None: none has."""
    adapted_sampling: PlacedRows | None = None
    """The same of the sampling rows."""

    @property
    def token_count(self) -> int:
        return self.tokens.shape[0]  # `len` of a tensor is slow, and this is for every step.


Places = numpy.typing.NDArray[numpy.int64]
_NOWHERE: Places = numpy.empty(0, dtype=numpy.int64)
_NO_TOKENS = torch.from_numpy(_NOWHERE)


def _wrong(message: str, *, needed: str | None = None, found: str | None = None) -> EngineError:
    return EngineError(f"the step plan is wrong: {message}", code="HF430", needed=needed, found=found)


class SlotBuffers:
    """Token ids and block tables of every slot; what a runner knows of its sequences besides sampling."""

    def __init__(self, limits: RunnerLimits, layout: KVLayout, vocab_size: int) -> None:
        self._limits, self._layout, self._vocab_size = limits, layout, vocab_size
        slots = limits.max_num_seqs
        # One place beyond the context: the last token sampled is kept though nothing is computed from it.
        self.tokens = numpy.zeros((slots, limits.max_model_len + 1), dtype=numpy.int32)
        self.known = numpy.zeros(slots, dtype=numpy.int64)
        blocks = layout.blocks_for(limits.max_model_len)
        self.tables = [numpy.zeros((slots, blocks), dtype=numpy.int32) for _ in layout.groups]
        self.adapter_places = numpy.full(slots, -1, dtype=numpy.int32)

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes + self.known.nbytes + sum(table.nbytes for table in self.tables)

    def apply(self, plan: StepPlan, blocks: int, tiers: Container[int] = ()) -> None:
        """Takes over starts and table writes; raises before changing anything when any part of the plan is wrong.
        `tiers`: those below the pool that there are."""
        self._check(plan, blocks, tiers)
        for start in plan.starts:
            self.tokens[start.slot, : len(start.token_ids)] = start.token_ids
            self.known[start.slot] = len(start.token_ids)
            self.adapter_places[start.slot] = start.adapter_place
            for table in self.tables:
                table[start.slot] = 0
        for write in plan.table_writes:
            self.tables[write.group][write.slot, write.first : write.first + len(write.blocks)] = write.blocks

    def trust(self, plan: StepPlan) -> None:
        """Of a stage that never learns which tokens were sampled, nor needs to: what the plan goes on from is known."""
        for row in plan.rows:
            if row.samples:
                self.known[row.slot] = row.start + row.count

    def append(self, slots: numpy.typing.NDArray[numpy.int64], sampled: numpy.typing.NDArray[numpy.int64]) -> None:
        self.tokens[slots, self.known[slots]] = sampled
        self.known[slots] += 1

    def form(self, plan: StepPlan, attention: AttentionBackend) -> StepBatch:
        """The batch of an applied plan."""
        if not self._limits.max_loras and all(row.count == 1 and row.samples and not row.scored for row in plan.rows):
            return self._form_decodes(plan.rows, attention)
        return self._form_any(plan, attention)

    def _form_decodes(self, rows: list[Row], attention: AttentionBackend) -> StepBatch:
        """What `_form_any` makes of such rows, the step that one stream has again and again: a row is a token. Each of
        numpy's calls is time in which no core computes."""
        lengths = numpy.array([row.start for row in rows], dtype=numpy.int64) + 1
        sampling_slots = numpy.array([row.slot for row in rows], dtype=numpy.int64)
        places = numpy.arange(len(rows), dtype=numpy.int64)
        positions, slots, lasts = lengths - 1, sampling_slots, places
        if len(rows) > 1:  # Longest context first, and back to the plan's order.
            order = numpy.argsort(-lengths, kind="stable")
            positions, slots, lasts = positions[order], slots[order], numpy.empty_like(places)
            lasts[order] = places
        step = StepRows(starts=positions, counts=numpy.ones_like(places), firsts=places, single=len(rows))
        block_tokens = self._layout.block_tokens
        reach = self._layout.blocks_for(int(positions[0]) + 1)
        blocks, offsets = numpy.divmod(positions, block_tokens)
        begun = (offsets == 0).nonzero()[0] if block_tokens > 1 and not offsets.all() else None
        token_rows, fresh, plans = [], [], []
        for group, table in zip(self._layout.groups, self.tables, strict=True):
            tables = table[slots, :reach].astype(numpy.int64)
            pages = tables[places, blocks]
            token_rows.append(torch.from_numpy(pages * (self._layout.layers_per_page * 2 * block_tokens) + offsets))
            plans.append(attention.plan(step, group, tables))
            if begun is not None:
                fresh.append(pages[begun])
        return StepBatch(
            tokens=torch.from_numpy(self.tokens[slots, positions].astype(numpy.int64)),
            positions=torch.from_numpy(positions),
            sampling_tokens=torch.from_numpy(lasts),
            sampling_slots=sampling_slots,
            sampling_lengths=lengths,
            scored_tokens=_NO_TOKENS,
            scored_targets=_NO_TOKENS,
            scored_slots=[],
            token_rows=tuple(token_rows),
            fresh_pages=torch.from_numpy(numpy.concatenate(fresh)) if fresh else _NO_TOKENS,
            attention_plans=tuple(plans),
        )

    def _form_any(self, plan: StepPlan, attention: AttentionBackend) -> StepBatch:
        rows = self._order(plan.rows)
        slots, ends = numpy.array([plan.rows[index].slot for index in rows.order], dtype=numpy.int64), rows.ends
        row_of_token = numpy.repeat(numpy.arange(len(slots)), rows.counts)
        positions = numpy.arange(len(row_of_token)) + (rows.starts - rows.firsts)[row_of_token]
        slot_of_token = slots[row_of_token]
        lasts = numpy.empty(len(slots), dtype=numpy.int64)
        lasts[rows.order] = rows.firsts + rows.counts - 1
        sampling = [index for index, row in enumerate(plan.rows) if row.samples]
        sampling_rows = [plan.rows[index] for index in sampling]
        scored_tokens, scored_positions, scored_slots = scored_places(plan.rows, lasts)
        step = StepRows(starts=rows.starts, counts=rows.counts, firsts=rows.firsts, single=rows.single)
        block_tokens = self._layout.block_tokens
        reach = self._layout.blocks_for(int(ends.max()))
        blocks, offsets = numpy.divmod(positions, block_tokens)
        # Where the last page of a row gets its first token in this step, and is not filled by it.
        unfinished = (ends % block_tokens != 0) & (ends // block_tokens * block_tokens >= rows.starts)
        begun, begun_at = slots[unfinished], ends[unfinished] // block_tokens
        token_rows, fresh, plans = [], [], []
        for group, table in zip(self._layout.groups, self.tables, strict=True):
            pages = table[slot_of_token, blocks].astype(numpy.int64)
            token_rows.append(torch.from_numpy(pages * (self._layout.layers_per_page * 2 * block_tokens) + offsets))
            fresh.append(table[begun, begun_at])
            plans.append(attention.plan(step, group, table[slots, :reach].astype(numpy.int64)))
        adapted = None
        if self._limits.max_loras:
            adapted = PlacedRows.of(self.adapter_places[slot_of_token], self._limits.max_loras)
        return StepBatch(
            tokens=torch.from_numpy(self.tokens[slot_of_token, positions].astype(numpy.int64)),
            positions=torch.from_numpy(positions),
            sampling_tokens=torch.from_numpy(lasts[sampling]),
            sampling_slots=numpy.array([row.slot for row in sampling_rows], dtype=numpy.int64),
            sampling_lengths=numpy.array([row.start + row.count for row in sampling_rows], dtype=numpy.int64),
            scored_tokens=torch.from_numpy(scored_tokens),
            scored_targets=torch.from_numpy(self.tokens[scored_slots, scored_positions + 1].astype(numpy.int64)),
            scored_slots=scored_slots.tolist(),
            token_rows=tuple(token_rows),
            fresh_pages=torch.from_numpy(numpy.concatenate(fresh).astype(numpy.int64)),
            attention_plans=tuple(plans),
            adapted=adapted,
            adapted_sampling=None if adapted is None else adapted.chosen(lasts[sampling]),
        )

    def _order(self, rows: list[Row]) -> _RowOrder:
        """Single-token rows first, longest context first, as attention buckets want them."""
        starts = numpy.array([row.start for row in rows], dtype=numpy.int64)
        counts = numpy.array([row.count for row in rows], dtype=numpy.int64)
        order = numpy.lexsort((-starts, counts > 1))
        starts, counts = starts[order], counts[order]
        ends = starts + counts
        firsts = numpy.cumsum(counts) - counts
        return _RowOrder(order, starts, counts, ends, firsts, int((counts == 1).sum()))

    def _check(self, plan: StepPlan, blocks: int, tiers: Container[int]) -> None:
        for copy in plan.copies:
            self._check_copy(copy, blocks, tiers)
        known = dict(enumerate(self.known.tolist()))
        for start in plan.starts:
            self._check_start(start)
            known[start.slot] = len(start.token_ids)
        for write in plan.table_writes:
            self._check_write(write, blocks)
        if plan.token_count > self._limits.max_num_batched_tokens:
            raise _wrong(
                "it has too many tokens",
                needed=f"at most {self._limits.max_num_batched_tokens}",
                found=str(plan.token_count),
            )
        seen: set[int] = set()
        for row in plan.rows:
            self._check_row(row, known, seen)
            seen.add(row.slot)
        self._check_pages(plan)

    def _check_copy(self, copy: BlockCopy, blocks: int, tiers: Container[int]) -> None:
        source_below, target_below = copy.source_tier, copy.target_tier
        below = source_below or target_below
        if below and ((source_below and target_below) or below not in tiers):
            raise _wrong("it copies blocks between tiers that this runner does not have", found=repr(copy))
        there = (source_below or 0 < copy.source < blocks) and (target_below or 0 < copy.target < blocks)
        if not there or copy.before_step == bool(below):
            raise _wrong(
                "it copies a page that is not there, or too late", needed=f"1 to {blocks - 1}", found=repr(copy)
            )

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < self._limits.max_num_seqs:
            raise _wrong("there is no such slot", needed=f"0 to {self._limits.max_num_seqs - 1}", found=str(slot))

    def _check_start(self, start: SequenceStart) -> None:
        self._check_slot(start.slot)
        if not (-1 if start.adapter is None else 0) <= start.adapter_place < self._limits.max_loras:
            raise _wrong(
                f"request {start.request_id} has a LoRA adapter but no slot for it",
                needed=f"0 to {self._limits.max_loras - 1}",
                found=str(start.adapter_place),
            )
        if not 1 <= len(start.token_ids) <= self._limits.max_model_len:
            raise _wrong(
                f"request {start.request_id} starts with a wrong number of tokens",
                needed=f"1 to {self._limits.max_model_len}",
                found=str(len(start.token_ids)),
            )
        lowest, highest = min(start.token_ids), max(start.token_ids)
        if lowest < 0 or highest >= self._vocab_size:
            raise _wrong(
                f"request {start.request_id} has a token outside the vocabulary",
                needed=f"0 to {self._vocab_size - 1}",
                found=str(lowest if lowest < 0 else highest),
            )

    def _check_write(self, write: TableWrite, blocks: int) -> None:
        self._check_slot(write.slot)
        if not 0 <= write.group < len(self.tables):
            raise _wrong("there is no such KV group", needed=f"under {len(self.tables)}", found=str(write.group))
        if write.first < 0 or write.first + len(write.blocks) > self.tables[write.group].shape[1]:
            raise _wrong(
                "a table write lies outside the table",
                needed=f"entries under {self.tables[write.group].shape[1]}",
                found=f"{write.first} to {write.first + len(write.blocks) - 1}",
            )
        if write.blocks and not (min(write.blocks) >= 0 and max(write.blocks) < blocks):
            raise _wrong("a block is not in the pool", needed=f"0 to {blocks - 1}", found=str(write.blocks))

    def _check_row(self, row: Row, known: dict[int, int], seen: set[int]) -> None:
        self._check_slot(row.slot)
        if row.slot in seen:
            raise _wrong("one slot has two rows", found=f"slot {row.slot}")
        end = row.start + row.count
        if row.start < 0 or row.count < 1 or end > min(known[row.slot], self._limits.max_model_len):
            raise _wrong(
                f"the row of slot {row.slot} computes unknown tokens",
                needed=f"positions 0 to {min(known[row.slot], self._limits.max_model_len) - 1}",
                found=f"{row.start} to {end - 1}",
            )
        if row.scored and not row.start <= row.score_from < row.score_to <= min(end, known[row.slot] - 1):
            raise _wrong(
                f"the row of slot {row.slot} scores positions that it does not compute or that nothing known follows",
                needed=f"positions from {row.start} to {min(end, known[row.slot] - 1) - 1}",
                found=f"{row.score_from} to {row.score_to - 1}",
            )
        if row.samples and end != known[row.slot]:
            raise _wrong(
                f"the row of slot {row.slot} samples before the end of what is known",
                needed=f"an end of {known[row.slot]}",
                found=str(end),
            )

    def _check_pages(self, plan: StepPlan) -> None:
        """Every position a row writes must have a page of its own: the null page is never written."""
        tokens = self._layout.block_tokens
        started = {start.slot for start in plan.starts}
        written: dict[tuple[int, int], dict[int, int]] = {}
        for write in plan.table_writes:
            entries = written.setdefault((write.slot, write.group), {})
            entries.update(zip(range(write.first, write.first + len(write.blocks)), write.blocks, strict=True))
        for row in plan.rows:
            first, last = row.start // tokens, (row.start + row.count - 1) // tokens
            for group, table in enumerate(self.tables):
                entries = written.get((row.slot, group), {})
                held = table[row.slot, first : last + 1].tolist()
                if row.slot in started:
                    held = [0] * len(held)
                if not all(entries.get(first + index, page) for index, page in enumerate(held)):
                    raise _wrong(f"the row of slot {row.slot} has no KV block to write to", found=f"group {group}")


def scored_places(rows: Sequence[Row], lasts: numpy.typing.NDArray[numpy.int64]) -> tuple[Places, Places, Places]:
    """Of every position that is scored, row by row: its token of the batch, itself, its slot. `lasts`: each row's last
    token."""
    scoring = [(row, int(last)) for row, last in zip(rows, lasts, strict=True) if row.scored]
    if not scoring:
        return _NOWHERE, _NOWHERE, _NOWHERE
    counts = [row.scored for row, _ in scoring]
    positions = [numpy.arange(row.score_from, row.score_to, dtype=numpy.int64) for row, _ in scoring]
    joined = numpy.concatenate(positions)
    # From a position to its token: the last position of a row is its last token.
    shifts = numpy.array([last - (row.start + row.count - 1) for row, last in scoring], dtype=numpy.int64)
    slots = numpy.array([row.slot for row, _ in scoring], dtype=numpy.int64)
    return joined + numpy.repeat(shifts, counts), joined, numpy.repeat(slots, counts)


@dataclass(frozen=True, slots=True)
class _RowOrder:
    order: numpy.typing.NDArray[numpy.int64]
    """The plan's row at each place of the batch."""
    starts: numpy.typing.NDArray[numpy.int64]
    counts: numpy.typing.NDArray[numpy.int64]
    ends: numpy.typing.NDArray[numpy.int64]
    firsts: numpy.typing.NDArray[numpy.int64]
    single: int
