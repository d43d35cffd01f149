"""A model as it would be if somebody had quantized it: the same shapes, other bytes. Counts what quantizers write.

    awq, gptq, int4, int8, fp8, nf4    linear layers of the decoder; head, embedding, router and vision stay
    Q4_K_M, Q8_0, IQ4_XS, ...          GGUF: every matrix, some in more bits than the name says, as llama.cpp mixes them

Looks nothing up and fits nothing. A model that is already quantized is not quantized again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from holdfast.checkpoints import ENGINE_LAYOUTS, LAYOUTS, StoredTensor
from holdfast.errors import CheckpointError, ConfigurationError
from holdfast.models import ModelSpec, QuantSpec, TensorSpec
from holdfast.planner.layouts import is_quantized
from holdfast.planner.question import PlannedModel
from holdfast.planner.weights import weights_of
from holdfast.units import shorten

CANNOT_QUANTIZE = "HF144"

_SPECS: Mapping[str, QuantSpec] = {
    "awq": QuantSpec(method="awq", bits=4, group_size=128, symmetric=False),
    "gptq": QuantSpec(method="gptq", bits=4, group_size=128, symmetric=False),
    "int4": QuantSpec(method="int4", bits=4, group_size=128),
    "int8": QuantSpec(method="int8", bits=8, granularity="channel"),
    "fp8": QuantSpec(method="fp8", bits=8, granularity="tensor"),
    # Without a second quantization of the scales, as servers make it while loading.
    "nf4": QuantSpec(method="bitsandbytes", bits=4),
}
_OTHER_SPELLINGS = {
    "awq_marlin": "awq", "gptq_marlin": "gptq", "marlin": "gptq", "w4a16": "int4", "w8a8": "int8",
    "compressed-tensors": "int4", "bitsandbytes": "nf4", "bnb": "nf4",
}  # fmt: skip
_SAME_METHOD = {"compressed-tensors": ("int4", "int8", "fp8"), "bitsandbytes": ("bitsandbytes",)}

_GGUF_BASE: Mapping[str, str] = {
    "Q2_K": "Q2_K", "Q3_K_S": "Q3_K", "Q3_K_M": "Q3_K", "Q3_K_L": "Q3_K", "Q4_K_S": "Q4_K", "Q4_K_M": "Q4_K",
    "Q5_K_S": "Q5_K", "Q5_K_M": "Q5_K", "Q6_K": "Q6_K", "Q8_0": "Q8_0", "Q4_0": "Q4_0", "Q4_1": "Q4_1",
    "Q5_0": "Q5_0", "Q5_1": "Q5_1", "IQ4_XS": "IQ4_XS", "IQ4_NL": "IQ4_NL", "F16": "F16", "BF16": "BF16", "F32": "F32",
}  # fmt: skip
"""What most matrices are stored as under each name."""
_NARROW = {
    "Q2_K": "IQ4_NL", "Q3_K": "IQ4_NL", "IQ4_XS": "IQ4_NL", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0",
}  # fmt: skip
"""Taken instead where a row is no whole number of the larger blocks."""
METHODS = (*_SPECS, *_GGUF_BASE)


@dataclass(frozen=True, slots=True)
class _Place:
    """Of one matrix in the model."""

    role: str
    layer: int
    layers: int
    shared_heads: int
    """Query heads to a KV head."""
    eight_experts: bool

    @property
    def worth_more(self) -> bool:
        """First and last eighth, and every third between: where more bits help most."""
        eighth = self.layers // 8
        return self.layer < eighth or self.layer >= 7 * self.layers // 8 or (self.layer - eighth) % 3 == 2


def quantized_as(model: PlannedModel, asked: str) -> PlannedModel:
    """The model as `asked` says; the same model when it is stored so already. Raises ConfigurationError."""
    name = asked.strip()
    plain = _OTHER_SPELLINGS.get(name.lower(), name.lower())
    if plain not in _SPECS and name.upper() not in _GGUF_BASE:
        raise ConfigurationError(
            f"quantization: {shorten(name)!r} is not known",
            code=CANNOT_QUANTIZE,
            needed="one of " + ", ".join(METHODS),
            found=shorten(name),
            fix="--quantization fp8, awq or Q4_K_M, or leave it out",
            field="quantization",
        )
    if _already(model, name, plain):
        return model
    _require_plain(model, name)
    if name.upper() in _GGUF_BASE:
        return _as_gguf(model, name.upper())
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


def _already(model: PlannedModel, name: str, plain: str) -> bool:
    stored = model.spec.quantization
    if stored is not None:
        methods = _SAME_METHOD.get(name.lower(), (_SPECS[plain].method,) if plain in _SPECS else ())
        return stored.method in methods
    if model.format != "gguf" or name.upper() not in _GGUF_BASE:
        return False
    return bool(model.stored) and any(
        tensor.layout == _GGUF_BASE[name.upper()] for tensor in (model.stored or {}).values() if len(tensor.shape) > 1
    )


def _require_plain(model: PlannedModel, name: str) -> None:
    quantization = model.spec.quantization
    layouts = (tensor.layout for tensor in (model.stored or {}).values())
    quantized = next((layout for layout in layouts if is_quantized(layout)), None)
    found = quantized if quantization is None else quantization.method
    if found is not None:
        raise ConfigurationError(
            f"quantization: {model.name} is stored as {found}, and cannot be planned as {shorten(name)}",
            code=CANNOT_QUANTIZE,
            needed="a model that is not quantized yet",
            found=found,
            fix="leave --quantization out, or name the unquantized model",
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
    return replace(model, spec=spec, stored=None, canonical=None, format="none", made_as=method)


# As llama.cpp writes it


def _as_gguf(model: PlannedModel, name: str) -> PlannedModel:
    """Tensors that only safetensors know keep their place: under our own names every family can be counted."""
    spec = replace(
        model.spec,
        tensors=tuple(replace(tensor, gguf_name=tensor.name) for tensor in model.spec.tensors if tensor.part == "text"),
    )
    stored = {
        tensor.name: _stored(tensor, _layout(spec, tensor, name)) for tensor in spec.tensors if not tensor.optional
    }
    layouts = {tensor.layout for tensor in stored.values()}
    canonical = stored if spec.runnable and layouts <= set(ENGINE_LAYOUTS) else None
    return replace(model, spec=spec, stored=stored, canonical=canonical, format="gguf", derived=True, made_as=name)


def _stored(tensor: TensorSpec, layout: str) -> StoredTensor:
    nbytes = LAYOUTS[layout].bytes_for(tensor.shape)
    assert nbytes is not None, "chosen to fit the row"
    return StoredTensor(tensor.name, tensor.shape, layout, Path(), 0, nbytes)


def _layout(spec: ModelSpec, tensor: TensorSpec, name: str) -> str:
    matrix = len(tensor.shape) > 1 and (tensor.linear or tensor.name == "embed")
    if not matrix:
        return "F32"
    layout = _wanted(spec, tensor, name)
    columns = tensor.shape[-1]
    if columns % LAYOUTS[layout].block_elements:
        layout = _NARROW.get(layout, "F16")
    return layout if columns % LAYOUTS[layout].block_elements == 0 else "F16"


def _wanted(spec: ModelSpec, tensor: TensorSpec, name: str) -> str:
    base = _GGUF_BASE[name]
    if base in ("F16", "BF16", "F32"):
        return base
    if tensor.name == "head" or (tensor.name == "embed" and spec.tied_embeddings):
        return "Q8_0" if base == "Q8_0" else "Q6_K"
    if tensor.layer is None:
        return base
    experts = spec.layers[tensor.layer].experts
    place = _Place(
        role=tensor.name.rpartition(".")[2],
        layer=tensor.layer,
        layers=len(spec.layers),
        shared_heads=spec.heads // spec.kv_heads,
        eight_experts=experts is not None and experts.count == 8,
    )
    rule = _RULES.get(place.role)
    return base if rule is None else rule(name, base, place)


def _keys(name: str, base: str, place: _Place) -> str:
    return "Q8_0" if place.eight_experts else base


def _values(name: str, base: str, place: _Place) -> str:
    """Small where heads share them, and worth their bits."""
    layout = base
    if name == "Q2_K":
        layout = "Q4_K" if place.shared_heads >= 4 else "Q3_K"
    elif name == "Q3_K_M":
        layout = "Q5_K" if place.layer < 2 else "Q4_K"
    elif name == "Q3_K_L" or (base.startswith("IQ4") and place.shared_heads >= 4):
        layout = "Q5_K"
    elif name in ("Q4_K_M", "Q5_K_M") and place.worth_more:
        layout = "Q6_K"
    elif name == "Q4_K_S" and place.layer < 4:
        layout = "Q5_K"
    if place.layers == 80 and place.shared_heads == 8 and layout in ("Q3_K", "Q4_K"):
        layout = "Q5_K"  # 70B models: eight heads share them.
    return "Q8_0" if place.eight_experts else layout


def _down(name: str, base: str, place: _Place) -> str:
    if name == "Q2_K":
        return "Q3_K"
    if name == "Q3_K_M":
        return "Q5_K" if place.layer < place.layers // 16 else "Q4_K"
    if name == "Q3_K_L":
        return "Q5_K"
    if name in ("Q4_K_M", "Q5_K_M") and place.worth_more:
        return "Q6_K"
    if (name == "Q4_K_S" or base.startswith("IQ4")) and place.layer < place.layers // 8:
        return "Q5_K"
    return base


def _out(name: str, base: str, place: _Place) -> str:
    if place.eight_experts and base in ("Q2_K", "Q3_K", "Q4_K", "IQ4_XS", "IQ4_NL"):
        return "Q5_K"
    return {"Q2_K": "Q3_K", "Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K"}.get(name, base)


def _fused(name: str, base: str, place: _Place) -> str:
    """Queries, keys and values in one matrix."""
    return {"Q3_K_M": "Q4_K", "Q3_K_L": "Q4_K", "Q4_K_M": "Q5_K", "Q5_K_M": "Q6_K"}.get(name, base)


_RULES: Mapping[str, Callable[[str, str, _Place], str]] = {
    "k": _keys, "v": _values, "down": _down, "o": _out, "qkv": _fused
}  # fmt: skip
