"""A model as a server is told to use it: positions stretched by YaRN, draft layers loaded, whole experts on each rank.

Changes shapes only; what that costs is counted elsewhere.
"""

from __future__ import annotations

import json
from dataclasses import replace

from holdfast.config.plan import PlanConfig
from holdfast.errors import ConfigurationError
from holdfast.models import ModelSpec
from holdfast.observability.decisions import Decision
from holdfast.planner.inputs.question import PlannedModel
from holdfast.planner.sizing.sharded_weights import with_whole_experts
from holdfast.units import counted, shorten

WRONG_SCALING, NO_DRAFT = "HF148", "HF149"
MOST_FACTOR, MOST_TOKENS = 1024.0, 1 << 24
_SHARED_WITH_DRAFT = (".embed", ".head")
"""Tensors of a draft layer that engines take from the model itself."""


def adjusted(model: PlannedModel, config: PlanConfig) -> tuple[PlannedModel, tuple[Decision, ...]]:
    spec, said = model.spec, list[Decision]()
    if config.rope_scaling is not None:
        spec = _stretched(spec, config.rope_scaling)
        reason = f"positions stretched by YaRN; {model.spec.max_position:,} without"
        said.append(Decision("rope_scaling", f"{spec.max_position:,} tokens", reason, "set"))
    if config.spec_method is not None:
        spec = _with_draft(spec)
        more = len(spec.layers) - len(model.spec.layers)
        said.append(
            Decision("spec_method", config.spec_method, f"weights and KV of {counted(more, 'draft layer')}", "set")
        )
    if config.enable_expert_parallel:
        spec = with_whole_experts(spec)
    return (model if spec is model.spec else replace(model, spec=spec)), tuple(said)


def _stretched(spec: ModelSpec, written: str) -> ModelSpec:
    try:
        found = json.loads(written)
        kind = found.get("rope_type", found.get("type"))
        factor, original = float(found["factor"]), int(found["original_max_position_embeddings"])
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise _wrong(written) from error
    if kind != "yarn" or not 1 <= factor <= MOST_FACTOR or not 1 <= original <= MOST_TOKENS:
        raise _wrong(written)
    rope = replace(spec.rope, scaling="yarn", factor=factor, original_max_position=original)
    lacking = (*spec.unsupported, "rope scaling that is set at the start")
    return replace(spec, max_position=min(MOST_TOKENS, int(factor * original)), rope=rope, unsupported=lacking)


def _wrong(written: str) -> ConfigurationError:
    example = '{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}'
    return ConfigurationError(
        f"rope_scaling: {shorten(written)} is not a scaling that can be planned",
        code=WRONG_SCALING,
        needed=f"JSON with rope_type yarn, a factor and the original length: {example}",
        found=shorten(written),
        fix=f"--rope-scaling '{example}'",
        field="rope_scaling",
    )


def _with_draft(spec: ModelSpec) -> ModelSpec:
    """Draft layers behind the last one; embedding and head are the model's."""
    drafts = [tensor for tensor in spec.tensors if tensor.part == "draft"]
    numbers = sorted({tensor.name.split(".")[1] for tensor in drafts}, key=int)
    if not drafts:
        raise ConfigurationError(
            "the model has no draft layers whose shapes are known",
            code=NO_DRAFT,
            needed="a model with layers for multi-token prediction, such as deepseek-v3 or glm-4.6",
            found=", ".join(spec.not_counted) or "none",
            fix="leave --spec-method out",
            field="spec_method",
        )
    first, last = len(spec.layers), spec.layers[-1]
    layers = [replace(last, index=first + place) for place in range(len(numbers))]
    places = {number: first + place for place, number in enumerate(numbers)}
    tensors = [
        tensor if tensor.part != "draft" else replace(tensor, part="text", layer=places[tensor.name.split(".")[1]])
        for tensor in spec.tensors
        if tensor.part != "draft" or not tensor.name.endswith(_SHARED_WITH_DRAFT)
    ]
    lacking = (*spec.unsupported, "draft layers")
    return replace(spec, layers=(*spec.layers, *layers), tensors=tuple(tensors), unsupported=lacking)
