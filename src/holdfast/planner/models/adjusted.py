"""A model as a server is told to use it: positions stretched by YaRN, no images, a draft beside it, whole experts on
each rank.

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
from holdfast.planner.models.speculation import with_speculation
from holdfast.planner.sizing.sharded_weights import with_whole_experts
from holdfast.units import shorten

WRONG_SCALING = "HF148"
MOST_FACTOR, MOST_TOKENS = 1024.0, 1 << 24


def adjusted(model: PlannedModel, config: PlanConfig) -> tuple[PlannedModel, tuple[Decision, ...]]:
    spec, said = model.spec, list[Decision]()
    if config.rope_scaling is not None:
        spec = _stretched(spec, config.rope_scaling)
        reason = f"positions stretched by YaRN; {model.spec.max_position:,} without"
        said.append(Decision("rope_scaling", f"{spec.max_position:,} tokens", reason, "set"))
    if config.language_model_only:
        spec = replace(spec, encoder=None)
    model, drafted = with_speculation(model if spec is model.spec else replace(model, spec=spec), config)
    if config.enable_expert_parallel:
        model = replace(model, spec=with_whole_experts(model.spec))
    return model, (*said, *drafted)


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
