# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""The five kernels that sample, in the order they follow each other. Launched by `sampling`, which says what they are.

Distances are how far a score (a logit over the temperature) lies under the row's best one. Their bits, as whole
numbers, are ordered as they are, and weights are whole numbers of 2^-40: sums come out the same however a row is cut.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from holdfast.execution.sampling.nonfinite import NO_TOKEN
from holdfast.execution.triton_kernels.sampling.slots import (
    DRAWN,
    FILTERED,
    LANE,
    PROMPT_LENGTH,
    REACH,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
)
from holdfast.footprint.sampling import BINS, BINS_PER_UNIT, LISTED, SLOT_WORDS, STATE_WORDS

_WORDS = tl.constexpr(SLOT_WORDS)
_STATE = tl.constexpr(STATE_WORDS)
_BINS = tl.constexpr(BINS)
_BINS_PER_UNIT = tl.constexpr(BINS_PER_UNIT)
_LISTED = tl.constexpr(LISTED)
_DRAWN = tl.constexpr(DRAWN)
_FILTERED = tl.constexpr(FILTERED)
_NONE = tl.constexpr(2**31 - 1)
_NO_TOKEN = tl.constexpr(NO_TOKEN)
_FAR_END = tl.constexpr(math.exp(-1 / BINS_PER_UNIT))
"""The weight of a bin's far end, in weights of its near end."""
_MARGIN = tl.constexpr(1e-4)
"""Of the bounds on masses, far above what adding them in float32 can be wrong by."""
_TOP_K = tl.constexpr(TOP_K)
_TEMPERATURE = tl.constexpr(TEMPERATURE)
_TOP_P = tl.constexpr(TOP_P)
_REACH = tl.constexpr(REACH)
_SEED = tl.constexpr(SEED)
_PROMPT_LENGTH = tl.constexpr(PROMPT_LENGTH)
_LANE = tl.constexpr(LANE)


@triton.jit
def slot_flags(table, slot):
    """0 for a padded row."""
    return tl.load(table + slot.to(tl.int64) * _WORDS, mask=slot >= 0, other=0)


@triton.jit
def slot_float(table, slot, WORD: tl.constexpr):
    return tl.load(table + slot.to(tl.int64) * _WORDS + WORD).to(tl.float32, bitcast=True)


@triton.jit
def slot_word(table, slot, WORD: tl.constexpr):
    return tl.load(table + slot.to(tl.int64) * _WORDS + WORD)


@triton.jit
def _scores(logits, adjusted, row, lane, stride, vocab, offsets, LANES: tl.constexpr):
    """float32; what lies beyond the vocabulary is -inf."""
    inside = offsets < vocab
    if LANES:
        if lane >= 0:
            scores = tl.load(adjusted + lane.to(tl.int64) * vocab + offsets, mask=inside, other=float("-inf"))
        else:
            scores = tl.load(logits + row * stride + offsets, mask=inside, other=float("-inf")).to(tl.float32)
    else:
        scores = tl.load(logits + row * stride + offsets, mask=inside, other=float("-inf")).to(tl.float32)
    return scores


@triton.jit
def _weights(gaps):
    """e^-gap in units of 2^-40; 0 where there is no gap to speak of, as between infinities."""
    return (tl.where(gaps >= 0, tl.exp2(gaps * -1.4426950408889634), 0.0) * 1099511627776.0).to(tl.int64)


@triton.jit
def _bins_of(gaps):
    return tl.minimum((tl.minimum(gaps, 32.0) * _BINS_PER_UNIT).to(tl.int32), _BINS - 1)


@triton.jit
def _top(best, first, splits, temperature, SPLITS: tl.constexpr):
    """The row's best score, heated."""
    split = tl.arange(0, SPLITS)
    return tl.div_rn(tl.max(tl.load(best + first + split, mask=split < splits, other=float("-inf")), 0), temperature)


