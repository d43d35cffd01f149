# mypy: disable-error-code="import-untyped"
"""Token ids between ranks that share a vocabulary: as one rank's rows number them, and into the slots of ranks that did
not sample them. Knows no transport."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 256


@triton.jit
def _own_rows(ids, slots, positions, out, ids_stride, first, count, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < count
    slot = tl.load(slots + row, mask=inside, other=-1).to(tl.int64)
    position = tl.load(positions + row, mask=inside, other=-1).to(tl.int64)
    used = inside & (slot >= 0) & (position >= 0)
    token = tl.load(ids + slot * ids_stride + position, mask=used, other=-1)
    tl.store(out + row, tl.where(used & (token >= first), token - first, -1), mask=inside)


def own_rows(
    tokens_of_slots: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, first: int, out: torch.Tensor
) -> None:
    """out[i] = tokens_of_slots[slots[i], positions[i]] - first; negative for what lies before, and where slot or
    position is. int32."""
    count = len(out)
    if count:
        _own_rows[(triton.cdiv(count, _BLOCK),)](
            tokens_of_slots, slots, positions, out, tokens_of_slots.stride(0), first, count, BLOCK=_BLOCK
        )


@triton.jit
def _put_tokens(tokens, slots, lengths, known, known_stride, known_length, count, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < count
    slot = tl.load(slots + row, mask=inside, other=-1).to(tl.int64)
    length = tl.load(lengths + row, mask=inside, other=-1).to(tl.int64)
    token = tl.load(tokens + row, mask=inside, other=0)
    used = inside & (slot >= 0) & (length >= 0) & (length < known_length)
    tl.store(known + slot * known_stride + length, tl.maximum(token, 0), mask=used)


def put_tokens(tokens: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor, known: torch.Tensor) -> None:
    """known[slots[i], lengths[i]] = tokens[i], where there is such a slot: what the next step reads. int32."""
    count = len(tokens)
    if count:
        _put_tokens[(triton.cdiv(count, _BLOCK),)](
            tokens, slots, lengths, known, known.stride(0), known.shape[1], count, BLOCK=_BLOCK
        )
