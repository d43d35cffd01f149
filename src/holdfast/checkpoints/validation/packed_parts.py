"""The tensors that a quantizer spread a matrix over: all there, with the shapes and types that its format has.

Headers only; what the numbers say (order of columns, zero points, scales that are no numbers) is seen at loading.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from holdfast.checkpoints.files import PackedMatrix, StoredTensor
from holdfast.checkpoints.formats.quantized_tensors import SCALE_PARTS, PackedPart, Packing, stored_parts
from holdfast.checkpoints.validation.stored_dtypes import PACKED_ENDINGS, PLAIN
from holdfast.errors import CheckpointError
from holdfast.models import TensorSpec
from holdfast.units import shorten

_FIX = (
    "download the model again, config.json too: a quantization_config that was edited, or is of another checkpoint,"
    " does not fit these tensors"
)
_UNSAID = frozenset({"g_idx", "weight_shape", "weight_format", "weight.quant_map"})
"""Parts that a reader does without: they repeat what config and shapes say."""
_WIDE_INDICES = frozenset({"g_idx", "weight_g_idx", "weight_shape"})
"""Parts in I32 or I64, as their writer pleased; packed codes and zero points are 32-bit words alone."""
_ZERO_LAYOUTS = ("I8", "F8_E4M3", "I32", "I64", *PLAIN)
"""Of unpacked zero points that must be zero, of whatever type and shape."""
_SCALES = ("scales", "weight_scale", "input_scale", "input_scale_ub", "SCB", "weight.nested_absmax")
_EXPONENTS = ("F8_E8M0", "U8")
"""Of scales that are stored as powers of two."""
_BESIDE_CODES = (*SCALE_PARTS, "qweight", "weight_packed")
_STATE = "weight.quant_state.bitsandbytes__"
_INPUT_SCALES = re.compile(r"(?:.*\.)?(?:act|act_fn|activation)\.scales|.*\.pre_quant_scale")
"""What inputs of a matrix are divided by or multiplied with first, each of them: AWQ behind an activation function that
nothing is multiplied with (StarCoder2, Falcon, GPT-NeoX), and ModelOpt's AWQ."""


def find_packed(
    tensor: TensorSpec, packing: Packing, stored: Mapping[str, StoredTensor]
) -> tuple[StoredTensor | None, str]:
    """The matrix as one stored tensor, or the name under which something of it is missing. Experts that lie one by one
    are told as one stack, under the names they have in common."""
    if packing.method == "mxfp4":
        return _find_stack(tensor, packing, stored)
    if tensor.hf_shape is not None or (tensor.experts and "{expert}" not in tensor.hf_name):
        kind = "stacked experts" if tensor.experts else "a transposed matrix"
        raise _unread(tensor.hf_name, f"{kind} in {packing.method}")
    rows, columns = tensor.shape[-2:]
    names = [name for name, _ in tensor.in_safetensors()]
    packing = _as_found(packing, names[0].removesuffix(".weight"), stored)
    try:
        expected = stored_parts(packing, rows, columns)
    except CheckpointError as error:
        error.found = f"{error.found}, of {names[0]}"
        error.fix = error.fix or _FIX
        raise
    unannounced = _unannounced(packing, expected, rows, columns)
    first: dict[str, StoredTensor] | None = None
    total = 0
    for name in names:
        found, missing = _parts(name.removesuffix(".weight"), packing, expected, unannounced, stored)
        if missing:
            return None, missing
        first = found if first is None else first
        _require_alike(first, found)
        total += sum(part.nbytes for part in found.values())
    assert first is not None
    if tensor.experts:
        first = {part: replace(one, name=_in_common(tensor, part, one)) for part, one in first.items()}
    codes = next(iter(first.values()))
    whole = replace(codes, shape=tensor.shape, nbytes=total, packed=PackedMatrix(packing, first))
    return whole, codes.name


def refuse_input_scales(stored: Mapping[str, StoredTensor]) -> None:
    """No family here multiplies with them: passed over, every answer would be a little wrong."""
    name = next((name for name in stored if _INPUT_SCALES.fullmatch(name)), None)
    if name is not None:
        raise _unread(shorten(name, 120), "scales for the inputs of a quantized matrix, one each")