@triton.jit
def uniform(seed, position):
    """holdfast.execution.sampling.sampler.uniforms, bit for bit."""
    state = _mix(seed.to(tl.uint64) + 0x9E3779B97F4A7C15)
    state = _mix(state + (position.to(tl.int64).to(tl.uint64) + 1) * 0x9E3779B97F4A7C15)
    return (state >> 12).to(tl.float64) * 2.220446049250313e-16


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _seed(table, slot):
    low, high = slot_word(table, slot, _SEED).to(tl.uint32, bitcast=True), slot_word(table, slot, _SEED + 1)
    return (high.to(tl.int64) << 32) | low.to(tl.int64)


@triton.jit(do_not_specialize=["splits"])
def scan(
    logits, stride, vocab, slots, table, adjusted, best, best_at, bins, state, tokens, splits,
    BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    split, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row)
    flags = slot_flags(table, slot)
    if flags == 0:
        return
    if ((flags & _FILTERED) != 0) & (split == 0):
        tl.store(bins + row * _BINS + tl.arange(0, _BINS), tl.zeros((_BINS,), tl.int32))
        tl.store(state + row * _STATE, 0)
    lane = slot_word(table, slot, _LANE)
    highest = tl.full((BLOCK,), float("-inf"), tl.float32)
    highest_at = split * tokens + tl.arange(0, BLOCK)
    none = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, tokens, BLOCK):
        offsets = split * tokens + start + tl.arange(0, BLOCK)
        scores = _scores(logits, adjusted, row, lane, stride, vocab, offsets, LANES)
        none |= (scores != scores).to(tl.int32)
        higher = scores > highest
        highest = tl.where(higher, scores, highest)
        highest_at = tl.where(higher, offsets, highest_at)
    most = tl.max(highest, 0)
    tl.store(best_at + row * splits + split, tl.min(tl.where(highest == most, highest_at, _NONE), 0))
    # Where any is no number, as if the best were infinite: neither can be sampled from.
    tl.store(best + row * splits + split, tl.where(tl.max(none, 0) > 0, float("inf"), most))


@triton.jit(do_not_specialize=["splits"])
def weigh(
    logits, stride, vocab, slots, table, adjusted, best, masses, bins, tokens, splits,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    split, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row)
    flags = slot_flags(table, slot)
    if (flags & _DRAWN) == 0:
        return
    lane = slot_word(table, slot, _LANE)
    temperature, reach = slot_float(table, slot, _TEMPERATURE), slot_float(table, slot, _REACH)
    top = _top(best, row * splits, splits, temperature, SPLITS)
    mass = tl.zeros((BLOCK,), tl.int64)
    counts = tl.zeros((_BINS,), tl.int32)
    for start in range(0, tokens, BLOCK):
        offsets = split * tokens + start + tl.arange(0, BLOCK)
        gaps = top - tl.div_rn(_scores(logits, adjusted, row, lane, stride, vocab, offsets, LANES), temperature)
        gaps = tl.where(gaps <= reach, gaps, float("inf"))
        mass += _weights(gaps)
        if (flags & _FILTERED) != 0:
            counts += tl.histogram(_bins_of(gaps), _BINS)
    tl.store(masses + row * splits + split, tl.sum(mass, 0))
    if (flags & _FILTERED) != 0:
        tl.atomic_add(bins + row * _BINS + tl.arange(0, _BINS), counts, mask=counts > 0, sem="relaxed")


