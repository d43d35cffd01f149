"""A model divided into stages of a pipeline: each has consecutive layers, and the spec of its part.

    embedding + layers 0..a │ layers a..b │ ... │ layers z..end + norm and head

A stage's spec describes a decoder whose layers keep their own numbers; whoever runs it knows that its stream comes from
the stage before and goes to the one behind. How many bytes a stage gets is not decided here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from holdfast.models.shards import Shard, shard_spec
from holdfast.models.spec import ModelSpec, TensorSpec

LAST_TENSORS = frozenset({"final_norm", "final_norm_bias", "head", "head_bias"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerStage:
    index: int
    count: int
    """Stages that the model is divided into."""
    first: int
    """Its first layer, and the one behind its last."""
    last: int

    @property
    def layers(self) -> int:
        return self.last - self.first

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1


def rank_spec(spec: ModelSpec, stage: LayerStage | None, shard: Shard | None) -> ModelSpec:
    """As one rank has it: of a stage, or of all layers (None), its share of each of them, or all of it (None)."""
    part = spec if shard is None else shard_spec(spec, shard)
    return part if stage is None else stage_spec(part, stage)


def stage_spec(spec: ModelSpec, stage: LayerStage) -> ModelSpec:
    """As one stage has it. A head that is the embedding once more is on the last stage as well."""
    return replace(
        spec,
        layers=spec.layers[stage.first : stage.last],
        tensors=tuple(tensor for tensor in spec.tensors if stage_has(spec, stage, tensor)),
        tied_embeddings=spec.tied_embeddings and stage.is_last,
    )


def stage_has(spec: ModelSpec, stage: LayerStage, tensor: TensorSpec) -> bool:
    if tensor.layer is not None:
        return stage.first <= tensor.layer < stage.last
    if tensor.name in LAST_TENSORS:
        return stage.is_last
    if tensor.name == "embed":
        return stage.is_first or (stage.is_last and (spec.tied_embeddings or spec.classifier is not None))
    # Rotary factors are every layer's; what is left, such as a classifier's scores, is for whoever has the answer.
    return stage.is_first or tensor.name.startswith("rope_freqs")
