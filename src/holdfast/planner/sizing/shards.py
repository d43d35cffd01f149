"""How a model is divided among the ranks of this engine: evenly where that can be, and only where rows and columns of
what is stored may be cut.

    attention   at KV heads with the query heads that read them; where there are more ranks than KV heads, several ranks
                have one KV head and share its query heads
    MLP         at blocks and groups of the matrix down, whose columns are gate's and up's rows
    experts     the same of each, or whole ones dealt out: the first to the first rank, or in turns
    vocabulary  anywhere but within a square block of scales

Counts no bytes. A size that cannot be is refused with those that can.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from math import lcm
from typing import Literal

from holdfast.checkpoints import LAYOUTS, Packing, StoredTensor, packing_of
from holdfast.checkpoints.formats.quantized_tensors import BNB_BLOCK, MXFP4_BLOCK
from holdfast.errors import ConfigurationError
from holdfast.footprint.layouts import Quantize, quantized_layout
from holdfast.models import ExpertsSpec, ModelSpec, TensorSpec
from holdfast.models.shards import Range, Shard
from holdfast.planner.sizing.sharded_weights import TP_NOT_POSSIBLE
from holdfast.units import counted

MOST_RANKS = 64
"""Sizes up to this are tried for a refusal to name."""
VECTOR = 32
"""Columns that compiled products read at a time: pieces are whole numbers of these where there are enough."""
LEAST_COLUMNS = 8
"""Of an expert's piece: grouped products read rows so."""

Stored = Mapping[str, StoredTensor] | None


Placement = Literal["linear", "round_robin"]
"""Of whole experts, in vLLM's words: neighbours on one rank, or one after the other on the next."""


class _CannotBe(Exception):
    """Why a model is not divided so, in words."""


@dataclass(frozen=True, slots=True)
class _Cuts:
    """Where matrices may be cut: at multiples of these."""

    query_columns: int
    kv_rows: int
    inner: int
    expert_inner: int
    shared_inner: int
    vocab_rows: int


def divide(
    spec: ModelSpec,
    stored: Stored,
    size: int,
    placement: Placement | None = None,
    quantize: Quantize | None = None,
) -> tuple[Shard, ...]:
    """One for each of `size` ranks. `placement`: of whole experts; None: ranks have a part of every one. `quantize`:
    what plain matrices become while they are loaded. Raises ConfigurationError for a size that cannot be, with those
    that can."""
    cuts = _cuts(spec, stored, quantize)
    try:
        return _divided(spec, cuts, size, placement)
    except _CannotBe as reason:
        why = str(reason)
    sizes = [one for one in range(1, MOST_RANKS + 1) if one != size and _can_be(spec, cuts, one, placement)]
    fix = f"--tensor-parallel-size {max([one for one in sizes if one < size], default=1)}"
    if placement is None and _experts(spec) is not None and _can_be(spec, cuts, size, "linear"):
        fix = f"--enable-expert-parallel, which divides no expert, or {fix}"
    raise ConfigurationError(
        f"tensor_parallel_size is {size}, but {why}",
        code=TP_NOT_POSSIBLE,
        needed=f"one of {', '.join(map(str, sizes))}",
        found=str(size),
        fix=fix,
        field="tensor_parallel_size",
    )


def _can_be(spec: ModelSpec, cuts: _Cuts, size: int, placement: Placement | None) -> bool:
    try:
        _divided(spec, cuts, size, placement)
    except _CannotBe:
        return False
    return True


def _experts(spec: ModelSpec) -> ExpertsSpec | None:
    return next((layer.experts for layer in spec.layers if layer.experts is not None), None)


def _divided(spec: ModelSpec, cuts: _Cuts, size: int, placement: Placement | None) -> tuple[Shard, ...]:
    experts, dense = _experts(spec), any(layer.experts is None for layer in spec.layers)
    routed, shared = (0, 0) if experts is None else (experts.intermediate_size, experts.shared_intermediate_size)
    heads = _heads(spec, cuts, size)
    inner = _ranges(spec.intermediate_size if dense else 0, cuts.inner, size, "columns of the MLP")
    if placement is None or experts is None:
        expert_inner = _ranges(routed, cuts.expert_inner, size, "columns of an expert", least=LEAST_COLUMNS)
        dealt: list[tuple[Range, ...]] = [()] * size
    else:
        expert_inner, dealt = [(0, routed)] * size, _dealt_out(experts.count, size, placement)
    shared_inner = _ranges(shared, cuts.shared_inner, size, "columns of the shared expert", least=LEAST_COLUMNS)
    vocab = _ranges(spec.vocab_size, cuts.vocab_rows, size, "rows of the vocabulary")
    return tuple(
        Shard(
            rank=rank,
            size=size,
            heads=heads[rank][0],
            kv_heads=heads[rank][1],
            inner=inner[rank],
            expert_inner=expert_inner[rank],
            shared_inner=shared_inner[rank],
            vocab=vocab[rank],
            experts=dealt[rank],
        )
        for rank in range(size)
    )


