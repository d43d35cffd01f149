"""Prefill attention for Hopper: the same work as `prefill`, 1.3 to 1.5 times as fast (H200, bfloat16).

Written in Gluon, Triton's lower level, because it says who does what. A program is a set of warps for each of:

    fetch     one warp: pages ─► shared memory by the copy engine (TMA), two tiles ahead
    attend    twice four warps, 64 query rows each: scores of tile i are multiplied while the values of tile i - 1 are
              gathered, and weighed while those are still on their way; the two take turns at the tensor cores

Programs stay: there is one for each multiprocessor, and each takes its share of the tile list. Knows no softcap, no
codes (see `expand_pages`) and no head width but 64 and 128: those are for `prefill`, which always works. Writes no
pages.
"""

from __future__ import annotations

from functools import cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from holdfast.execution.triton_kernels.attention.launch import score_factors
from holdfast.execution.triton_kernels.tiles import HOPPER_ROWS

_UNSEEN = gl.constexpr(-1.0e30)
"""As `launch.UNSEEN`."""
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
"""Its name in Triton 3.8, and before."""
_KEYS = 128
_STAGES = 2


@gluon.jit
def _works(works):
    """How many tiles are this program's."""
    programs = gl.num_programs(0)
    return works // programs + (_work(works // programs) < works).to(gl.int32)


@gluon.jit
def _work(n):
    """Its n-th tile: forth and back over the list, the largest first, so that all programs get about the same."""
    program, programs = gl.program_id(0), gl.num_programs(0)
    return n * programs + gl.where((n & 1) == 1, programs - 1 - program, program)


