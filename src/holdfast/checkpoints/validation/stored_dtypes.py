"""Whether stored numbers are what the config claims: quantized as it says, and of the type it says. Headers only.

    quantization_config over plain weights             refused: nothing of what it takes is packed
    quantization_config of one method, weights of another   refused: by their names, or by what AWQ and GPTQ turn
    scales of other groups or blocks                   refused, by the config's field
    packed weights without a quantization_config       said: engines look for it in other files
    dtype of one width, weights of another             the weights are believed

Bytes are counted elsewhere, and all other shapes compared in tensor_shapes.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from holdfast.checkpoints.files import StoredTensor
from holdfast.checkpoints.formats.block_layouts import LAYOUTS
from holdfast.checkpoints.formats.packed_modules import packing_of
from holdfast.checkpoints.formats.quantized_tensors import WORD_BITS, PackedPart, Packing
from holdfast.errors import CheckpointError
from holdfast.models import ModelSpec, QuantSpec

PLAIN: Mapping[str, str] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Layouts of numbers that engines compute with as they are, and what configs call them."""
PLAIN_LAYOUTS: Mapping[str, str] = {dtype: layout for layout, dtype in PLAIN.items()}
PACKED_ENDINGS = (".qweight", ".weight_packed", "_blocks", ".blocks")
_FLOAT8 = frozenset(name for name in LAYOUTS if name.startswith("F8_"))
_WRITES: Mapping[str, frozenset[str]] = {
    "awq": frozenset({".qweight"}),
    "gptq": frozenset({".qweight"}),
    "int4": frozenset({".weight_packed"}),
    # Eight bits are packed where only weights are quantized.
    "int8": frozenset({".weight_packed", "I8"}),
    "fp8": _FLOAT8,
    "bitsandbytes": frozenset({"U8", "I8"}),
    "mxfp4": frozenset({"_blocks", ".blocks"}),
    "nvfp4": frozenset({".weight_packed", "U8"}),
}
"""What each method leaves in a checkpoint: the ending of a name, or the layout of what keeps its name."""
_SCALES = (".scales", ".weight_scale", ".weight_scale_inv")
_FIX = "config.json belongs to another checkpoint: download both again"


def require_quantization(spec: ModelSpec, stored: Mapping[str, StoredTensor]) -> tuple[str, ...]:
    """Of safetensors. What is odd but harmless, in words. Raises CheckpointError."""
    if spec.quantization is None:
        return _unannounced(stored)
    plain, seen = None, set[str]()
    for tensor in spec.tensors:
        scheme = spec.quantization.scheme_of(tensor.hf_name, tensor.experts)
        if scheme is None or tensor.part != "text" or scheme.method in seen:
            continue
        if packing_of(spec.quantization, tensor, spec.stored_dtype) is None:
            continue
        for name, _ in tensor.in_safetensors():
            found = packed_part(name, stored)
            if found is None:
                plain = plain or stored.get(name)
                continue
            if not _left_by(found) & _WRITES[scheme.method]:
                raise _other_method(scheme.method, found)
            # One is enough: a quantizer leaves matrices alone, and packs all of a scheme alike.
            seen.add(scheme.method)
            break
    if seen:
        return ()
    method = spec.quantization.method
    if plain is None:
        return ()  # Nothing that it takes is there: said as missing.
    raise CheckpointError(
        f"config.json says that the weights are quantized ({method}), but they are not",
        needed=f"matrices in {method}, as quantization_config says",
        found=f"{plain.name} in {plain.layout}, and no packed one",
        fix="remove quantization_config from config.json, or download the weights that belong to it",
        field="quantization_config",
    )


def packed_part(name: str, stored: Mapping[str, StoredTensor]) -> StoredTensor | None:
    """What holds the quants of the matrix of this name; None: it is plain, or not there."""
    found = stored.get(name)
    if found is not None:
        return None if found.layout in PLAIN else found
    module = name.removesuffix(".weight")
    return next((stored[module + end] for end in PACKED_ENDINGS if module + end in stored), None)


def _left_by(found: StoredTensor) -> frozenset[str]:
    return frozenset({found.layout, *(end for end in PACKED_ENDINGS if found.name.endswith(end))})


def _other_method(method: str, found: StoredTensor, shape: tuple[int, ...] | None = None) -> CheckpointError:
    """`shape`: that the method gives what has a name of its own, but lies otherwise."""
    named = " or ".join(sorted(_WRITES[method]))
    return CheckpointError(
        f"the weights are not quantized with {method}, as config.json says",
        needed=f"tensors of {method}: {named if shape is None else f'{list(shape)}'}",
        found=f"{found.name} in {found.layout}" + ("" if shape is None else f", {list(found.shape)}"),
        fix=_FIX,
        field="quant_method",
    )


