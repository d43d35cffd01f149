# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""What is allowed, bans, biases, penalties and bad words on the device, for rows whose slots have a lane. Fit for a
CUDA graph.

The logits stay as they are, because log-probabilities are of the raw ones: a lane has float32 logits of its own, which
`sampling` reads in their place. What was seen is counted anew each step from the tokens of the slot.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from holdfast.execution.triton_kernels.sampling.kernels import slot_flags, slot_float, slot_word
from holdfast.execution.triton_kernels.sampling.slots import (
    BANS,
    ENTRIES,
    FREQUENCY,
    LANE,
    MASKED,
    MIN_TOKENS,
    PENALIZED,
    PRESENCE,
    PROMPT_LENGTH,
    REPETITION,
    SPELLINGS,
    SlotParams,
)
from holdfast.footprint.sampling import BAD_SPELLING_WORDS, BAD_SPELLINGS, LANE_ENTRIES, split_tokens

BLOCK = 1024
WARPS = 4
PIECES = 8
"""Programs that share the tokens of one row."""

_LANE = tl.constexpr(LANE)
_BANS = tl.constexpr(BANS)
_ENTRIES = tl.constexpr(ENTRIES)
_MIN_TOKENS = tl.constexpr(MIN_TOKENS)
_PROMPT_LENGTH = tl.constexpr(PROMPT_LENGTH)
_PRESENCE = tl.constexpr(PRESENCE)
_FREQUENCY = tl.constexpr(FREQUENCY)
_REPETITION = tl.constexpr(REPETITION)
_PENALIZED = tl.constexpr(PENALIZED)
_MASKED = tl.constexpr(MASKED)
_SPELLINGS = tl.constexpr(SPELLINGS)
_LANE_ENTRIES = tl.constexpr(LANE_ENTRIES)
_IN_PROMPT = tl.constexpr(1 << 30)
"""Beside the count of a token in the output: it is in the prompt as well."""


@dataclass(frozen=True, slots=True)
class Lanes:
    """Nothing in it lives longer than a step, and nothing has to be cleared."""

    adjusted: torch.Tensor
    """[lane, vocabulary] float32."""
    counts: torch.Tensor
    """[lane, vocabulary] int32."""

    @staticmethod
    def allocate(lanes: int, vocabulary: int, device: torch.device) -> Lanes:
        return Lanes(
            torch.empty((lanes, vocabulary), dtype=torch.float32, device=device),
            torch.empty((lanes, vocabulary), dtype=torch.int32, device=device),
        )

    @property
    def nbytes(self) -> int:
        return self.adjusted.nbytes + self.counts.nbytes


@triton.jit
def _lane_of(table, slot):
    """-1 for a padded row too."""
    lane = slot_word(table, tl.maximum(slot, 0), _LANE)
    return tl.where(slot >= 0, lane, -1).to(tl.int64)