def _dealt_out(count: int, size: int, placement: Placement) -> list[tuple[Range, ...]]:
    """Whole experts: as many on each rank, one more on the first ones where they do not come out even."""
    if placement == "linear":
        return [(part,) for part in _ranges(count, 1, size, "experts", whole_only=True)]
    if count < size:
        raise _CannotBe(f"the model has {counted(count, 'expert')}, fewer than one for each rank")
    return [tuple((number, number + 1) for number in range(rank, count, size)) for rank in range(size)]


def _heads(spec: ModelSpec, cuts: _Cuts, size: int) -> list[tuple[Range, Range]]:
    """Of each rank, its query heads and the KV heads that these attend to."""
    group, dim = spec.heads // spec.kv_heads, spec.head_dim
    together = lcm(lcm(cuts.query_columns, group * dim) // (group * dim), lcm(cuts.kv_rows, dim) // dim)
    if size <= -(-spec.kv_heads // together):
        kv_heads = _ranges(spec.kv_heads, together, size, "KV heads", whole_only=True)
        return [((first * group, last * group), (first, last)) for first, last in kv_heads]
    if together > 1 and size > 1:
        raise _CannotBe(
            f"{counted(spec.kv_heads, 'KV head')} of {dim} columns can only be divided by {together} at a time: blocks"
            f" of {cuts.query_columns} columns are not cut"
        )
    return _replicated(spec, lcm(cuts.query_columns, dim) // dim, size)


def _replicated(spec: ModelSpec, together: int, size: int) -> list[tuple[Range, Range]]:
    """More ranks than KV heads: the query heads of each are divided among some of the ranks."""
    group, found = spec.heads // spec.kv_heads, list[tuple[Range, Range]]()
    for head in range(spec.kv_heads):
        ranks = size // spec.kv_heads + (head < size % spec.kv_heads)
        queries = _ranges(group, together, ranks, "query heads of a KV head", whole_only=True)
        found += [((head * group + first, head * group + last), (head, head + 1)) for first, last in queries]
    return found


def _ranges(extent: int, cut: int, size: int, what: str, *, least: int = 1, whole_only: bool = False) -> list[Range]:
    """`extent` in `size` pieces of whole units, the larger ones first; in larger units than must be where there are
    enough of them, so that products are fast."""
    if not extent:
        return [(0, 0)] * size
    units = [cut] if whole_only else [lcm(cut, VECTOR), lcm(cut, least)]
    unit = next((one for one in units if extent % one == 0 and extent // one >= size), units[-1])
    count = -(-extent // unit)
    if count < size:
        blocks = f" in blocks of {unit}" if unit > 1 else ""
        raise _CannotBe(f"the model has {extent} {what}{blocks}, fewer than one for each rank")
    ends = [min(extent, unit * (count // size * rank + min(rank, count % size))) for rank in range(size + 1)]
    return list(pairwise(ends))


def _cuts(spec: ModelSpec, stored: Stored, quantize: Quantize | None) -> _Cuts:
    def cut(tensor: TensorSpec, axis: int) -> int:
        one = None if stored is None else stored.get(tensor.name)
        if one is not None and (one.packed is not None or LAYOUTS[one.layout].block_elements > 1):
            return _cut(one, axis)
        if stored is None and spec.quantization is not None:  # Dummies lie as its files would.
            packing = packing_of(spec.quantization, tensor, spec.stored_dtype)
            return 1 if packing is None else _packing_cut(packing, axis)
        made = None if quantize is None else quantized_layout(tensor, quantize)
        return max(made.group, 1) if made is not None and axis == 1 else 1

    def of(axis: int, *parts: str) -> int:
        """Of an axis of these tensors, in all layers: 0 of rows, 1 of columns."""
        return reduce(lcm, (cut(tensor, axis) for tensor in spec.tensors if _part(tensor.name) in parts), 1)

    return _Cuts(
        query_columns=lcm(of(1, "o"), of(0, "q", "qkv")),
        kv_rows=of(0, "k", "v", "qkv"),
        inner=lcm(of(1, "down"), of(0, "gate", "up", "gate_up")),
        expert_inner=lcm(of(1, "experts.down"), of(0, "experts.gate", "experts.up", "experts.gate_up")),
        shared_inner=lcm(of(1, "shared.down"), of(0, "shared.gate", "shared.up")),
        vocab_rows=of(0, "embed", "head"),
    )


def _part(name: str) -> str:
    return name.split(".", 2)[2] if name.startswith("layers.") else name


def _cut(tensor: StoredTensor, axis: int) -> int:
    """Rows or columns that lie together in a stored matrix: of a block, or of a group that shares a scale."""
    packed = tensor.packed
    if packed is None:
        return LAYOUTS[tensor.layout].block_elements if axis == 1 else 1
    return _packing_cut(packed.packing, axis)


def _packing_cut(packing: Packing, axis: int) -> int:
    if axis == 0:
        return packing.block[0] if packing.granularity == "block" else 1
    return lcm(max(_group(packing), 1), max(packing.input_group, 1))


def _group(packing: Packing) -> int:
    """Columns that share a scale; less than one: all of a row, which every piece of it has."""
    if packing.granularity == "block":
        return packing.block[1]
    if packing.method in ("awq", "gptq", "pack-quantized") or packing.granularity == "group":
        return packing.group_size
    return {"nf4": BNB_BLOCK, "mxfp4": MXFP4_BLOCK}.get(packing.method, 1)
