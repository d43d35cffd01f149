"""What is loaded beside a model to guess tokens: its own draft layers, or a smaller model. Reads vLLM's JSON.

    {"method": "mtp", ...}                       the model's own layers for multi-token prediction
    {"model": "qwen3-0.6b", ...}                 a draft model, or the head that a method such as eagle3 trains
    {"method": "ngram", ...}                     nothing is loaded

Counts nothing: draft_cost.py does.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from holdfast.config.plan import PlanConfig
from holdfast.errors import ConfigurationError
from holdfast.models import ModelSpec
from holdfast.observability.decisions import Decision
from holdfast.planner.inputs.question import PlannedModel
from holdfast.planner.models.resolve import resolve_model
from holdfast.units import counted, shorten

NO_DRAFT = "HF149"
_NOTHING_LOADED = ("ngram", "[ngram]", "ngram_gpu", "suffix")
_SHARED_WITH_DRAFT = (".embed", ".head")
"""Tensors of a draft layer that engines take from the model itself."""
DRAFT_LAYERS = "draft layers"
"""Among what is not supported of a model: they are counted."""
EXAMPLE = '{"model": "qwen3-0.6b", "num_speculative_tokens": 5}'


@dataclass(frozen=True, slots=True)
class Speculation:
    method: str
    model: str | None = None

    @property
    def own_layers(self) -> bool:
        """deepseek_mtp, glm4_moe_mtp and the like are older names of mtp."""
        return self.model is None and self.method.endswith("mtp")


def speculation_of(config: PlanConfig) -> Speculation | None:
    if config.speculative_config is None:
        return None if config.spec_method is None else Speculation(config.spec_method)
    if config.spec_method is not None:
        raise _wrong("both are set", "--spec-method or --speculative-config, not both", "leave --spec-method out")
    written = config.speculative_config
    try:
        found: Any = json.loads(written)
        method, model = found.get("method"), found.get("model")
    except (ValueError, AttributeError, RecursionError) as error:
        raise _wrong(
            shorten(written), f"JSON as vLLM takes it: {EXAMPLE}", f"--speculative-config '{EXAMPLE}'"
        ) from error
    named = isinstance(method, str | None) and isinstance(model, str | None)
    speculation = Speculation(method or "draft_model", model) if named else Speculation("")
    if not (speculation.model or speculation.own_layers or speculation.method in _NOTHING_LOADED):
        needed = "a model that drafts, or method mtp or ngram"
        raise _wrong(shorten(written), needed, f"--speculative-config '{EXAMPLE}'")
    return speculation


def with_speculation(model: PlannedModel, config: PlanConfig) -> tuple[PlannedModel, tuple[Decision, ...]]:
    asked = speculation_of(config)
    if asked is None:
        return model, ()
    field = "speculative_config" if config.speculative_config is not None else "spec_method"
    if asked.own_layers:
        spec = _with_draft_layers(model.spec, field)
        more = counted(len(spec.layers) - len(model.spec.layers), "draft layer")
        return replace(model, spec=spec), (Decision(field, asked.method, f"weights and KV of {more}", "set"),)
    if asked.model is None:
        return model, (Decision(field, asked.method, "guesses from the text itself: nothing more is loaded", "set"),)
    draft = resolve_model(asked.model)
    lacking = replace(model.spec, unsupported=(*model.spec.unsupported, "a draft model"))
    said = Decision(field, draft.model.name, "its weights and its KV are counted beside the model's", "set")
    return replace(model, spec=lacking, draft=draft.model), (*draft.decisions, said)


def _with_draft_layers(spec: ModelSpec, field: str) -> ModelSpec:
    """Draft layers behind the last one; embedding and head are the model's."""
    drafts = [tensor for tensor in spec.tensors if tensor.part == "draft"]
    numbers = sorted({tensor.name.split(".")[1] for tensor in drafts}, key=int)
    if not drafts:
        raise ConfigurationError(
            "the model has no draft layers whose shapes are known",
            code=NO_DRAFT,
            needed="a model with layers for multi-token prediction, such as deepseek-v3, glm-4.6 or qwen3.5-27b",
            found=", ".join(spec.not_counted) or "none",
            fix=f"leave --{field.replace('_', '-')} out",
            field=field,
        )
    first, last = len(spec.layers), spec.layers[-1]
    layers = [replace(last, index=first + place) for place in range(len(numbers))]
    places = {number: first + place for place, number in enumerate(numbers)}
    tensors = [
        tensor if tensor.part != "draft" else replace(tensor, part="text", layer=places[tensor.name.split(".")[1]])
        for tensor in spec.tensors
        if tensor.part != "draft" or not tensor.name.endswith(_SHARED_WITH_DRAFT)
    ]
    lacking = (*spec.unsupported, DRAFT_LAYERS)
    return replace(spec, layers=(*spec.layers, *layers), tensors=tuple(tensors), unsupported=lacking)


def _wrong(found: str, needed: str, fix: str) -> ConfigurationError:
    return ConfigurationError(
        "speculative_config: this cannot be planned",
        code=NO_DRAFT,
        needed=needed,
        found=found,
        fix=fix,
        field="speculative_config",
    )