@triton.jit
def _doubtful_bins(bins, row, total, top_k, top_p):
    """The first and last bin whose tokens have to be looked at one by one, the tokens before, whether top_k binds."""
    index = tl.arange(0, _BINS)
    counts = tl.load(bins + row * _BINS + index)
    cumulated = tl.cumsum(counts, 0)
    by_rank = tl.sum((cumulated < top_k).to(tl.int32), 0)
    binds = (top_k > 0) & (by_rank < _BINS - 1)
    # Each bin's weight lies between its count times the weight of its far end and of its near end.
    near = tl.exp2(index * (-1.4426950408889634 / _BINS_PER_UNIT)) * counts
    at_most = tl.cumsum(near, 0)
    at_least = at_most * _FAR_END
    sure = tl.sum(tl.where(index == by_rank - 1, at_least, 0.0), 0)
    mass = tl.where(binds, sure, total.to(tl.float32) * 9.094947017729282e-13)
    first = tl.sum((at_most < top_p * mass * (1.0 - _MARGIN)).to(tl.int32), 0)
    last = tl.sum((at_least < top_p * mass * (1.0 + _MARGIN)).to(tl.int32), 0)
    last = tl.where(binds, by_rank, tl.minimum(last, _BINS - 2))
    if top_p >= 1:
        first = tl.where(binds, by_rank, _BINS - 1)
        last = tl.where(binds, by_rank, _BINS - 2)
    first = tl.minimum(first, last + 1)
    before = tl.sum(tl.where(index < first, counts, 0), 0)
    return first, last, before, binds


@triton.jit(do_not_specialize=["splits"])
def gather(
    logits, stride, vocab, slots, table, adjusted, best, masses, kept, bins, state, listed, tokens, splits,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    split, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row)
    if (slot_flags(table, slot) & _FILTERED) == 0:
        return
    lane = slot_word(table, slot, _LANE)
    temperature, reach = slot_float(table, slot, _TEMPERATURE), slot_float(table, slot, _REACH)
    top = _top(best, row * splits, splits, temperature, SPLITS)
    part = tl.arange(0, SPLITS)
    total = tl.sum(tl.load(masses + row * splits + part, mask=part < splits, other=0), 0)
    first, last, before, binds = _doubtful_bins(
        bins, row, total, slot_word(table, slot, _TOP_K), slot_float(table, slot, _TOP_P)
    )
    if split == 0:
        tl.store(state + row * _STATE + 1, first)
        tl.store(state + row * _STATE + 2, last)
        tl.store(state + row * _STATE + 3, before)
        tl.store(state + row * _STATE + 5, binds.to(tl.int32))
    mass = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, tokens, BLOCK):
        offsets = split * tokens + start + tl.arange(0, BLOCK)
        gaps = top - tl.div_rn(_scores(logits, adjusted, row, lane, stride, vocab, offsets, LANES), temperature)
        gaps = tl.where(gaps <= reach, gaps, float("inf"))
        bin_of = _bins_of(gaps)
        mass += tl.where(bin_of < first, _weights(gaps), 0)
        doubtful = (bin_of >= first) & (bin_of <= last)
        count = tl.sum(doubtful.to(tl.int32), 0)
        if count > 0:
            place = tl.atomic_add(state + row * _STATE, count, sem="relaxed") + tl.cumsum(doubtful.to(tl.int32), 0) - 1
            stored = doubtful & (place < _LISTED)
            tl.store(listed + row * 2 * _LISTED + place, gaps.to(tl.int32, bitcast=True), mask=stored)
            tl.store(listed + (row * 2 + 1) * _LISTED + place, offsets, mask=stored)
    tl.store(kept + row * splits + split, tl.sum(mass, 0))


