"""Paged attention over ragged batches on a CPU: gather pages through the block tables, then torch's fused kernel.

    single-token rows   sorted by context, put into buckets of similar length; a bucket is gathered at once,
                        padded with the null page, masked by position
    longer rows         past keys (gathered, no mask) and the row's own keys (causal, not gathered) are attended
                        to apart and joined by their log-sums; under a window: tiles of queries, masked

The queries of one KV head stand where the kernel expects a sequence (single rows) or heads (longer rows), so keys
are never repeated for grouped queries. What is gathered at a time is bounded by `GATHER_BYTES`: a longer context
is attended to in pieces and joined. Pages must hold no NaN beyond a row's end (KVPool.clear).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy
import torch

from holdfast.execution.kv_pool import KVPool
from holdfast.execution.ops.interface import AttentionShape, Integers, StepRows
from holdfast.kvcache.groups import KVGroup

GATHER_BYTES = 8 << 20
"""Of keys and values gathered at a time: stays in the last-level cache between gather and product."""
MASKED_QUERIES = 128
"""Attended to at a time under a window, or with capped scores."""
SIMILAR = 0.75
"""A bucket's shortest row has at least this share of the blocks of its longest."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True, slots=True)
class _Piece:
    """Keys gathered at once: `index` names half pages of place 0, keys first, then values."""

    index: torch.Tensor
    keys: int
    """A row, of which the first `keys` tokens of the gathered blocks are attended to."""
    mask: torch.Tensor | None
    """Added to the scores."""


@dataclass(frozen=True, slots=True)
class _Bucket:
    first: int
    last: int
    pieces: tuple[_Piece, ...]


@dataclass(frozen=True, slots=True)
class _Tile:
    """Queries first..last-1 of the batch; `causal`: they also attend to their own keys."""

    first: int
    last: int
    causal: bool
    pieces: tuple[_Piece, ...]


@dataclass(frozen=True, slots=True)
class CpuAttentionPlan:
    buckets: tuple[_Bucket, ...]
    tiles: tuple[_Tile, ...]


