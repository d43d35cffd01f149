"""A model as it would be if somebody had quantized it: the same shapes, other bytes. Counts what quantizers write.

    awq, gptq, int4, int8, fp8, nf4    linear layers of the decoder; head, embedding, router and vision stay
    Q4_K_M, Q8_0, IQ4_XS, MXFP4, ...   GGUF: every matrix, some in more bits than the name says (gguf_mixes.py)

Looks nothing up and fits nothing. A model that is already quantized is not quantized again, but for FP8, which
those who make a GGUF of it unpack first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from holdfast.checkpoints import ENGINE_LAYOUTS, LAYOUTS, StoredTensor
from holdfast.config.parts.gguf_kinds import KINDS, kind_of
from holdfast.config.parts.quantization import KERNEL_NAMES, MADE_WHILE_LOADING, STORED_AS, UNKNOWN_METHOD, known_names
from holdfast.config.parts.quantization import method as method_called
from holdfast.errors import CheckpointError, ConfigurationError
from holdfast.footprint.identity_key import Same
from holdfast.footprint.layouts import is_quantized
from holdfast.models import QuantSpec, TensorSpec, text_alone
from holdfast.planner.inputs.question import PlannedModel
from holdfast.planner.models.gguf_mixes import layouts_of
from holdfast.planner.models.requested import true_of
from holdfast.planner.sizing.engine_weights import NO_FILE, OF_QUANTIZATION, held_or_not
from holdfast.planner.sizing.sharded_weights import layouts_by_size, weights_of
from holdfast.units import shorten

CANNOT_QUANTIZE = UNKNOWN_METHOD

_SPECS: Mapping[str, QuantSpec] = {
    "awq": QuantSpec(method="awq", bits=4, group_size=128, symmetric=False),
    "gptq": QuantSpec(method="gptq", bits=4, group_size=128, symmetric=False),
    "int4": QuantSpec(method="int4", bits=4, group_size=128),
    # W8A8: inputs are rounded row by row, as its tools mean it.
    "int8": QuantSpec(method="int8", bits=8, granularity="channel", inputs="int8"),
    "fp8": QuantSpec(method="fp8", bits=8, granularity="tensor"),
    # Without a second quantization of the scales, as servers make it while loading.
    "nf4": QuantSpec(method="bitsandbytes", bits=4),
}
_AS_ONE_OF_THEM = {
    "w4a16": "int4", "w8a8": "int8", "w8a16": "int8", "compressed-tensors": "int4", "bitsandbytes": "nf4",
}  # fmt: skip
"""Names of --quantization that leave a choice, or say more than bytes depend on."""
METHODS = (*_SPECS, *KINDS)


def quantized_as(model: PlannedModel, asked: str) -> PlannedModel:
    """The model as `asked` says; the same model when it is stored so already. Raises ConfigurationError."""
    return _quantized_as(Same(model), asked)


@lru_cache(maxsize=32)
def _quantized_as(key: Same[PlannedModel], asked: str) -> PlannedModel:
    """Once for all the GPUs that a model is compared on."""
    model, name = key.held, asked.strip()
    called = method_called("--quantization", name)
    if called is None:
        return model
    family = KERNEL_NAMES.get(called, called)
    plain, kind = _AS_ONE_OF_THEM.get(family, family), kind_of(family)
    if _already(model, family, kind):
        return model
    if plain not in _SPECS and kind is None:
        _require_plain(model, name)
        raise ConfigurationError(
            f"--quantization {shorten(name)} only says how a checkpoint is stored, and {model.name} is unquantized",
            code=CANNOT_QUANTIZE,
            needed=known_names(),
            found="an unquantized model",
            fix="--quantization Q4_K_M, or another type of GGUF files" if family == "gguf" else "--quantization gptq",
            field="quantization",
        )
    if kind is not None and model.spec.quantization is not None and model.spec.quantization.method == "fp8":
        model = as_plain(model)
    _require_plain(model, name)
    if kind is not None:
        return _as_gguf(model, kind)
    packed = _packed(model, plain)
    try:
        weights_of(packed, dtype="bfloat16")
    except CheckpointError as error:
        raise ConfigurationError(
            f"quantization: {model.name} cannot be stored as {shorten(name)}",
            code=CANNOT_QUANTIZE,
            needed=error.needed,
            found=error.found,
            fix="another --quantization, such as fp8 or Q4_K_M",
            field="quantization",
        ) from error
    return packed


def _already(model: PlannedModel, family: str, kind: str | None) -> bool:
    stored = model.spec.quantization
    if stored is not None:
        of_files = "mxfp4" if kind == "MXFP4_MOE" else family
        return of_files in STORED_AS and true_of(of_files, stored)
    if family == "gguf":
        return model.format == "gguf"
    if model.format != "gguf" or kind is None or not model.stored:
        return False
    made = (_stored(tensor, layout) for tensor, layout in layouts_of(model.spec, kind))
    return layouts_by_size(model.stored.values())[0] == layouts_by_size(made)[0]


def as_plain(model: PlannedModel) -> PlannedModel:
    """The same shapes, not quantized; what this engine cannot read of a quantization is gone with it."""
    others = tuple(reason for reason in model.spec.unsupported if not reason.startswith(OF_QUANTIZATION))
    spec = replace(model.spec, quantization=None, unsupported=others)
    return replace(
        model, spec=spec, stored=None, canonical=None, format="none", derived=False, made_as=None, unquantized=None
    )


def _require_plain(model: PlannedModel, name: str) -> None:
    quantization = model.spec.quantization
    layouts = [layout for layout in layouts_by_size((model.stored or {}).values()) if is_quantized(layout)]
    found = ", ".join(layouts) if quantization is None else quantization.method
    if found:
        raise ConfigurationError(
            f"quantization: {model.name} is already quantized ({found}), and cannot be planned as {shorten(name)}",
            code=CANNOT_QUANTIZE,
            needed="an unquantized model",
            found=found,
            fix="leave --quantization out, or use the unquantized model",
            field="quantization",
        )


# Packed by a quantizer of safetensors


def _packed(model: PlannedModel, method: str) -> PlannedModel:
    kept = tuple(
        tensor.hf_name.removesuffix(".weight")
        for tensor in model.spec.tensors
        if tensor.part != "text" and tensor.linear
    )
    quantization = replace(_SPECS[method], not_converted=kept)
    spec = replace(model.spec, quantization=quantization)
    if method not in MADE_WHILE_LOADING:  # What this engine makes itself it can hold.
        spec = held_or_not(spec, None)
    return replace(model, spec=spec, stored=None, canonical=None, format="none", made_as=method, unquantized=model)


# As llama.cpp writes it


def _as_gguf(model: PlannedModel, kind: str) -> PlannedModel:
    """Tensors that only safetensors know keep their place: under our own names every family can be counted."""
    with_experts = any(layer.experts is not None for layer in model.spec.layers)
    if kind == "MXFP4_MOE" and not with_experts:
        raise ConfigurationError(
            f"quantization: {model.name} has no experts, the only tensors that MXFP4_MOE stores in MXFP4",
            code=CANNOT_QUANTIZE,
            needed="a model with experts",
            found="all of it would be Q8_0",
            fix="--quantization Q8_0, or MXFP4 for the matrices of all layers",
            field="quantization",
        )
    if kind == "MXFP4" and with_experts:
        kind = "MXFP4_MOE"
    text = text_alone(model.spec)
    spec = replace(text, tensors=tuple(tensor for tensor in text.tensors if tensor.part == "text"))
    stored = {tensor.name: _stored(tensor, layout) for tensor, layout in layouts_of(spec, kind)}
    layouts = {tensor.layout for tensor in stored.values()}
    canonical = stored if spec.runnable and layouts <= set(ENGINE_LAYOUTS) else None
    return replace(model, spec=spec, stored=stored, canonical=canonical, format="gguf", derived=True, made_as=kind)


def _stored(tensor: TensorSpec, layout: str) -> StoredTensor:
    nbytes = LAYOUTS[layout].bytes_for(tensor.shape)
    assert nbytes is not None, "chosen to fit the row"
    return StoredTensor(tensor.name, tensor.shape, layout, NO_FILE, 0, nbytes)
