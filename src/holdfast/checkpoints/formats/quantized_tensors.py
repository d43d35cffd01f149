"""How quantizers spread one matrix [out, in] over several stored tensors: their names, shapes and bytes.

Counts what lies in the checkpoint, exactly, from the shape alone. Decodes nothing, and does not know which
matrices of a model a quantizer took: norms, embeddings and heads mostly stay as they were.

    awq             qweight I32 [in, out/8]      qzeros [in/g, out/8]     scales [in/g, out]
    gptq            qweight I32 [in/8, out]      qzeros [in/g, out/8]     scales [in/g, out]    g_idx I32 [in]
    pack-quantized  weight_packed I32 [out, in/8]                weight_scale [out, in/g]       weight_shape I64 [2]
    int8            weight I8 [out, in]                          weight_scale: likewise
    fp8             weight F8_E4M3 [out, in]                     weight_scale: one, [out, 1], [out, in/g] or one a block
    nf4, fp4        weight U8 [out*in/2, 1]                      absmax of every 64 elements, quantized again
    bnb-int8        weight I8 [out, in]                          SCB F32 [out]
    mxfp4           blocks U8 [out, in/32, 16]                   scales U8 (e8m0) [out, in/32]
    nvfp4           weight_packed U8 [out, in/2]                 weight_scale F8_E4M3 [out, in/16]
                    ModelOpt: weight                             the same, and weight_scale_2 for weight_global_scale
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Literal

from holdfast.checkpoints.formats.block_layouts import LAYOUTS
from holdfast.errors import CheckpointError
from holdfast.units import shorten

WORD_BITS = 32
"""Packed integers lie in 32-bit words."""
MXFP4_BLOCK, NVFP4_BLOCK = 32, 16
BNB_BLOCK, BNB_NESTED_BLOCK = 64, 256
_NESTED_OFFSET_DIGITS = 19
"""bitsandbytes writes one float as text beside every matrix: about so many characters, the one inexact count here."""


PART_NAMES = re.compile(
    r"(.*)\.(?:qweight|qzeros|scales|g_idx|SCB|weight_(?:packed|scale|scale_inv|scale_2|global_scale|zero_point|g_idx|shape|format)"
    r"|weight\.(?:absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.\w+)"
    r"|input_(?:scale|scale_ub|global_scale|zero_point))"
)
"""What quantizers write beside a module's name, or in place of its weight."""


SCALE_PARTS = ("scales", "weight_scale", "weight_scale_inv", "SCB", "weight.absmax")
"""One of these is beside every matrix that a quantizer took."""
STACKED_PARTS = ("_blocks", "_scales")
"""What MXFP4 writes behind the name of a stack of experts."""


@dataclass(frozen=True, slots=True)
class Packing:
    """What a quantization config says about how matrices are stored. A method ignores fields it has no use for."""

    method: str
    bits: int = 4
    """awq, gptq, pack-quantized."""
    group_size: int = 128
    """Columns that share a scale; -1: all of a row (awq, gptq, pack-quantized; fp8 and int8 in groups)."""
    symmetric: bool = True
    """Without zero points; awq and gptq store some in any case, all the same then."""
    act_order: bool = False
    """Groups are no runs of columns: g_idx says whose a column is. gptq stores it in any case."""
    granularity: Literal["tensor", "channel", "group", "block"] | None = None
    """fp8, int8: how many weights share a scale; None: all of a matrix in fp8, a row in int8."""
    block: tuple[int, int] = (128, 128)
    """fp8, int8 in blocks: rows and columns."""
    scales: str | None = None
    """Layout of the scales; None: what the method's own tools write."""
    zeros_less_one: bool = False
    """gptq: as its first format stores zero points."""
    inputs: Literal["plain", "fp8", "int8"] = "plain"
    """What a product's inputs are rounded to."""
    input_group: int = 0
    """Columns of an input that share a scale; 0: all."""
    input_bound: float = 0.0
    """No input counts for more when a scale is chosen; 0: there is no bound."""
    input_powers: bool = False
    """Scales of inputs are powers of two; those of weights may be stored as exponents (e8m0)."""
    static_inputs: bool = False
    """fp8, int8, nvfp4: with one scale for the layer's input."""
    nested: bool = True
    """nf4, fp4: absmax is quantized once more ("double quant")."""
    dtype: str = "bfloat16"
    """nf4, fp4: what the weights were; it is spelled out beside every matrix."""


@dataclass(frozen=True, slots=True)
class PackedPart:
    """One of the tensors that hold a matrix; `name` follows the layer's name."""

    name: str
    shape: tuple[int, ...]
    layout: str

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * LAYOUTS[self.layout].block_bytes


