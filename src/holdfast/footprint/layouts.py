"""How each tensor lies in memory: declared here once, counted by the planner, allocated by execution."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from holdfast.checkpoints import LAYOUTS, Packing, StoredTensor, packing_of, stored_parts
from holdfast.checkpoints.formats.quantized_tensors import BNB_BLOCK, MXFP4_BLOCK
from holdfast.checkpoints.validation.stored_dtypes import PLAIN
from holdfast.errors import CheckpointError
from holdfast.footprint.scaled_layouts import PIECE, ScaledLayout
from holdfast.models import QuantSpec, TensorSpec

BLOCK_COLUMNS = 32
"""Compiled products read rows in pieces of this many elements."""
Quantize = Literal["fp8", "int4"]
"""What plain matrices of linear layers can be quantized to while they are loaded."""
INT4_GROUPS = (128, 64, 32)
"""Columns of a group when weights are quantized while loading: the first that divides a row."""
_SCALES = ("scales", "weight_scale")
"""Parts whose type is that of the scales in memory; others become float32."""


def is_quantized(layout: str) -> bool:
    return LAYOUTS[layout].block_elements > 1


def memory_layout(
    tensor: TensorSpec,
    stored: StoredTensor | None,
    *,
    dtype: str,
    expand: bool,
    compiled: bool,
    quantization: QuantSpec | None = None,
    quantize: Quantize | None = None,
) -> str | ScaledLayout:
    """`dtype`, or the layout of the checkpoint when the matrix is kept as it is stored.

    Quantized matrices are kept unless they are to be expanded; those whose inputs are rounded are kept in any case,
    for the rounding belongs to their product. With compiled products half-precision ones are kept too: those compute
    in float32 from either, and half the bytes are read. Vectors are small and always expanded.

    `stored` as `match` found it; None for dummies, which lie as `quantization`, that of the model, would have them.
    `quantize`: what plain matrices of linear layers become.
    """
    if tensor.wide:
        return "float32"
    matrix = len(tensor.shape) == 2 or tensor.experts > 0
    if not matrix:
        return dtype
    packing = stored.packed.packing if stored is not None and stored.packed is not None else None
    if stored is None and quantization is not None:
        packing = packing_of(quantization, tensor, dtype)
    if packing is not None:
        scaled = scaled_layout(packing, tensor, stored)
        return dtype if expand and scaled.inputs == "plain" else scaled
    if quantize is not None and (stored is None or stored.layout in PLAIN):
        made = quantized_layout(tensor, quantize)
        if made is not None:
            return made
    if stored is None or expand:
        return dtype
    if stored.layout == "MXFP4":
        # The same codes and scales as safetensors have them; rows of an embedding are looked up, which they are not.
        return dtype if tensor.name == "embed" else ScaledLayout(codes="mxfp4", scales="uint8", group=MXFP4_BLOCK)
    if is_quantized(stored.layout):
        return stored.layout
    if tensor.experts and quantization is not None:
        return dtype  # Beside stacks of codes, which compiled products do not read.
    # An expert's rows are another of its matrices' columns: a layer's experts are all read in pieces, or none is.
    in_pieces = all(extent % BLOCK_COLUMNS == 0 for extent in tensor.shape[1:])
    if compiled and stored.layout in ("F16", "BF16") and in_pieces:
        return stored.layout
    return dtype


def quantized_layout(tensor: TensorSpec, quantize: Quantize) -> ScaledLayout | None:
    """What a plain matrix becomes while it is loaded; None: it stays plain. Heads and embeddings do."""
    if not tensor.linear or tensor.name == "head":
        return None
    if quantize == "fp8":
        return _of_rank(ScaledLayout(codes="fp8", inputs="fp8"), tensor)
    columns = tensor.shape[-1] if tensor.piece is None else tensor.piece.whole[-1]  # All ranks have the same groups.
    group = next((size for size in INT4_GROUPS if columns % size == 0), None)
    return None if group is None else ScaledLayout(codes="int4", scales="float16", group=group)


def scaled_layout(packing: Packing, tensor: TensorSpec, stored: StoredTensor | None = None) -> ScaledLayout:
    """How a matrix that was packed so lies in memory. `stored` tells the type of its scales; None: the usual one.
    Raises CheckpointError, with the tensor's name, for shapes that cannot lie so."""
    rows, columns = tensor.shape[-2:]
    found = _layout(packing, _scale_type(packing, stored, rows, columns))
    if found.group_rows > 1 and tensor.experts and rows % found.group_rows:
        # An expert's rows begin within a square block of the stack: every row gets the scales of its block.
        found = replace(found, group_rows=1)
    if takes_rows_in_order(tensor):
        found = replace(found, ordered=False)
    found = _of_rank(found, tensor)
    whole = PIECE if found.four_bits else 1
    unfit = next((size for size in (whole, found.group, found.input_group) if size and columns % size), None)
    if unfit is not None:
        name = tensor.hf_name if stored is None else stored.name
        raise CheckpointError(
            f"the quantized matrix {name} cannot be kept in memory as {found}",
            needed=f"a multiple of {unfit} columns",
            found=f"{list(tensor.shape)}",
            fix="use another quantization of this model, such as AWQ, FP8 or a GGUF file",
            field="quantization_config",
        )
    return found