@triton.jit
def stage(logits, stride, vocab, slots, table, masks, mask_words, adjusted, counts, tokens, BLOCK: tl.constexpr):
    split, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row)
    lane = _lane_of(table, slot)
    if lane < 0:
        return
    masked = (slot_flags(table, slot) & _MASKED) != 0
    for start in range(0, tokens, BLOCK):
        offsets = split * tokens + start + tl.arange(0, BLOCK)
        inside = offsets < vocab
        scores = tl.load(logits + row * stride + offsets, mask=inside, other=0.0).to(tl.float32)
        bits = tl.load(masks + lane * mask_words + offsets // 32, mask=inside & masked, other=-1)
        scores = tl.where(((bits >> (offsets % 32)) & 1) != 0, scores, float("-inf"))
        tl.store(adjusted + lane * vocab + offsets, scores, mask=inside)
        tl.store(counts + lane * vocab + offsets, tl.zeros((BLOCK,), tl.int32), mask=inside)


@triton.jit
def mark(
    vocab, slots, table, entries, adjusted, counts, lengths, known, known_stride, known_length,
    BLOCK: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Counts what was seen, and adds what bans (-inf) and biases add: neither depends on an order."""
    piece, row = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    lane = _lane_of(table, slot)
    if lane < 0:
        return
    length = tl.minimum(tl.load(lengths + row), known_length)
    prompt_length = slot_word(table, slot, _PROMPT_LENGTH)
    if (slot_flags(table, slot) & _PENALIZED) != 0:
        for start in range(piece * BLOCK, length, PIECES * BLOCK):
            index = start + tl.arange(0, BLOCK)
            token = tl.load(known + slot.to(tl.int64) * known_stride + index, mask=index < length, other=-1)
            valid = (token >= 0) & (token < vocab)
            place = counts + lane * vocab + token
            in_prompt = index < prompt_length
            tl.atomic_or(place, tl.full((BLOCK,), _IN_PROMPT, tl.int32), mask=valid & in_prompt, sem="relaxed")
            tl.atomic_add(place, tl.full((BLOCK,), 1, tl.int32), mask=valid & (index >= prompt_length), sem="relaxed")
    first = tl.where(length - prompt_length < slot_word(table, slot, _MIN_TOKENS), 0, slot_word(table, slot, _BANS))
    for start in range(piece * BLOCK, slot_word(table, slot, _ENTRIES), PIECES * BLOCK):
        index = start + tl.arange(0, BLOCK)
        used = (index >= first) & (index < slot_word(table, slot, _ENTRIES))
        pair = entries + (lane * _LANE_ENTRIES + index) * 2
        token, added = tl.load(pair, mask=used, other=0), tl.load(pair + 1, mask=used, other=0)
        tl.atomic_add(adjusted + lane * vocab + token, added.to(tl.float32, bitcast=True), mask=used, sem="relaxed")


@triton.jit
def penalize(vocab, slots, table, adjusted, counts, tokens, BLOCK: tl.constexpr):
    split, row = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    lane = _lane_of(table, slot)
    if (lane < 0) | ((slot_flags(table, slot) & _PENALIZED) == 0):
        return
    repetition, presence = slot_float(table, slot, _REPETITION), slot_float(table, slot, _PRESENCE)
    frequency = slot_float(table, slot, _FREQUENCY)
    for start in range(0, tokens, BLOCK):
        offsets = split * tokens + start + tl.arange(0, BLOCK)
        seen = tl.load(counts + lane * vocab + offsets, mask=offsets < vocab, other=0)
        scores = tl.load(adjusted + lane * vocab + offsets, mask=seen != 0, other=0.0)
        scores = tl.where(scores > 0, tl.div_rn(scores, repetition), scores * repetition)
        often = seen & (_IN_PROMPT - 1)
        scores = tl.where(often > 0, scores - (frequency * often.to(tl.float32) + presence), scores)
        tl.store(adjusted + lane * vocab + offsets, scores, mask=seen != 0)


@triton.jit
def forbid(
    vocab, slots, table, spellings, adjusted, lengths, known, known_stride, known_length,
    SPELLINGS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """The last token of every bad word whose other tokens end the output: one lane of a vector for each spelling."""
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    lane = _lane_of(table, slot)
    if lane < 0:
        return
    count = slot_word(table, slot, _SPELLINGS)
    if count == 0:
        return
    length = tl.minimum(tl.load(lengths + row), known_length)
    output = length - slot_word(table, slot, _PROMPT_LENGTH)
    spelling = tl.arange(0, SPELLINGS)
    place = spellings + (lane * SPELLINGS + spelling) * WORDS
    size = tl.load(place, mask=spelling < count, other=0)
    stands = (size > 0) & (size - 1 <= output)
    behind = known + slot.to(tl.int64) * known_stride + length - (size - 1)
    for index in range(WORDS - 2):
        looked = stands & (index < size - 1)
        expected = tl.load(place + 1 + index, mask=looked, other=0)
        found = tl.load(behind + index, mask=looked, other=0)
        stands = stands & (expected == found)
    last = tl.load(place + size, mask=stands, other=0)
    tl.store(adjusted + lane * vocab + last, tl.full((SPELLINGS,), float("-inf"), tl.float32), mask=stands)


def adjust_rows(
    logits: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    params: SlotParams,
    known: torch.Tensor,
    lanes: Lanes,
) -> torch.Tensor:
    """Fills the lanes of the rows that have one, and returns what sample_rows takes as `adjusted`.

    The arguments are sample_rows'; known[slot] holds the prompt and the output so far, `lengths` of them.
    """
    rows, vocab = logits.shape
    tokens = split_tokens(rows, vocab)
    grid = (triton.cdiv(vocab, tokens), rows)
    adjusted, counts = lanes.adjusted, lanes.counts
    stage[grid](
        logits, logits.stride(0), vocab, slots, params.table, params.masks, params.masks.shape[1], adjusted, counts,
        tokens, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    mark[(PIECES, rows)](
        vocab, slots, params.table, params.entries, adjusted, counts, lengths, known, known.stride(0), known.shape[1],
        BLOCK=BLOCK, PIECES=PIECES, num_warps=WARPS,
    )  # fmt: skip
    # Fused, frequency and presence would be rounded once, where the CPU's sampler rounds twice.
    penalize[grid](
        vocab, slots, params.table, adjusted, counts, tokens, BLOCK=BLOCK, num_warps=WARPS, enable_fp_fusion=False
    )
    forbid[(rows,)](
        vocab, slots, params.table, params.spellings, adjusted, lengths, known, known.stride(0), known.shape[1],
        SPELLINGS=BAD_SPELLINGS, WORDS=BAD_SPELLING_WORDS, num_warps=WARPS,
    )  # fmt: skip
    return adjusted