def refuse_scaled_numbers(tensor: TensorSpec, stored: Mapping[str, StoredTensor]) -> None:
    """Of a matrix that the config takes for quantized and that is plain all the same: with scales beside it, it may be
    codes in a wider type, or be there twice."""
    for name, _ in tensor.in_safetensors():
        module = name.removesuffix(".weight")
        found = next((f"{module}.{part}" for part in _BESIDE_CODES if f"{module}.{part}" in stored), None)
        if found is not None and name in stored:
            raise CheckpointError(
                f"tensor {name!r} is stored in {stored[name].layout}, beside {found!r} of a quantized matrix",
                needed="codes with their scales, or plain weights alone",
                found=f"{list(stored[name].shape)} in {stored[name].layout}, and {found}",
                fix=_FIX,
                field="quantization_config",
            )


def _find_stack(
    tensor: TensorSpec, packing: Packing, stored: Mapping[str, StoredTensor]
) -> tuple[StoredTensor | None, str]:
    """The same of experts in MXFP4: two tensors have them all."""
    rows, columns = tensor.shape[-2:]
    try:
        expected = stored_parts(packing, rows, columns)
    except CheckpointError as error:
        error.found = f"{error.found}, of {tensor.hf_name}"
        error.fix = error.fix or _FIX
        raise
    found: dict[str, StoredTensor] = {}
    for part in expected:
        name = f"{tensor.hf_name}_{part.name}"
        one = stored.get(name)
        if one is None:
            return None, name
        whole = (*tensor.shape[:-2], *part.shape)
        if one.shape != whole or one.layout not in (_EXPONENTS if part.name == "scales" else (part.layout,)):
            raise _misshapen(one, f"{list(whole)} in {part.layout}", packing)
        found[part.name] = one
    codes = next(iter(found.values()))
    total = sum(part.nbytes for part in found.values())
    return replace(codes, shape=tensor.shape, nbytes=total, packed=PackedMatrix(packing, found)), codes.name


def _as_found(packing: Packing, module: str, stored: Mapping[str, StoredTensor]) -> Packing:
    """Eight bits are packed or not, whatever the config calls it; AWQ without zero points may still store some."""
    packed = f"{module}.weight_packed" in stored
    if packing.method == "int8" and packed:
        group = -1 if packing.granularity != "group" else packing.group_size
        return replace(packing, method="pack-quantized", bits=8, group_size=group, granularity=None)
    if packing.method == "pack-quantized" and packing.bits == 8 and not packed:
        return replace(packing, method="int8", granularity="channel" if packing.group_size < 1 else "group")
    if packing.method == "awq" and packing.symmetric and f"{module}.qzeros" in stored:
        return replace(packing, symmetric=False)
    return packing


def _parts(
    module: str,
    packing: Packing,
    expected: tuple[PackedPart, ...],
    unannounced: tuple[PackedPart, ...],
    stored: Mapping[str, StoredTensor],
) -> tuple[dict[str, StoredTensor], str]:
    """By their names after the module's, codes first; or the name of one that is missing."""
    bound = stored.get(f"{module}.input_scale_ub")
    if bound is not None and not packing.input_bound:
        raise _unread(bound.name, "a bound for the largest input of FP8 products, which quantization_config has not")
    found: dict[str, StoredTensor] = {}
    for part in expected:
        name = part.name.removesuffix("_inv")
        one = stored.get(f"{module}.{part.name}") or stored.get(f"{module}.{name}")
        one = one or stored.get(f"{module}.{name}_inv")
        if one is None:
            if _dispensable(name, packing):
                continue
            if name.startswith(_STATE) and f"{module}.{_STATE}fp4" in stored:
                raise _unread(f"{module}.weight", "FP4 of bitsandbytes")
            return {}, _name_of(module, part, stored)
        _check(one, part, packing)
        found[name] = one
    for part in unannounced:
        one = stored.get(f"{module}.{part.name}")
        if one is None:
            continue
        if part.layout == "I32" or one.layout not in _ZERO_LAYOUTS:
            _check(one, part, packing)
        found[part.name] = one
    if bound is not None:
        _check(bound, PackedPart("input_scale_ub", (1,), "F32"), packing)
        found["input_scale_ub"] = bound
    return found, ""