def stored_bytes(method: str | Packing, out_features: int, in_features: int) -> int:
    """Bytes of one matrix [out, in] in the checkpoint, scales and zeros included."""
    return sum(part.nbytes for part in stored_parts(method, out_features, in_features))


def stored_parts(method: str | Packing, out_features: int, in_features: int) -> tuple[PackedPart, ...]:
    """The tensors of one matrix; raises CheckpointError for a method or a shape that cannot be stored so."""
    packing = Packing(method) if isinstance(method, str) else method
    parts_of = _METHODS.get(packing.method)
    if parts_of is None:
        raise CheckpointError(
            f"{shorten(packing.method)!r} is not a known quantization method for matrices",
            needed="one of " + ", ".join(METHODS),
            field="quant_method",
        )
    if out_features < 1 or in_features < 1:
        raise _unfit(packing, "a matrix with rows and columns", f"[{out_features}, {in_features}]")
    if packing.scales is not None and packing.scales not in ("F32", "F16", "BF16"):
        raise _unfit(packing, "scales in F32, F16 or BF16", shorten(packing.scales))
    return parts_of(packing, out_features, in_features)


def _awq(packing: Packing, rows: int, columns: int) -> tuple[PackedPart, ...]:
    words, groups = _words(packing, rows, "output features"), _groups(packing, columns, whole=True)
    return (
        PackedPart("qweight", (columns, words), "I32"),
        PackedPart("qzeros", (groups, words), "I32"),
        PackedPart("scales", (groups, rows), packing.scales or "F16"),
    )


def _gptq(packing: Packing, rows: int, columns: int) -> tuple[PackedPart, ...]:
    # Its format could end in a shorter group; no engine that reads it can.
    groups = _groups(packing, columns, whole=True)
    return (
        PackedPart("qweight", (_words(packing, columns, "input features"), rows), "I32"),
        PackedPart("qzeros", (groups, _words(packing, rows, "output features")), "I32"),
        PackedPart("scales", (groups, rows), packing.scales or "F16"),
        PackedPart("g_idx", (columns,), "I32"),
    )


