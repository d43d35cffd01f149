"""A model divided among ranks: what each has of heads, of MLPs and of the vocabulary, and the spec of one rank's share.

    whole spec ─► Shard of a rank ─► that rank's own spec: fewer heads, narrower MLPs, tensors with their pieces

A rank's spec describes a decoder that is built as any other; whoever runs it knows that what attention and MLP add to
the stream is a part of a sum over all ranks. Which divisions files allow is not known here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from holdfast.errors import ModelError
from holdfast.models.spec import EXPERTS_AXIS, LayerSpec, ModelSpec, ShardPiece, TensorSpec

Range = tuple[int, int]
"""From the first to behind the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """What one rank has. Ranges of heads, columns and rows of the whole model."""

    rank: int
    size: int
    """Ranks that the model is divided among."""
    heads: Range
    kv_heads: Range
    """Those that its heads attend to. Where there are fewer than ranks, several ranks have the same."""
    inner: Range
    """Of the columns between an MLP's matrices."""
    expert_inner: Range
    """The same of each routed expert, and (below) of the shared ones; empty: there are none."""
    shared_inner: Range
    vocab: Range
    experts: tuple[Range, ...] = ()
    """Of routed experts, which it has, all of their columns; empty: it has a part of every one."""

    @property
    def head_count(self) -> int:
        return self.heads[1] - self.heads[0]

    @property
    def kv_head_count(self) -> int:
        return self.kv_heads[1] - self.kv_heads[0]

    @property
    def vocab_rows(self) -> int:
        return self.vocab[1] - self.vocab[0]

    @property
    def expert_count(self) -> int:
        return sum(last - first for first, last in self.experts)


def shard_spec(spec: ModelSpec, shard: Shard) -> ModelSpec:
    """As one rank has it. The vocabulary is still the whole one: tokens of all of it are known and sampled."""
    return replace(
        spec,
        heads=shard.head_count,
        kv_heads=shard.kv_head_count,
        intermediate_size=shard.inner[1] - shard.inner[0],
        layers=tuple(_layer(layer, shard) for layer in spec.layers),
        tensors=tuple(_tensors(spec, shard)),
    )


def _layer(layer: LayerSpec, shard: Shard) -> LayerSpec:
    if layer.experts is None:
        return layer
    experts = replace(
        layer.experts,
        intermediate_size=shard.expert_inner[1] - shard.expert_inner[0],
        shared_intermediate_size=shard.shared_inner[1] - shard.shared_inner[0],
        here=shard.experts,
    )
    return replace(layer, experts=experts)


def _tensors(spec: ModelSpec, shard: Shard) -> Iterator[TensorSpec]:
    ranges = _ranges(spec, shard)
    for tensor in spec.tensors:
        axis = _axis(spec, tensor)
        if axis is None:
            # A bias of what is summed over ranks is added once.
            if shard.rank == 0 or _part(tensor) not in ("o_bias", "down_bias"):
                yield tensor
            continue
        if tensor.experts and shard.experts:
            yield _of_whole_experts(tensor, shard)
            continue
        found = ranges.get(_part(tensor))
        if found is None or tensor.hf_shape is not None or tensor.alternating:
            raise ModelError(f"{tensor.name} cannot be divided among ranks", found=str(list(tensor.shape)))
        extent = sum(last - first for first, last in found)
        shape = (*tensor.shape[:axis], extent, *tensor.shape[axis + 1 :])
        heads = tensor.heads * extent // tensor.shape[axis]
        yield replace(
            tensor,
            shape=shape,
            heads=heads,
            piece=ShardPiece(axis=axis, ranges=found, whole=tensor.shape),
        )


def _axis(spec: ModelSpec, tensor: TensorSpec) -> int | None:
    """That it is divided along; None: every rank has all of it. A norm over all heads has numbers for each of them."""
    normed = spec.decoder.query_key_norm == "whole" and _part(tensor) in ("q_norm", "k_norm")
    return 0 if normed else tensor.shard_axis


def _of_whole_experts(tensor: TensorSpec, shard: Shard) -> TensorSpec:
    """Some of a stack's experts, each as it is stored."""
    count = shard.expert_count
    piece = ShardPiece(axis=EXPERTS_AXIS, ranges=shard.experts, whole=tensor.shape)
    return replace(tensor, shape=(count, *tensor.shape[1:]), experts=count, piece=piece)


def _part(tensor: TensorSpec) -> str:
    """Its name without that of a layer."""
    return tensor.name if tensor.layer is None else tensor.name.split(".", 2)[2]


def _ranges(spec: ModelSpec, shard: Shard) -> dict[str, tuple[Range, ...]]:
    """Of the axis that each tensor is split along."""
    dim, queries, keys = spec.head_dim, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    query, key = _scaled(shard.heads, dim), _scaled(shard.kv_heads, dim)
    experts = next((layer.experts for layer in spec.layers if layer.experts is not None), None)
    routed = 0 if experts is None else experts.intermediate_size
    found = {
        "q": (query,),
        "k": (key,),
        "v": (key,),
        "qkv": (query, _behind(key, queries), _behind(key, queries + keys)),
        "o": (query,),
        "q_norm": (query,),
        "k_norm": (key,),
        "gate": (shard.inner,),
        "up": (shard.inner,),
        "gate_up": (shard.inner, _behind(shard.inner, spec.intermediate_size)),
        "down": (shard.inner,),
        "experts.gate": (shard.expert_inner,),
        "experts.up": (shard.expert_inner,),
        "experts.gate_up": (shard.expert_inner, _behind(shard.expert_inner, routed)),
        "experts.down": (shard.expert_inner,),
        "shared.gate": (shard.shared_inner,),
        "shared.up": (shard.shared_inner,),
        "shared.down": (shard.shared_inner,),
        "embed": (shard.vocab,),
        "head": (shard.vocab,),
    }
    return found | {f"{name}_bias": ranges for name, ranges in found.items()}


def _scaled(numbers: Range, by: int) -> Range:
    return numbers[0] * by, numbers[1] * by


def _behind(numbers: Range, offset: int) -> Range:
    return numbers[0] + offset, numbers[1] + offset