@gluon.jit
def _tile(work, tile_rows, tile_starts, starts, counts, KV_HEADS: gl.constexpr, TOKENS: gl.constexpr):
    """(row, KV head, first token within the row, its position, position after the last token, after the row's last)."""
    row, tile_start = gl.load(tile_rows + work // KV_HEADS), gl.load(tile_starts + work // KV_HEADS)
    start, count = gl.load(starts + row), gl.load(counts + row)
    lowest = start + tile_start
    return row, work % KV_HEADS, tile_start, lowest, lowest + gl.minimum(count - tile_start, TOKENS), start + count


@gluon.jit
def _key_tiles(lowest, limit, window, KEYS: gl.constexpr, WINDOWED: gl.constexpr):
    """Key tiles that are seen, (first, after the last), and those of them that every query sees whole, likewise."""
    first, whole_from = 0, 0
    if WINDOWED:
        first = gl.maximum(lowest - window + 1, 0) // KEYS
        whole_from = gl.cdiv(gl.maximum(limit - window, 0), KEYS)
    return first, gl.cdiv(limit, KEYS), whole_from, gl.maximum((lowest + 1) // KEYS, whole_from)


@gluon.jit
def _fetch(
    pages, tables, slots, tile_rows, tile_starts, starts, counts, works, window, table_stride, place, places, keys,
    values, keys_here, keys_free, values_here, values_free, KV_HEADS: gl.constexpr, TOKENS: gl.constexpr,
    DIM: gl.constexpr, BLOCK_TOKENS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, WINDOWED: gl.constexpr,
    IN_ORDER: gl.constexpr,
):  # fmt: skip
    PAGES: gl.constexpr = KEYS // BLOCK_TOKENS
    PARTS: gl.constexpr = DIM // 64
    done = 0
    for n in range(_works(works)):
        row, kv_head, _, lowest, limit, end = _tile(_work(n), tile_rows, tile_starts, starts, counts, KV_HEADS, TOKENS)
        first, tiles, _, _ = _key_tiles(lowest, limit, window, KEYS, WINDOWED)
        slot = gl.load(slots + row)
        table = tables + slot.to(gl.int64) * table_stride
        used = gl.cdiv(end, BLOCK_TOKENS)
        for i in range(tiles - first):
            page_at = (tiles - 1 - i) * PAGES
            stage, parity = (done + i) % STAGES, (done + i) // STAGES & 1
            rows = ()
            for p in gl.static_range(PAGES):
                page = slot + page_at + p
                if not IN_ORDER:
                    page = gl.load(table + page_at + p, mask=page_at + p < used, other=0)
                rows += ((page * places + place) * (2 * BLOCK_TOKENS),)  # type: ignore[assignment]
            mbarrier.wait(keys_free.index(stage), parity ^ 1)
            mbarrier.expect(keys_here.index(stage), KEYS * DIM * 2)
            for p in gl.static_range(PAGES):
                for part in gl.static_range(PARTS):
                    tma.async_copy_global_to_shared(
                        pages, [rows[p], kv_head * DIM + part * 64], keys_here.index(stage),
                        keys.index((stage * PARTS + part) * PAGES + p),
                    )  # fmt: skip
            mbarrier.wait(values_free.index(stage), parity ^ 1)
            mbarrier.expect(values_here.index(stage), KEYS * DIM * 2)
            for p in gl.static_range(PAGES):
                for part in gl.static_range(PARTS):
                    tma.async_copy_global_to_shared(
                        pages, [rows[p] + BLOCK_TOKENS, kv_head * DIM + part * 64], values_here.index(stage),
                        values.index((stage * PARTS + part) * PAGES + p),
                    )  # fmt: skip
        done += tiles - first


@gluon.jit
def _weigh(
    scores, best, total, inner, positions, window, first, KEYS: gl.constexpr, MASKED: gl.constexpr,
    WINDOWED: gl.constexpr,
):  # fmt: skip
    """Scores of keys from `first` on to weights: (best, total, what is left of the weights before, the new ones)."""
    if MASKED:
        tokens = first + gl.arange(0, KEYS, layout=gl.SliceLayout(0, scores.type.layout))
        seen = tokens[None, :] <= positions[:, None]
        if WINDOWED:
            seen = seen & (tokens[None, :] > positions[:, None] - window)
        scores = gl.where(seen, scores, _UNSEEN)
    higher = gl.maximum(best, gl.max(scores, 1) * inner)
    weights = gl.exp2(scores * inner - higher[:, None])
    if MASKED:
        weights = gl.where(seen, weights, 0.0)
    faded = gl.exp2(best - higher)
    return higher, total * faded + gl.sum(weights, 1), faded, weights


@gluon.jit
def _next(
    i, done, first, queries, keys, values, keys_here, keys_free, values_here, values_free, turns, best, total, gathered,
    weights, inner, positions, window, PART: gl.constexpr, MASKED: gl.constexpr, KEYS: gl.constexpr,
    STAGES: gl.constexpr, WINDOWED: gl.constexpr, SCORES: gl.constexpr, WEIGHTS: gl.constexpr,
):  # fmt: skip
    """Tile i of keys, from `first` on, while the values of tile i - 1, which are here, are gathered."""
    stage, parity, last = (done + i) % STAGES, (done + i) // STAGES & 1, (done + i - 1) % STAGES
    nothing = gl.zeros((64, KEYS), gl.float32, layout=SCORES)
    # Rounded here and not where they are made: loops carry numbers of two bytes one by one, and pack them anew.
    weights = gl.convert_layout(weights.to(values.dtype), WEIGHTS)
    mbarrier.wait(keys_here.index(stage), parity)
    mbarrier.wait(turns.index(PART), (done + i & 1) ^ (1 - PART))
    scores = warpgroup_mma(queries, keys.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
    gathering = warpgroup_mma(weights, values.index(last), gathered, is_async=True)
    mbarrier.arrive(turns.index(1 - PART), count=1)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    mbarrier.arrive(keys_free.index(stage), count=1)
    best, total, faded, new = _weigh(scores, best, total, inner, positions, window, first, KEYS, MASKED, WINDOWED)
    # A wait with a branch: the assembler would else move the arithmetic above behind the wait below.
    mbarrier.wait(values_here.index(stage), parity)
    gathered, _, new = warpgroup_mma_wait(0, deps=(gathering, weights, new))
    mbarrier.arrive(values_free.index(last), count=1)
    gathered = gathered * gl.convert_layout(faded, gl.SliceLayout(1, gathered.type.layout))[:, None]
    return best, total, gathered, new


@gluon.jit
def _blank(tile, first, low, high, KEYS: gl.constexpr, WIDE: gl.constexpr):
    """Zeros in a tile of values but for tokens low..high-1: elsewhere may lie anything, and 0 times NaN is NaN."""
    tokens = first + gl.arange(0, KEYS, layout=gl.SliceLayout(1, WIDE))
    there = (tokens >= low) & (tokens < high)
    kept = tile.load(WIDE)
    # Both halves write the same.
    tile.store(gl.where(there[:, None], kept, gl.zeros_like(kept)))
    fence_async_shared()
    _barrier()


@gluon.jit
def _places(
    first, lowest, limit, kv_head, token_stride, head_stride, PART: gl.constexpr, RATIO: gl.constexpr,
    DIM: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """Offsets of this half's query rows in a tensor [tokens, heads, width], and which of them there are."""
    member = PART * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, WIDE))
    dims = gl.arange(0, DIM, layout=gl.SliceLayout(0, WIDE))
    token, head = member // RATIO, kv_head * RATIO + member % RATIO
    index = (first + token).to(gl.int64)
    return (index * token_stride + head * head_stride)[:, None] + dims[None, :], (lowest + token < limit)[:, None]


@gluon.jit
def _load_queries(
    work, query, buffer, tile_rows, tile_starts, starts, counts, firsts, token_stride, head_stride, PART: gl.constexpr,
    KV_HEADS: gl.constexpr, RATIO: gl.constexpr, TOKENS: gl.constexpr, DIM: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """Puts them on their way. (first token of the tile in the batch, KV head, its position, position after the last
    token, after the row's last)"""
    row, kv_head, tile_start, lowest, limit, end = _tile(work, tile_rows, tile_starts, starts, counts, KV_HEADS, TOKENS)
    first = gl.load(firsts + row) + tile_start
    at, real = _places(first, lowest, limit, kv_head, token_stride, head_stride, PART, RATIO, DIM, WIDE)
    async_copy.async_copy_global_to_shared(buffer, query + at, mask=real)
    async_copy.commit_group()
    return first, kv_head, lowest, limit, end


@gluon.jit
def _begin(
    done, first, end, queries, keys, values, keys_here, keys_free, values_here, turns, inner, positions, window,
    following, query, buffer, tile_rows, tile_starts, starts, counts, firsts, token_stride, head_stride,
    PART: gl.constexpr, KV_HEADS: gl.constexpr, RATIO: gl.constexpr, TOKENS: gl.constexpr, DIM: gl.constexpr,
    KEYS: gl.constexpr, STAGES: gl.constexpr, WINDOWED: gl.constexpr, SCORES: gl.constexpr, WEIGHTS: gl.constexpr,
    WIDE: gl.constexpr,
):  # fmt: skip
    """The first tile of keys, which is the last one seen: (best, total, weights, the next queries). Its values are here
    then, and the queries of tile `following` on their way."""
    stage, parity = done % STAGES, done // STAGES & 1
    nothing = gl.zeros((64, KEYS), gl.float32, layout=SCORES)
    mbarrier.wait(keys_here.index(stage), parity)
    mbarrier.wait(turns.index(PART), (done & 1) ^ (1 - PART))
    scores = warpgroup_mma(queries, keys.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
    mbarrier.arrive(turns.index(1 - PART), count=1)
    loading = _load_queries(
        following, query, buffer, tile_rows, tile_starts, starts, counts, firsts, token_stride, head_stride, PART,
        KV_HEADS, RATIO, TOKENS, DIM, WIDE,
    )  # fmt: skip
    # The loops behind this would else have a fence in every turn, for all that the compiler knows.
    fence_async_shared()
    scores = warpgroup_mma_wait(0, deps=(scores,))
    mbarrier.arrive(keys_free.index(stage), count=1)
    best = gl.full((64,), _UNSEEN, gl.float32, layout=gl.SliceLayout(1, SCORES))
    total = gl.zeros((64,), gl.float32, layout=gl.SliceLayout(1, SCORES))
    best, total, _, new = _weigh(scores, best, total, inner, positions, window, first, KEYS, True, WINDOWED)
    mbarrier.wait(values_here.index(stage), parity)
    if first + KEYS > end:
        _blank(values.index(stage), first, 0, end, KEYS, WIDE)
    return best, total, new, loading


@gluon.jit
def _attend(
    query, out, tile_rows, tile_starts, starts, counts, firsts, works, window, inner, value_scale, query_token_stride,
    query_head_stride, out_token_stride, out_head_stride, halves, keys, values, keys_here, keys_free, values_here,
    values_free, turns, PART: gl.constexpr, KV_HEADS: gl.constexpr, RATIO: gl.constexpr, TOKENS: gl.constexpr,
    DIM: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    GATHERED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, GATHERED, 2)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    member = PART * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))
    first, kv_head, lowest, limit, end = _load_queries(
        _work(0), query, halves.index(PART), tile_rows, tile_starts, starts, counts, firsts,
        query_token_stride, query_head_stride, PART, KV_HEADS, RATIO, TOKENS, DIM, WIDE,
    )  # fmt: skip
    done, mine = 0, _works(works)
    for n in range(mine):
        queries = halves.index(2 * (n & 1) + PART)
        async_copy.wait_group(0)
        fence_async_shared()
        _barrier()
        #   tiles of keys, from the last to the first: tiles ─ masked ─ whole_to ─ whole_from ─ masked ─ first_tile
        positions = gl.minimum(lowest + member // RATIO, limit - 1)
        first_tile, tiles, whole_from, whole_to = _key_tiles(lowest, limit, window, KEYS, WINDOWED)
        best, total, weights, loading = _begin(
            done, (tiles - 1) * KEYS, end, queries, keys, values, keys_here, keys_free, values_here, turns, inner,
            positions, window, _work(gl.minimum(n + 1, mine - 1)), query, halves.index(2 * (n + 1 & 1) + PART),
            tile_rows, tile_starts, starts, counts, firsts, query_token_stride, query_head_stride, PART, KV_HEADS,
            RATIO, TOKENS, DIM, KEYS, STAGES, WINDOWED, SCORES, WEIGHTS, WIDE,
        )  # fmt: skip
        gathered = gl.zeros((64, DIM), gl.float32, layout=GATHERED)
        for i in range(1, tiles - whole_to):
            best, total, gathered, weights = _next(
                i, done, (tiles - 1 - i) * KEYS, queries, keys, values, keys_here, keys_free, values_here, values_free,
                turns, best, total, gathered, weights, inner, positions, window, PART, True, KEYS, STAGES, WINDOWED,
                SCORES, WEIGHTS,
            )  # fmt: skip
        for i in range(gl.maximum(tiles - whole_to, 1), tiles - whole_from):
            best, total, gathered, weights = _next(
                i, done, (tiles - 1 - i) * KEYS, queries, keys, values, keys_here, keys_free, values_here, values_free,
                turns, best, total, gathered, weights, inner, positions, window, PART, False, KEYS, STAGES, WINDOWED,
                SCORES, WEIGHTS,
            )  # fmt: skip
        if WINDOWED:
            for i in range(gl.maximum(tiles - whole_from, 1), tiles - first_tile):
                best, total, gathered, weights = _next(
                    i, done, (tiles - 1 - i) * KEYS, queries, keys, values, keys_here, keys_free, values_here,
                    values_free, turns, best, total, gathered, weights, inner, positions, window, PART, True, KEYS,
                    STAGES, WINDOWED, SCORES, WEIGHTS,
                )  # fmt: skip
        done += tiles - first_tile
        last = (done - 1) % STAGES
        if WINDOWED:  # noqa: SIM102 (known when it is compiled)
            if first_tile * KEYS < lowest - window + 1:
                _blank(values.index(last), first_tile * KEYS, lowest - window + 1, end, KEYS, WIDE)
        last_weights = gl.convert_layout(weights.to(values.dtype), WEIGHTS)
        gathering = warpgroup_mma(last_weights, values.index(last), gathered, is_async=True)
        gathered, _ = warpgroup_mma_wait(0, deps=(gathering, last_weights))
        mbarrier.arrive(values_free.index(last), count=1)
        gathered = gathered * gl.convert_layout(value_scale / total, gl.SliceLayout(1, GATHERED))[:, None]
        # Through shared memory, so that whole lines are written.
        queries.store(gathered.to(out.dtype.element_ty))
        at, real = _places(first, lowest, limit, kv_head, out_token_stride, out_head_stride, PART, RATIO, DIM, WIDE)
        gl.store(out + at, queries.load(WIDE), mask=real)
        first, kv_head, lowest, limit, end = loading


@gluon.jit(do_not_specialize=["place", "places", "works", "window", "table_stride"])
def _prefill_hopper(
    query, pages, tables, tile_rows, tile_starts, slots, starts, counts, firsts, out, inner, value_scale, place, places,
    works, window, table_stride, query_token_stride, query_head_stride, out_token_stride, out_head_stride,
    KV_HEADS: gl.constexpr, RATIO: gl.constexpr, TOKENS: gl.constexpr, DIM: gl.constexpr, BLOCK_TOKENS: gl.constexpr,
    KEYS: gl.constexpr, STAGES: gl.constexpr, WINDOWED: gl.constexpr, IN_ORDER: gl.constexpr,
):  # fmt: skip
    PAGES: gl.constexpr = KEYS // BLOCK_TOKENS
    PARTS: gl.constexpr = DIM // 64
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    TYPE: gl.constexpr = query.dtype.element_ty
    halves = gl.allocate_shared_memory(TYPE, [4, 64, DIM], LAYOUT)
    # As the tensor cores read a tile: 64 columns of all its keys, then the next 64. So pages lie one after the other.
    key_pages = gl.allocate_shared_memory(TYPE, [STAGES * PARTS * PAGES, BLOCK_TOKENS, 64], LAYOUT)
    value_pages = gl.allocate_shared_memory(TYPE, [STAGES * PARTS * PAGES, BLOCK_TOKENS, 64], LAYOUT)
    keys = key_pages._reinterpret(TYPE, [STAGES, KEYS, DIM], LAYOUT)
    values = value_pages._reinterpret(TYPE, [STAGES, KEYS, DIM], LAYOUT)
    keys_here = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    keys_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    values_here = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    values_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(keys_here.index(stage), count=1)
        mbarrier.init(keys_free.index(stage), count=2)
        mbarrier.init(values_here.index(stage), count=1)
        mbarrier.init(values_free.index(stage), count=2)
    for part in gl.static_range(2):
        mbarrier.init(turns.index(part), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _attend,
                (
                    query, out, tile_rows, tile_starts, starts, counts, firsts, works, window, inner, value_scale,
                    query_token_stride, query_head_stride, out_token_stride, out_head_stride, halves, keys, values,
                    keys_here, keys_free, values_here, values_free, turns, gl.constexpr(0), KV_HEADS, RATIO, TOKENS,
                    DIM, KEYS, STAGES, WINDOWED,
                ),
            ),
            (
                _attend,
                (
                    query, out, tile_rows, tile_starts, starts, counts, firsts, works, window, inner, value_scale,
                    query_token_stride, query_head_stride, out_token_stride, out_head_stride, halves, keys, values,
                    keys_here, keys_free, values_here, values_free, turns, gl.constexpr(1), KV_HEADS, RATIO, TOKENS,
                    DIM, KEYS, STAGES, WINDOWED,
                ),
            ),
            (
                _fetch,
                (
                    pages, tables, slots, tile_rows, tile_starts, starts, counts, works, window, table_stride, place,
                    places, key_pages, value_pages, keys_here, keys_free, values_here, values_free, KV_HEADS, TOKENS,
                    DIM, BLOCK_TOKENS, KEYS, STAGES, WINDOWED, IN_ORDER,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@cache
def _processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def page_descriptor(pages: torch.Tensor) -> TensorDescriptor:
    """Of pages [blocks, places, 2, block_tokens, kv_heads, head_dim], contiguous, for as long as they do not move."""
    block_tokens, kv_heads, width = pages.shape[3:]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor.from_tensor(pages.view(-1, kv_heads * width), [block_tokens, 64], layout)


def prefill_attention_hopper(
    query: torch.Tensor,
    pages: torch.Tensor,
    tables: torch.Tensor,
    tile_rows: torch.Tensor,
    tile_starts: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    counts: torch.Tensor,
    firsts: torch.Tensor,
    *,
    descriptor: TensorDescriptor,
    place: int,
    scale: float,
    window: int,
    out: torch.Tensor,
    value_scale: float = 1.0,
    page_firsts: torch.Tensor | None = None,
) -> None:
    """As `prefill_attention`, without softcap; the tile list must be one for HOPPER_ROWS query rows. `descriptor`: that
    of these pages. `value_scale`: values are so many times what pages hold. `page_firsts`: int32 [rows]; the pages of a
    row lie one after the other from there on, and tables are not asked."""
    if not len(tile_rows):
        return
    heads, width = query.shape[1:]
    _, places, _, block_tokens, kv_heads, _ = pages.shape
    ratio, works = heads // kv_heads, len(tile_rows) * kv_heads
    inner, _ = score_factors(scale, None)
    _prefill_hopper[(min(works, _processors(torch.cuda.current_device())),)](
        query, descriptor, tables, tile_rows, tile_starts, slots if page_firsts is None else page_firsts, starts,
        counts, firsts, out, inner, value_scale, place, places, works, window, tables.stride(0), query.stride(0),
        query.stride(1), out.stride(0), out.stride(1),
        KV_HEADS=kv_heads, RATIO=ratio, TOKENS=HOPPER_ROWS // ratio, DIM=width, BLOCK_TOKENS=block_tokens, KEYS=_KEYS,
        STAGES=_STAGES, WINDOWED=window > 0, IN_ORDER=page_firsts is not None, num_warps=4,
    )  # fmt: skip