def _pack_quantized(packing: Packing, rows: int, columns: int) -> tuple[PackedPart, ...]:
    _check_bits(packing, (4, 8))
    a_word, groups = WORD_BITS // packing.bits, _groups(packing, columns, whole=False)
    parts = [
        PackedPart("weight_packed", (rows, -(-columns // a_word)), "I32"),
        PackedPart("weight_scale", (rows, groups), packing.scales or "BF16"),
        PackedPart("weight_shape", (2,), "I64"),
    ]
    if not packing.symmetric:
        parts.append(PackedPart("weight_zero_point", (-(-rows // a_word), groups), "I32"))
    if packing.act_order:
        parts.append(PackedPart("weight_g_idx", (columns,), "I32"))
    return tuple(parts)


def _int8(packing: Packing, rows: int, columns: int) -> tuple[PackedPart, ...]:
    shape = _scales_shape(packing, packing.granularity or "channel", rows, columns)
    scale = PackedPart("weight_scale", shape, packing.scales or "BF16")
    parts = [PackedPart("weight", (rows, columns), "I8"), scale, *_input_scale(packing, "input_scale", scale.layout)]
    if not packing.symmetric:
        parts.append(PackedPart("weight_zero_point", shape, "I8"))
    if packing.act_order:
        parts.append(PackedPart("weight_g_idx", (columns,), "I32"))
    return tuple(parts)


def _fp8(packing: Packing, rows: int, columns: int) -> tuple[PackedPart, ...]:
    granularity = packing.granularity or "tensor"
    # In blocks: DeepSeek's own name and type; compressed-tensors calls it weight_scale.
    name = "weight_scale_inv" if granularity == "block" else "weight_scale"
    layout = packing.scales or ("BF16" if granularity in ("channel", "group") else "F32")
    scale = PackedPart(name, _scales_shape(packing, granularity, rows, columns), layout)
    return (PackedPart("weight", (rows, columns), "F8_E4M3"), scale, *_input_scale(packing, "input_scale", layout))


def _scales_shape(packing: Packing, granularity: str, rows: int, columns: int) -> tuple[int, ...]:
    if granularity == "block":
        high, wide = packing.block
        if high < 1 or wide < 1:
            raise _unfit(packing, "a block with rows and columns", str(packing.block))
        return (-(-rows // high), -(-columns // wide))
    if granularity == "group":
        return (rows, _groups(packing, columns, whole=False))
    return (rows, 1) if granularity == "channel" else (1,)


def _bitsandbytes_4bit(packing: Packing, rows: int, columns: int) -> tuple[PackedPart, ...]:
    elements = rows * columns
    blocks = -(-elements // BNB_BLOCK)
    state: dict[str, object] = {
        "quant_type": packing.method,
        "blocksize": BNB_BLOCK,
        "dtype": packing.dtype,
        "shape": [rows, columns],
    }
    parts = [PackedPart("weight", (-(-elements // 2), 1), "U8"), PackedPart("weight.quant_map", (16,), "F32")]
    if packing.nested:
        state |= {"nested_blocksize": BNB_NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": 0}
        parts += [
            PackedPart("weight.absmax", (blocks,), "U8"),
            PackedPart("weight.nested_absmax", (-(-blocks // BNB_NESTED_BLOCK),), "F32"),
            PackedPart("weight.nested_quant_map", (256,), "F32"),
        ]
    else:
        parts.append(PackedPart("weight.absmax", (blocks,), "F32"))
    text_bytes = len(json.dumps(state)) + (_NESTED_OFFSET_DIGITS - 1 if packing.nested else 0)
    parts.append(PackedPart(f"weight.quant_state.bitsandbytes__{packing.method}", (text_bytes,), "U8"))
    return tuple(parts)


def _bitsandbytes_int8(packing: Packing, rows: int, columns: int) -> tuple[PackedPart, ...]:
    return (
        PackedPart("weight", (rows, columns), "I8"),
        PackedPart("SCB", (rows,), "F32"),
        PackedPart("weight_format", (), "U8"),
    )


def _mxfp4(packing: Packing, rows: int, columns: int) -> tuple[PackedPart, ...]:
    if columns % MXFP4_BLOCK:
        raise _unfit(packing, f"input features in multiples of {MXFP4_BLOCK}", str(columns))
    blocks = columns // MXFP4_BLOCK
    return (PackedPart("blocks", (rows, blocks, MXFP4_BLOCK // 2), "U8"), PackedPart("scales", (rows, blocks), "U8"))


def _nvfp4(packing: Packing, rows: int, columns: int) -> tuple[PackedPart, ...]:
    if columns % NVFP4_BLOCK:
        raise _unfit(packing, f"input features in multiples of {NVFP4_BLOCK}", str(columns))
    return (
        PackedPart("weight_packed", (rows, columns // 2), "U8"),
        PackedPart("weight_scale", (rows, columns // NVFP4_BLOCK), "F8_E4M3"),
        PackedPart("weight_global_scale", (1,), "F32"),
        *_input_scale(packing, "input_global_scale", "F32"),
    )


_METHODS: dict[str, Callable[[Packing, int, int], tuple[PackedPart, ...]]] = {
    "awq": _awq,
    "gptq": _gptq,
    "pack-quantized": _pack_quantized,
    "int8": _int8,
    "fp8": _fp8,
    "nf4": _bitsandbytes_4bit,
    "fp4": _bitsandbytes_4bit,
    "bnb-int8": _bitsandbytes_int8,
    "mxfp4": _mxfp4,
    "nvfp4": _nvfp4,
}
METHODS = tuple(_METHODS)


def _input_scale(packing: Packing, name: str, layout: str) -> tuple[PackedPart, ...]:
    return (PackedPart(name, (1,), layout),) if packing.static_inputs else ()


def _words(packing: Packing, features: int, what: str) -> int:
    """32-bit words that hold so many integers side by side; three bits cross the borders of words."""
    _check_bits(packing, (2, 3, 4, 8) if packing.method == "gptq" else (4,))
    if features * packing.bits % WORD_BITS:
        raise _unfit(packing, f"{what} that fill whole {WORD_BITS}-bit words", f"{features} of {packing.bits} bits")
    return features * packing.bits // WORD_BITS


def _groups(packing: Packing, columns: int, *, whole: bool) -> int:
    size = columns if packing.group_size == -1 else packing.group_size
    if size < 1:
        raise _unfit(packing, "a group_size of at least 1, or -1 for whole rows", str(packing.group_size))
    if whole and columns % size:
        needed = f"input features in multiples of the group_size {size}"
        raise _unfit(packing, needed, str(columns), field="group_size")
    return -(-columns // size)


def _check_bits(packing: Packing, known: tuple[int, ...]) -> None:
    if packing.bits not in known:
        raise _unfit(packing, "bits of " + ", ".join(map(str, known)), str(packing.bits))


def _unfit(packing: Packing, needed: str, found: str, *, field: str = "quantization_config") -> CheckpointError:
    return CheckpointError(
        f"{field} does not fit: {packing.method} stores no matrix of this shape so",
        needed=needed,
        found=found,
        field=field,
    )