def require_packed_so(
    quantization: QuantSpec,
    packing: Packing,
    parts: Sequence[PackedPart],
    found: StoredTensor,
    stored: Mapping[str, StoredTensor],
) -> None:
    """Of one matrix with the quants `found`: that they and their scales lie as `parts` say. Raises CheckpointError."""
    quants = parts[0].shape
    if packing.method in ("awq", "gptq") and found.shape != quants:
        _require_turned_so(packing, quants, found)
        return  # Turned or tiled in a way of its own, and its scales likely too.
    module = found.name.removesuffix(".weight").removesuffix(".qweight").removesuffix(".weight_packed")
    expected = next((part.shape for part in parts if f".{part.name}" in _SCALES), None)
    scales = next((stored[module + end] for end in _SCALES if module + end in stored), None)
    field = quantization.reach_field
    if not field or expected is None or scales is None or _squeezed(scales.shape) == _squeezed(expected):
        return
    raise CheckpointError(
        f"the scales of the weights are not for {_reach(quantization)}, as config.json says ({field})",
        needed=f"{list(expected)} scales",
        found=f"{list(scales.shape)} in {scales.name}: {_apiece(found, packing, scales)}",
        fix=_FIX,
        field=field,
    )


def _require_turned_so(packing: Packing, quants: tuple[int, ...], found: StoredTensor) -> None:
    """AWQ packs outputs, [in, out / 8], and GPTQ inputs, [in / 8, out]."""
    in_a_word = WORD_BITS // packing.bits
    if packing.method == "gptq":
        columns, rows = quants[0] * WORD_BITS // packing.bits, quants[1]
        if found.shape == (columns, rows // in_a_word):
            raise _other_method("gptq", found, quants)
        for bits in (2, 3, 4, 8):
            if found.shape == (columns * bits // WORD_BITS, rows):
                raise CheckpointError(
                    f"the weights are packed in {bits} bits, but config.json says {packing.bits}",
                    needed=f"{list(quants)}",
                    found=f"{list(found.shape)} in {found.name}",
                    fix=_FIX,
                    field="bits",
                )
        return
    columns, rows = quants[0], quants[1] * in_a_word
    # Some write AWQ as [out, in / 8].
    if found.shape == (columns // in_a_word, rows) and found.shape != (rows, columns // in_a_word):
        raise _other_method("awq", found, quants)


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(extent for extent in shape if extent != 1)


def _reach(quantization: QuantSpec) -> str:
    if quantization.granularity == "block":
        return "blocks of {} x {}".format(*quantization.block)
    if quantization.granularity == "group":
        return f"groups of {quantization.group_size}"
    return "whole rows" if quantization.granularity == "channel" else "whole matrices"


def _apiece(found: StoredTensor, packing: Packing, scales: StoredTensor) -> str:
    in_a_word = WORD_BITS // packing.bits if found.layout == "I32" else 1
    return f"one per {prod(found.shape) * in_a_word // max(1, prod(scales.shape)):,} weights"


def _unannounced(stored: Mapping[str, StoredTensor]) -> tuple[str, ...]:
    packed = next((name for name in stored if name.endswith(PACKED_ENDINGS)), None)
    if packed is None:
        return ()
    return (f"{packed}: packed, but config.json has no quantization_config; engines look for quantize_config.json",)


def as_stored(spec: ModelSpec, stored: Mapping[str, StoredTensor]) -> tuple[ModelSpec, tuple[str, ...]]:
    """The spec with the type that most of its plain weights have, where the config gives a wider or a narrower one.

    Of two types of the same width the config's stands: it says what the model was made to compute in.
    """
    sizes = Counter[str]()
    for tensor in stored.values():
        sizes[tensor.layout] += tensor.nbytes
    most = sizes.most_common(1)[0][0] if sizes else ""
    dtype = PLAIN.get(most)
    if dtype is None or spec.quantization is not None or dtype == spec.stored_dtype:
        return spec, ()
    said = f"the config says {spec.stored_dtype}, but the weights are stored in {dtype}"
    if "float32" not in (dtype, spec.stored_dtype):
        return spec, (f"{said}: computed as the config says",)
    return replace(spec, stored_dtype=dtype), (said,)