class CpuAttention:
    name = "cpu"

    def __init__(self, shape: AttentionShape, device: torch.device) -> None:
        self._shape = shape
        token_bytes = 2 * shape.kv_heads * shape.head_dim * shape.dtype.itemsize
        self._gather_blocks = max(1, GATHER_BYTES // (token_bytes * shape.block_tokens))
        self._gathered: torch.Tensor | None = None
        self._converted: torch.Tensor | None = None

    def plan(self, rows: StepRows, group: KVGroup, tables: Integers) -> CpuAttentionPlan:
        buckets = _Buckets(self._shape, group, self._gather_blocks).form(rows, tables)
        tiles: list[_Tile] = []
        for row in range(rows.single, len(rows.counts)):
            first, start, count = int(rows.firsts[row]), int(rows.starts[row]), int(rows.counts[row])
            # Capped scores are worked out by hand, in tiles of few queries.
            if self._shape.softcap or (group.window is not None and start + count > group.window):
                tiles += self._masked_tiles(first, start, count, group.window, tables[row])
            else:
                pieces = self._past_pieces(start, tables[row])
                tiles.append(_Tile(first, first + count, True, pieces))
        return CpuAttentionPlan(buckets, tuple(tiles))

    def run(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv: KVPool,
        place: int,
        plan: CpuAttentionPlan,
        out: torch.Tensor,
    ) -> None:
        half_pages = kv.half_pages_at(place)
        for bucket in plan.buckets:
            self._run_bucket(query[bucket.first : bucket.last], half_pages, bucket, out[bucket.first : bucket.last])
        for tile in plan.tiles:
            part = slice(tile.first, tile.last)
            self._run_tile(query[part], key[part], value[part], half_pages, tile, out[part])

    def _run_bucket(self, query: torch.Tensor, half_pages: torch.Tensor, bucket: _Bucket, out: torch.Tensor) -> None:
        rows = bucket.last - bucket.first
        grouped = self._grouped(query)
        sums = _Sums()
        for piece in bucket.pieces:
            keys, values = self._gather(half_pages, piece, rows)
            sums.add(*self._attend(grouped, keys.transpose(1, 2), values.transpose(1, 2), piece.mask))
        self._grouped(out).copy_(sums.total())

    def _run_tile(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        half_pages: torch.Tensor,
        tile: _Tile,
        out: torch.Tensor,
    ) -> None:
        shape = self._shape
        grouped = self._grouped(query).permute(1, 2, 0, 3)
        sums = _Sums()
        for piece in tile.pieces:
            keys, values = self._gather(half_pages, piece, 1)
            sums.add(*self._attend(grouped, self._as_heads(keys[0]), self._as_heads(values[0]), piece.mask))
        if tile.causal:
            sums.add(*_flash(grouped, self._as_heads(key), self._as_heads(value), 0.0, True, scale=shape.scale))
        self._grouped(out).copy_(sums.total().permute(2, 0, 1, 3))

    def _attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What is gathered, and the logarithm of its weights' sum. -infinity where a mask hides all keys."""
        shape = self._shape
        if not shape.softcap:
            found, log_sum = _flash(query, keys, values, 0.0, False, attn_mask=mask, scale=shape.scale)
            return found, log_sum
        scores = torch.matmul(query.float(), keys.float().transpose(-1, -2)).mul_(shape.scale / shape.softcap)
        scores.tanh_().mul_(shape.softcap)
        if mask is not None:
            scores += mask
        log_sum = scores.logsumexp(-1)
        weights = scores.sub_(log_sum.clamp(min=torch.finfo(torch.float32).min)[..., None]).exp_()
        return torch.matmul(weights, values.float()).to(query.dtype), log_sum

    def _grouped(self, heads: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, dim] seen as [tokens, kv heads, queries a head, dim]."""
        shape = self._shape
        return heads.view(-1, shape.kv_heads, shape.heads // shape.kv_heads, shape.head_dim)

    def _as_heads(self, keys: torch.Tensor) -> torch.Tensor:
        """[tokens, kv heads, dim] seen as [kv heads, queries a head, tokens, dim]."""
        group = self._shape.heads // self._shape.kv_heads
        return keys.transpose(0, 1)[:, None].expand(-1, group, -1, -1)

    def _gather(self, half_pages: torch.Tensor, piece: _Piece, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, each [rows, tokens, kv heads, dim]; valid until the next gather."""
        shape, count = self._shape, len(piece.index)
        if self._gathered is None or len(self._gathered) < count or self._gathered.dtype != half_pages.dtype:
            # Of another type after calibration.
            self._gathered = half_pages.new_empty((max(count, 2 * self._gather_blocks), half_pages.shape[1]))
        gathered = torch.index_select(half_pages, 0, piece.index, out=self._gathered[:count])
        if gathered.dtype != shape.dtype:
            if self._converted is None or len(self._converted) < count:
                self._converted = torch.empty_like(self._gathered, dtype=shape.dtype)
            gathered = self._converted[:count].copy_(gathered)
        both = gathered.view(2, rows, -1, shape.kv_heads, shape.head_dim)[:, :, : piece.keys]
        return both[0], both[1]

    def _past_pieces(self, start: int, table: Integers) -> tuple[_Piece, ...]:
        tokens = self._shape.block_tokens
        pieces = []
        for first in range(0, -(-start // tokens), self._gather_blocks):
            blocks = table[first : min(first + self._gather_blocks, -(-start // tokens))]
            keys = min(start - first * tokens, len(blocks) * tokens)
            pieces.append(_Piece(_half_pages(blocks, self._shape), keys, None))
        return tuple(pieces)

    def _masked_tiles(self, first: int, start: int, count: int, window: int | None, table: Integers) -> list[_Tile]:
        tiles = []
        for begin in range(start, start + count, MASKED_QUERIES):
            end = min(begin + MASKED_QUERIES, start + count)
            pieces = tuple(self._masked_pieces(begin, end, window, table))
            tiles.append(_Tile(first + begin - start, first + end - start, False, pieces))
        return tiles

    def _masked_pieces(self, begin: int, end: int, window: int | None, table: Integers) -> Iterator[_Piece]:
        """The keys that positions begin..end-1 see. torch's kernel gives NaN for a query that sees none of a piece: all
        come at once for it, as few as a window has. Capped scores are large, and come in pieces; of those only the
        first may hide all of its keys from a query, and only the last."""
        tokens = self._shape.block_tokens
        first_block = 0 if window is None else max(0, begin - window + 1) // tokens
        last_block = -(-end // tokens)
        step = last_block - first_block
        if self._shape.softcap:
            step = max(self._gather_blocks, -(-MASKED_QUERIES // tokens))
        for block in range(first_block, last_block, step):
            last = min(block + step, last_block)
            keys = min(end, last * tokens) - block * tokens
            distance = torch.arange(begin, end)[:, None] - torch.arange(block * tokens, block * tokens + keys)
            seen = (distance >= 0) & (distance < (window or end))
            yield _Piece(
                _half_pages(table[block:last], self._shape), keys, _penalty(seen, self._shape.dtype)[None, None]
            )


class _Buckets:
    """Forms buckets of single-token rows."""

    def __init__(self, shape: AttentionShape, group: KVGroup, gather_blocks: int) -> None:
        self._shape, self._group, self._gather_blocks = shape, group, gather_blocks

    def form(self, rows: StepRows, tables: Integers) -> tuple[_Bucket, ...]:
        tokens, window = self._shape.block_tokens, self._group.window
        positions = rows.starts[: rows.single]
        earliest = numpy.zeros_like(positions) if window is None else numpy.maximum(positions - window + 1, 0)
        first_blocks = earliest // tokens
        blocks = positions // tokens + 1 - first_blocks
        buckets, first = [], 0
        while first < rows.single:
            longest = int(blocks[first])
            fitting = max(1, self._gather_blocks // longest)
            last = first + 1
            while last < rows.single and last - first < fitting and SIMILAR * longest <= blocks[last] <= longest:
                last += 1
            part = slice(first, last)
            # Rows arrive longest context first, but windows make them nearly equal: take the true longest.
            pieces = self._pieces(positions[part], earliest[part], first_blocks[part], longest, tables[part])
            buckets.append(_Bucket(first, last, pieces))
            first = last
        return tuple(buckets)

    def _pieces(
        self, positions: Integers, earliest: Integers, first_blocks: Integers, longest: int, tables: Integers
    ) -> tuple[_Piece, ...]:
        tokens = self._shape.block_tokens
        pieces = []
        for begin in range(0, longest, self._gather_blocks):
            end = min(begin + self._gather_blocks, longest)
            wanted = first_blocks[:, None] + numpy.arange(begin, end)
            held = wanted <= (positions // tokens)[:, None]
            reachable = numpy.minimum(wanted, tables.shape[1] - 1)
            blocks = numpy.where(held, numpy.take_along_axis(tables, reachable, axis=1), 0)
            places = first_blocks[:, None] * tokens + numpy.arange(begin * tokens, end * tokens)
            seen = (places <= positions[:, None]) & (places >= earliest[:, None])
            mask = None
            if not seen.all():
                mask = _penalty(torch.from_numpy(seen), self._shape.dtype)[:, None, None]
            pieces.append(_Piece(_half_pages(blocks, self._shape), (end - begin) * tokens, mask))
        return tuple(pieces)


class _Sums:
    """Attention over several sets of keys, joined as if it had been one."""

    def __init__(self) -> None:
        self._output: torch.Tensor | None = None
        self._log_sum: torch.Tensor | None = None

    def add(self, output: torch.Tensor, log_sum: torch.Tensor) -> None:
        if self._output is None or self._log_sum is None:
            self._output, self._log_sum = output, log_sum
            return
        joined = torch.logaddexp(self._log_sum, log_sum)
        old = (self._log_sum - joined).exp_()[..., None]
        new = (log_sum - joined).exp_()[..., None]
        self._output = (self._output.float() * old).add_(output.float() * new).to(output.dtype)
        self._log_sum = joined

    def total(self) -> torch.Tensor:
        assert self._output is not None
        return self._output


def _half_pages(blocks: Integers, shape: AttentionShape) -> torch.Tensor:
    """Indices of the keys of these blocks, then of their values, in place 0."""
    keys = (blocks.reshape(-1) * (2 * shape.places)).astype(numpy.int64)
    return torch.from_numpy(numpy.concatenate((keys, keys + 1)))


def _penalty(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))