def _of_rank(layout: ScaledLayout, tensor: TensorSpec) -> ScaledLayout:
    """Where it has some of a matrix's columns, the scale of a row of inputs is not its own, and columns in an order of
    their own take inputs of others. Groups are never cut."""
    columns = tensor.cut is not None and tensor.cut.axis == len(tensor.cut.whole) - 1
    if columns and layout.ordered:
        layout = replace(layout, gathered_inputs=True)
    if not columns or layout.inputs == "plain" or layout.static_inputs or layout.input_group:
        return layout
    return replace(layout, static_inputs=True, divided_inputs=True)


def takes_rows_in_order(tensor: TensorSpec) -> bool:
    """Whether it needs no order of its columns, where a quantizer gave it one: what comes into an expert's last matrix
    are the rows of its first ones, which are put into that order while they are loaded."""
    return tensor.experts > 0 and tensor.name.endswith(".experts.down")


def _layout(packing: Packing, scales: Literal["float32", "float16", "bfloat16"]) -> ScaledLayout:
    group = max(packing.group_size, 0)
    if packing.method in ("awq", "gptq", "pack-quantized"):
        return ScaledLayout(
            codes="int4" if packing.bits == 4 else "int8",
            scales=scales,
            group=group,
            zeros=not packing.symmetric,
            ordered=packing.act_order,
        )
    if packing.method in ("nf4", "bnb-int8"):
        four = packing.method == "nf4"
        return ScaledLayout(codes="nf4" if four else "int8", group=BNB_BLOCK if four else 0)
    if packing.method == "mxfp4":
        return ScaledLayout(codes="mxfp4", scales="uint8", group=MXFP4_BLOCK)
    block = packing.block if packing.granularity == "block" else (1, group if packing.granularity == "group" else 0)
    return ScaledLayout(
        codes="int8" if packing.method == "int8" else "fp8",
        # Kernels that multiply codes with codes take float32; there are few of them.
        scales=scales if packing.inputs == "plain" else "float32",
        group=block[1],
        group_rows=block[0],
        zeros=not packing.symmetric,
        ordered=packing.act_order,
        inputs=packing.inputs,
        static_inputs=packing.inputs != "plain" and packing.static_inputs,
        input_group=packing.input_group,
        input_bound=packing.input_bound,
        input_powers=packing.input_powers and not packing.static_inputs,
    )


def _scale_type(
    packing: Packing, stored: StoredTensor | None, rows: int, columns: int
) -> Literal["float32", "float16", "bfloat16"]:
    if stored is not None and stored.packed is not None:
        found = {name: part.layout for name, part in stored.packed.parts.items()}
    else:
        found = {part.name.removesuffix("_inv"): part.layout for part in stored_parts(packing, rows, columns)}
    layout = next((found[name] for name in _SCALES if name in found), "F32")
    return PLAIN.get(layout, "float32")  # type: ignore[return-value]