def _unannounced(packing: Packing, expected: tuple[PackedPart, ...], rows: int, columns: int) -> tuple[PackedPart, ...]:
    """What compressed-tensors may store though the config says symmetric, without an order, or inputs without zero
    points. Read wherever it is there: the numbers must say the same."""
    if packing.method not in ("pack-quantized", "int8", "fp8"):
        return ()
    every = stored_parts(replace(packing, symmetric=False, act_order=True), rows, columns)
    found = [part for part in every if part.name in ("weight_zero_point", "weight_g_idx") and part not in expected]
    if packing.method == "fp8":
        scale = next(part for part in every if part.name.startswith("weight_scale"))
        found.append(replace(scale, name="weight_zero_point", layout="F8_E4M3"))
    return (*found, PackedPart("input_zero_point", (1,), "I8"))


def _dispensable(name: str, packing: Packing) -> bool:
    if name == "qzeros":
        return packing.method == "awq" and packing.symmetric
    return name in _UNSAID and not (name == "g_idx" and packing.act_order)


def _name_of(module: str, part: PackedPart, stored: Mapping[str, StoredTensor]) -> str:
    """What is missing; where the codes themselves lie as another method leaves them, that is said instead."""
    other = next((stored[module + end] for end in PACKED_ENDINGS if module + end in stored), None)
    if other is not None and not other.name.endswith(part.name) and part.name in ("weight", "qweight", "weight_packed"):
        return f"{module}.{part.name} (there is {other.name})"
    return f"{module}.{part.name}"


def _check(found: StoredTensor, part: PackedPart, packing: Packing) -> None:
    if part.name.startswith(_STATE):
        if found.layout != "U8" or len(found.shape) != 1:
            raise _misshapen(found, "a text in U8", packing)
        return
    name = part.name.removesuffix("_inv")
    number = name in _SCALES or (name == "weight.absmax" and part.layout == "F32")
    exponents = packing.input_powers and name == "weight_scale" and found.layout in _EXPONENTS
    if number and found.layout not in PLAIN and not exponents:
        raise _misshapen(found, "scales in F32, F16 or BF16", packing)
    alike = found.layout == part.layout or (name in _WIDE_INDICES and found.layout in ("I32", "I64"))
    codes = name in ("weight", "qweight", "weight_packed")
    if not number and (found.layout != part.layout if codes else not alike):
        raise _misshapen(found, part.layout, packing)
    same = found.shape == part.shape if codes and packing.method not in ("nf4", "fp4") else None
    if not (_squeezed(found.shape) == _squeezed(part.shape) if same is None else same):
        raise _misshapen(found, str(list(part.shape)), packing)


def _misshapen(found: StoredTensor, needed: str, packing: Packing) -> CheckpointError:
    in_groups = packing.method in ("awq", "gptq", "pack-quantized")
    said = f" of {packing.bits} bits, group_size {packing.group_size}" if in_groups else ""
    return CheckpointError(
        f"tensor {found.name!r} of a quantized matrix is not what quantization_config says of it",
        needed=f"{needed}, for {packing.method}{said}",
        found=f"{list(found.shape)} in {found.layout}, of {found.path.name}",
        fix=_FIX,
        field="quantization_config",
    )


def _unread(name: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"this engine cannot read {name}: {what}",
        needed="matrices of linear layers that lie one by one",
        found=what,
        fix="use another quantization of this model, such as AWQ, GPTQ, FP8 or a GGUF file",
        field="quantization_config",
    )


def _require_alike(first: Mapping[str, StoredTensor], other: Mapping[str, StoredTensor]) -> None:
    for name, part in first.items():
        one = other.get(name)
        if one is None or (one.layout, one.shape) != (part.layout, part.shape):
            if name.startswith(_STATE) and one is not None:
                continue  # A text, of whatever length.
            raise CheckpointError(
                f"experts of one layer are stored in different ways: {part.name} and the others",
                needed=f"{list(part.shape)} in {part.layout}",
                found="nothing" if one is None else f"{list(one.shape)} in {one.layout}: {one.name}",
                fix=_FIX,
            )
    if len(other) != len(first):
        more = next(name for name in other if name not in first)
        raise CheckpointError(
            "experts of one layer are stored in different ways",
            needed=", ".join(first),
            found=other[more].name,
            fix=_FIX,
        )


def _in_common(tensor: TensorSpec, part: str, one: StoredTensor) -> str:
    ending = one.name[len(tensor.hf_name.replace("{expert}", "0").removesuffix(".weight")) :]
    return tensor.hf_name.removesuffix(".weight") + ending


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(extent for extent in shape if extent != 1)