@triton.jit
def _doubtful(
    start, count, listed, logits, stride, vocab, adjusted, row, lane, top, temperature, reach, first, last,
    BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Distances (by their bits) and ids of some tokens in doubt; where there is none, a distance beyond all."""
    index = start + tl.arange(0, BLOCK)
    if count <= _LISTED:
        keys = tl.load(listed + row * 2 * _LISTED + index, mask=index < count, other=_NONE)
        ids = tl.load(listed + (row * 2 + 1) * _LISTED + index, mask=index < count, other=0)
    else:
        gaps = top - tl.div_rn(_scores(logits, adjusted, row, lane, stride, vocab, index, LANES), temperature)
        bin_of = _bins_of(gaps)
        inside = (bin_of >= first) & (bin_of <= last) & (gaps <= reach)
        keys = tl.where(inside, gaps.to(tl.int32, bitcast=True), _NONE)
        ids = index
    return keys, ids


@triton.jit
def _up_to(
    limit, count, listed, logits, stride, vocab, adjusted, row, lane, top, temperature, reach, first, last,
    BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Of the tokens in doubt: how many are no farther than `limit`, their weight, the last of them, the next after."""
    near = tl.zeros((BLOCK,), tl.int32)
    mass = tl.zeros((BLOCK,), tl.int64)
    under = tl.full((BLOCK,), -1, tl.int32)
    over = tl.full((BLOCK,), _NONE, tl.int32)
    for start in range(0, tl.where(count <= _LISTED, count, vocab), BLOCK):
        keys, _ = _doubtful(
            start, count, listed, logits, stride, vocab, adjusted, row, lane, top, temperature, reach, first, last,
            BLOCK, LANES,
        )  # fmt: skip
        within = keys <= limit
        near += within.to(tl.int32)
        mass += tl.where(within, _weights(keys.to(tl.float32, bitcast=True)), 0)
        under = tl.maximum(under, tl.where(within, keys, -1))
        over = tl.minimum(over, tl.where(within, _NONE, keys))
    return tl.sum(near, 0), tl.sum(mass, 0), tl.max(under, 0), tl.min(over, 0)


@triton.jit
def _nearest(
    low, high, wanted_count, wanted_mass, before, sure, count, listed, logits, stride, vocab, adjusted, row, lane, top,
    temperature, reach, first, last, BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The smallest distance with that many tokens and that much weight up to it; `high` has both."""
    while low < high:
        middle = low + (high - low) // 2
        near, mass, under, over = _up_to(
            middle, count, listed, logits, stride, vocab, adjusted, row, lane, top, temperature, reach, first, last,
            BLOCK, LANES,
        )  # fmt: skip
        # Both ends jump to distances that occur: a few tokens take a few rounds, however wide the bins.
        if (before + near >= wanted_count) & ((sure + mass).to(tl.float64) >= wanted_mass):
            high = tl.maximum(low, under)
        else:
            low = tl.minimum(high, over)
    return high


@triton.jit(do_not_specialize=["splits"])
def settle(
    logits, stride, vocab, slots, table, adjusted, best, masses, kept, state, listed, tokens, splits,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if (slot_flags(table, slot) & _FILTERED) == 0:
        return
    lane = slot_word(table, slot, _LANE)
    temperature, reach, share = (
        slot_float(table, slot, _TEMPERATURE),
        slot_float(table, slot, _REACH),
        slot_float(table, slot, _TOP_P),
    )
    top = _top(best, row * splits, splits, temperature, SPLITS)
    part = tl.arange(0, SPLITS)
    sure = tl.sum(tl.load(kept + row * splits + part, mask=part < splits, other=0), 0)
    count, first = tl.load(state + row * _STATE), tl.load(state + row * _STATE + 1)
    last, before = tl.load(state + row * _STATE + 2), tl.load(state + row * _STATE + 3)
    binds = tl.load(state + row * _STATE + 5) != 0
    low = (first.to(tl.float32) * (1 / _BINS_PER_UNIT)).to(tl.int32, bitcast=True)
    high = ((last + 1).to(tl.float32) * (1 / _BINS_PER_UNIT)).to(tl.int32, bitcast=True) - 1
    high = tl.minimum(high, reach.to(tl.int32, bitcast=True))
    mass = tl.sum(tl.load(masses + row * splits + part, mask=part < splits, other=0), 0)
    if binds:
        high = _nearest(
            low, high, slot_word(table, slot, _TOP_K), 0.0, before, sure, count, listed, logits, stride, vocab,
            adjusted, row, lane, top, temperature, reach, first, last, BLOCK, LANES,
        )  # fmt: skip
        _, in_doubt, _, _ = _up_to(
            high, count, listed, logits, stride, vocab, adjusted, row, lane, top, temperature, reach, first, last,
            BLOCK, LANES,
        )  # fmt: skip
        mass = sure + in_doubt
    if share < 1:
        high = _nearest(
            low, high, 0, share.to(tl.float64) * mass.to(tl.float64), before, sure, count, listed, logits, stride,
            vocab, adjusted, row, lane, top, temperature, reach, first, last, BLOCK, LANES,
        )  # fmt: skip
    tl.store(state + row * _STATE + 4, high)
    for start in range(0, tl.where(count <= _LISTED, count, vocab), BLOCK):
        keys, ids = _doubtful(
            start, count, listed, logits, stride, vocab, adjusted, row, lane, top, temperature, reach, first, last,
            BLOCK, LANES,
        )  # fmt: skip
        weights = _weights(keys.to(tl.float32, bitcast=True))
        tl.atomic_add(kept + row * splits + ids // tokens, weights, mask=(keys <= high) & (weights > 0), sem="relaxed")


@triton.jit
def _drawn(
    logits, stride, vocab, slot, table, adjusted, masses, kept, state, row, length, most, flags, tokens, splits,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The first token, by id, whose cumulated weight passes the row's number; `vocab` where nothing has weight."""
    lane = slot_word(table, slot, _LANE)
    temperature, farthest = slot_float(table, slot, _TEMPERATURE), slot_word(table, slot, _REACH)
    source = masses
    if (flags & _FILTERED) != 0:
        source = kept
        farthest = tl.load(state + row * _STATE + 4)
    part = tl.arange(0, SPLITS)
    parts = tl.load(source + row * splits + part, mask=part < splits, other=0)
    number = uniform(_seed(table, slot), length - slot_word(table, slot, _PROMPT_LENGTH))
    target = (number * tl.sum(parts, 0).to(tl.float64)).to(tl.int64)
    split = tl.sum((tl.cumsum(parts, 0) <= target).to(tl.int32), 0)
    passed = tl.sum(tl.where(part < split, parts, 0), 0)
    top = tl.div_rn(most, temperature)
    found = vocab
    for start in range(0, tokens, BLOCK):
        offsets = split * tokens + start + tl.arange(0, BLOCK)
        gaps = top - tl.div_rn(_scores(logits, adjusted, row, lane, stride, vocab, offsets, LANES), temperature)
        weights = tl.where(gaps.to(tl.int32, bitcast=True) <= farthest, _weights(gaps), 0)
        found = tl.minimum(found, tl.min(tl.where(passed + tl.cumsum(weights, 0) > target, offsets, vocab), 0))
        passed += tl.sum(weights, 0)
    return found


@triton.jit(do_not_specialize=["splits"])
def pick(
    logits, stride, vocab, slots, table, adjusted, best, best_at, masses, kept, state, lengths, out, known,
    known_stride, known_length, tokens, splits,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    flags = slot_flags(table, slot)
    if flags == 0:
        tl.store(out + row, 0)
        return
    part = tl.arange(0, SPLITS)
    bests = tl.load(best + row * splits + part, mask=part < splits, other=float("-inf"))
    places = tl.load(best_at + row * splits + part, mask=part < splits, other=_NONE)
    most = tl.max(bests, 0)
    token = tl.min(tl.where(bests == most, places, _NONE), 0)
    length = tl.load(lengths + row)
    if (flags & _DRAWN) != 0:
        drawn = _drawn(
            logits, stride, vocab, slot, table, adjusted, masses, kept, state, row, length, most, flags, tokens, splits,
            BLOCK, SPLITS, LANES,
        )  # fmt: skip
        # Only a row without any weight (no finite logit) leaves nothing to be drawn.
        token = tl.where(drawn < vocab, drawn, token)
    token = tl.where(token < vocab, token, 0)
    tl.store(out + row, tl.where(most < float("inf"), token, _NO_TOKEN))
    tl.store(known + slot.to(tl.int64) * known_stride + length, token, mask=(length >= 0) & (length < known_length))
