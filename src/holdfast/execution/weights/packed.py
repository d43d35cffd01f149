"""Matrices of quantized checkpoints, unpacked: what AWQ, GPTQ, compressed-tensors, FP8, bitsandbytes and MXFP4 store
becomes rows of a `ScaledMatrix`, or numbers.

    awq             words hold eight outputs of one input, at nibbles 0, 4, 1, 5, 2, 6, 3, 7
    gptq            words hold eight (four) inputs of one output; zero points less one in its first format
    pack-quantized  words hold eight (four) inputs of one output; zero points of eight (four) outputs
    nf4             bytes hold two inputs, the first in the upper half; blocks run over the rows
    mxfp4           bytes hold two inputs, the first in the lower half

Works on the device that the matrix is for, in slices of rows: beside the stored bytes of one matrix a tile of
TILE_ELEMENTS codes is held, or some times as many on a GPU. On a CPU a compiled kernel turns AWQ's words without tiles.
What files say wrongly is refused with the tensor's name. Opens no files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from math import lcm
from typing import Any

import torch

from holdfast.checkpoints import Checkpoint, Packing, StoredTensor
from holdfast.checkpoints.formats.quantized_tensors import BNB_BLOCK
from holdfast.errors import CheckpointError
from holdfast.execution.device import tile_elements
from holdfast.execution.native import turn_awq, turns_awq
from holdfast.execution.weights.scaled_matrix import INT4_ZERO, NF4_VALUES, ScaledMatrix
from holdfast.footprint.scaled_layouts import PIECE, ScaledLayout
from holdfast.models import ModelSpec
from holdfast.units import shorten

TILE_ELEMENTS = 1 << 20
"""Of codes that are unpacked at a time."""
_MIDDLE = 128
"""Unsigned eight-bit codes less this are int8's."""
_E8M0_NAN = 255
_MAX_STATE_BYTES = 1 << 16
_ROWS_IN_ORDER = 0
"""bitsandbytes' weight_format of 8 bits: the others are tiled for one generation of GPUs."""
_FIX = "download the model again, or use another quantization of it"

Read = Callable[[StoredTensor], torch.Tensor]
"""A stored tensor in its own type and shape, on the device of the matrix."""


class PackedSource:
    """One matrix [rows, columns] as a quantizer stored it. Holds the stored bytes until it is dropped."""

    def __init__(
        self,
        packing: Packing,
        parts: Mapping[str, StoredTensor],
        layout: ScaledLayout,
        rows: int,
        columns: int,
        read: Read,
    ) -> None:
        self.packing, self.layout, self.rows, self.columns = packing, layout, rows, columns
        self._parts, self._read = parts, read
        codes = next(iter(parts.values()))
        self.name = codes.name
        self._check_said()
        self._stored = read(codes)
        self.scales = self._scales()
        self.zeros = self._zeros()
        self.order = self._order()
        self.input_scale = self._input_scale()

    def fill(self, matrix: ScaledMatrix, first: int) -> None:
        """All rows, to rows first, first+1, ... of a matrix in this layout."""
        if self.packing.method == "awq" and self.order is None and turns_awq(self._stored):
            turn_awq(self._stored.contiguous(), matrix.codes[first : first + self.rows])
            self._fill_scales(matrix, first, 0, self.rows)
            return
        for start, last in self._tiles():
            self._fill(matrix, first + start, start, last)

    def expand(self, target: torch.Tensor) -> None:
        """All rows as numbers into `target` [rows, columns]."""
        for start, last in self._tiles():
            tile = ScaledMatrix(self.layout, last - start, self.columns, self._stored.device)
            self._fill(tile, 0, start, last)
            tile.dequantize(0, last - start, target[start:last])

    def _tiles(self) -> list[tuple[int, int]]:
        whole = lcm(8, self.layout.group_rows)
        step = max(1, tile_elements(TILE_ELEMENTS, self._stored.device) // (self.columns * whole)) * whole
        return [(start, min(start + step, self.rows)) for start in range(0, self.rows, step)]

    def _fill(self, matrix: ScaledMatrix, to: int, start: int, last: int) -> None:
        codes = self._codes(start, last)
        matrix.fill_codes(to, codes if self.order is None else codes.index_select(1, self.order))
        self._fill_scales(matrix, to, start, last)

    def _fill_scales(self, matrix: ScaledMatrix, to: int, start: int, last: int) -> None:
        """Of rows start..last-1, and whatever else there is beside codes."""
        high = self.layout.group_rows
        groups = slice(to // high, -(-(to + last - start) // high))
        stored = slice(start // high, -(-last // high))
        matrix.scales[groups] = self.scales[stored]
        if matrix.zeros is not None and self.zeros is not None:
            matrix.zeros[groups] = self.zeros[stored]
        if matrix.order is not None and self.order is not None:
            matrix.fill_order(to, self.order)
        if matrix.inputs is not None and self.input_scale is not None:
            # Matrices that are multiplied as one round their inputs once: with the largest scale, as vLLM does.
            matrix.inputs.clamp_(min=self.input_scale)

    # Codes

    def _codes(self, start: int, last: int) -> torch.Tensor:
        """[last-start, columns] as `ScaledMatrix.fill_codes` takes them."""
        method, bits, stored = self.packing.method, self.packing.bits, self._stored
        if method == "awq":
            return _awq_rows(stored[:, start // 8 : -(-last // 8)].contiguous())[: last - start]
        if method == "gptq":
            return _integers(stored[:, start:last].t().contiguous(), bits)
        if method == "pack-quantized":
            return _integers(stored[start:last].contiguous(), bits)
        if method == "nf4":
            packed = stored.view(self.rows, -1)[start:last]
            return torch.stack((packed >> 4, packed & 15), -1).view(last - start, self.columns)
        if method == "mxfp4":
            return _nibbles(stored.view(self.rows, -1)[start:last])
        codes = stored[start:last]
        if codes.dtype == torch.float8_e4m3fn and bool(((codes.view(torch.uint8) & 127) == 127).any()):
            raise self._broken(self.name, "numbers", "NaN among the weights")
        return codes

    def _check_said(self) -> None:
        """Parts that nothing is computed with must say what quantization_config and shapes do."""
        shape = self._parts.get("weight_shape")
        if shape is not None:
            found = self._read(shape).view(-1).tolist()
            if found != [self.rows, self.columns]:
                raise self._broken(shape.name, f"[{self.rows}, {self.columns}]", found)
        order = self._parts.get("weight_format")
        if order is not None and int(self._read(order).view(-1)[0]) != _ROWS_IN_ORDER:
            raise self._broken(order.name, f"{_ROWS_IN_ORDER}, rows one after another", int(self._read(order)))
        bound = self._parts.get("input_scale_ub")
        if bound is not None:
            most, said = self._read(bound).view(-1)[0].cpu(), self.packing.input_bound
            if float(most) != float(torch.tensor(said).to(most.dtype)):
                raise self._broken(bound.name, f"{said:g}, as activation_scale_ub says", f"{float(most):g}")
        inputs = self._parts.get("input_zero_point")
        if inputs is not None and bool(self._read(inputs).float().any()):
            raise self._broken(inputs.name, "zero, as symmetric inputs have it", "a zero point of the inputs")

    # Scales

    def _scales(self) -> torch.Tensor:
        """[rows / group_rows, groups], as the matrix has them."""
        if self.packing.method == "nf4":
            return self._absmax().view(self.rows, -1)
        names = ("scales", "weight_scale", "SCB")
        part = next(self._parts[name] for name in names if name in self._parts)
        stored = self._read(part)
        if self.packing.method == "mxfp4":
            return self._exponents(part, stored).view(self.rows, -1)
        if stored.dtype == torch.uint8:
            stored = torch.exp2(self._exponents(part, stored).float() - 127)
        self._require_finite(part, stored)
        if self.packing.method in ("awq", "gptq"):
            return stored.view(-1, self.rows).t()
        if self.packing.method == "bnb-int8":
            return stored.view(self.rows, 1).float() / 127
        if stored.numel() == 1:
            return stored.view(1, 1).expand(-(-self.rows // self.layout.group_rows), self._groups)
        if self.packing.granularity == "block" and self.layout.group_rows == 1:
            blocks = stored.view(-(-self.rows // self.packing.block[0]), -1)
            return blocks.repeat_interleave(self.packing.block[0], 0)[: self.rows]
        return stored.view(-1, self._groups)

    def _exponents(self, part: StoredTensor, stored: torch.Tensor) -> torch.Tensor:
        if bool((stored == _E8M0_NAN).any()):
            raise self._broken(part.name, "powers of two, 0 to 254", f"{_E8M0_NAN}, which is no number")
        return stored

    @property
    def _groups(self) -> int:
        return -(-self.columns // (self.layout.group or self.columns))

    def _absmax(self) -> torch.Tensor:
        """bitsandbytes' scales; where they are quantized themselves, undone to float32."""
        part, state = self._parts["weight.absmax"], self._state()
        stored = self._read(part).view(-1)
        table = self._parts.get("weight.quant_map")
        if table is not None and self._read(table).view(-1).tolist() != torch.tensor(NF4_VALUES).tolist():
            raise self._broken(table.name, "the sixteen values of NF4", "others")
        if not self.packing.nested:
            self._require_finite(part, stored)
            return stored.float()
        nested, nested_table = self._parts["weight.nested_absmax"], self._parts["weight.nested_quant_map"]
        scales, values = self._read(nested).view(-1), self._read(nested_table).view(-1).float()
        self._require_finite(nested, scales)
        self._require_finite(nested_table, values)
        size, offset = state.get("nested_blocksize"), state.get("nested_offset")
        if not isinstance(size, int) or size < 1 or -(-len(stored) // size) != len(scales):
            raise self._broken(nested.name, f"one for every {size} of {len(stored)} scales", f"{len(scales)}")
        if isinstance(offset, bool) or not isinstance(offset, int | float) or not abs(offset) < 1e30:
            raise self._broken(self._state_part.name, "a nested_offset", shorten(offset))
        return values[stored.int()] * scales.float().repeat_interleave(size)[: len(stored)] + offset

    @property
    def _state_part(self) -> StoredTensor:
        return next(part for name, part in self._parts.items() if "quant_state" in name)

    def _state(self) -> dict[str, Any]:
        part = self._state_part
        try:
            if part.nbytes > _MAX_STATE_BYTES:
                raise ValueError(f"{part.nbytes} bytes")
            state = json.loads(bytes(self._read(part).cpu().tolist()))
        except (ValueError, RecursionError) as error:
            raise self._broken(part.name, "a JSON text", shorten(error)) from error
        found = (
            {name: state.get(name) for name in ("quant_type", "blocksize", "shape")} if isinstance(state, dict) else {}
        )
        if found != {"quant_type": "nf4", "blocksize": BNB_BLOCK, "shape": [self.rows, self.columns]}:
            needed = f"quant_type nf4, blocksize {BNB_BLOCK}, shape [{self.rows}, {self.columns}]"
            raise self._broken(part.name, needed, shorten(found, 120))
        return dict(state)

    def _require_finite(self, part: StoredTensor, scales: torch.Tensor) -> None:
        if not bool(torch.isfinite(scales.float()).all()):
            raise self._broken(part.name, "finite scales", "NaN or infinity")

    # Zero points

    def _zeros(self) -> torch.Tensor | None:
        """As many as scales, for codes as they lie in memory; checked where the layout has none."""
        name = "qzeros" if "qzeros" in self._parts else "weight_zero_point"
        part = self._parts.get(name)
        if part is None:
            return None
        stored, method, bits = self._read(part), self.packing.method, self.packing.bits
        if method in ("int8", "fp8"):
            if self.layout.zeros:
                return stored.view(-1, self._groups).expand(self.rows, self._groups)
            if bool(stored.float().any()):
                raise self._broken(part.name, "zero points of 0, as symmetric says", "others")
            return None
        if method == "awq":
            zeros = _awq_rows(stored)
        elif method == "gptq":
            zeros = _integers(stored, bits).t()
        else:
            zeros = _integers(stored.t().contiguous(), bits).t()[: self.rows]
        if method == "gptq" and self.packing.zeros_less_one:
            if bool((zeros == (15 if bits == 4 else 127)).any()):
                # Some readers take it for 0, and others for one more than there are codes.
                raise self._broken(part.name, f"zero points less one, below {2**bits - 1}", f"{2**bits - 1}")
            zeros = zeros + 1
        if self.layout.zeros:
            return zeros
        middle = INT4_ZERO if bits == 4 else 0
        if bool((zeros != middle).any()):
            raise self._broken(part.name, "zero points in the middle of the codes, as sym (symmetric) says", "others")
        return None

    # Order and inputs

    def _order(self) -> torch.Tensor | None:
        """Which input each column takes, columns of a group side by side."""
        part = order_part(self._parts)
        if part is None:
            return None
        size = self.layout.group or self.columns
        index = self._read(part).view(-1).long()
        if not self.packing.act_order:
            runs = torch.arange(self.columns, device=index.device) // size
            if not bool((index == runs).all()):
                raise self._broken(
                    part.name, f"groups of {size} columns in order, as quantization_config says", "others"
                )
            return None
        return column_order(part.name, index, size)

    def _input_scale(self) -> float | None:
        part = self._parts.get("input_scale")
        if part is None or not self.layout.static_inputs:
            return None
        scale = float(self._read(part).float().max())
        if not 0 < scale < float("inf"):
            raise self._broken(part.name, "a positive number", f"{scale:g}")
        return scale

    def _broken(self, name: str, needed: str, found: object) -> CheckpointError:
        return _broken(name, needed, found)


def fill_mxfp4(matrix: ScaledMatrix, first: int, stored: torch.Tensor, name: str) -> None:
    """Rows of GGUF's MXFP4 [rows, bytes] to rows first, first+1, ...: of every 32 elements the scale, then the codes of
    elements i and i + 16 in the halves of a byte, as they lie in memory too. `name`: of the tensor."""
    require_mxfp4_scales(stored, name)
    blocks, rows = stored.view(len(stored), -1, 1 + PIECE // 2), slice(first, first + len(stored))
    matrix.scales[rows] = blocks[..., 0]
    matrix.codes[rows] = blocks[..., 1:]


def require_mxfp4_scales(stored: torch.Tensor, name: str) -> None:
    """Of GGUF's MXFP4, whichever way it is then read: expanded, a scale that is no number would spoil all answers."""
    if bool((stored.view(-1, 1 + PIECE // 2)[:, 0] == _E8M0_NAN).any()):
        raise _broken(name, "powers of two, 0 to 254, as scales", f"{_E8M0_NAN}, which is no number")


def biases_of(spec: ModelSpec) -> set[str]:
    """Those that are read, by the checkpoint's names."""
    return {tensor.hf_name for tensor in spec.tensors if tensor.hf_name.endswith("bias")}


def require_no_bias(codes: StoredTensor, checkpoint: Checkpoint, known: set[str]) -> None:
    """Beside a quantized matrix, but for `known` ones and zeros, which some tools write to all matrices: it would be
    left out. What was found to be zero becomes known."""
    stack = codes.name.removesuffix("_blocks")
    name = f"{codes.name.rpartition('.')[0]}.bias" if stack == codes.name else f"{stack}_bias"
    if name not in checkpoint.tensors or name in known:
        return
    if checkpoint.read(name).any():
        raise _broken(name, "no bias, or zeros: config.json describes a model without one there", "other numbers")
    known.add(name)


def order_part(parts: Mapping[str, StoredTensor]) -> StoredTensor | None:
    """The one that says to which group each column belongs."""
    return parts.get("g_idx") or parts.get("weight_g_idx")


def column_order(name: str, index: torch.Tensor, size: int) -> torch.Tensor:
    """Which input each column takes, columns of a group side by side: of the group that each input belongs to, `size`
    to a group. `name`: of the tensor that says so."""
    groups = len(index) // size
    if not 0 <= int(index.min()) <= int(index.max()) < groups:
        raise _broken(name, f"groups from 0 to {groups - 1}", f"{int(index.min())} to {int(index.max())}")
    counts = torch.bincount(index, minlength=groups)
    if not bool((counts == size).all()):
        raise _broken(name, f"{size} columns in every group", f"{int(counts.min())} to {int(counts.max())}")
    return index.argsort(stable=True)


def _broken(name: str, needed: str, found: object) -> CheckpointError:
    return CheckpointError(
        f"tensor {name!r} of a quantized matrix cannot be used", needed=needed, found=str(found), fix=_FIX
    )


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Four-bit codes of contiguous words or bytes [n, k], the lowest first: uint8 [n, codes]."""
    halves = packed.view(torch.uint8)
    return torch.stack((halves & 15, halves >> 4), -1).view(len(packed), -1)


def _awq_rows(packed: torch.Tensor) -> torch.Tensor:
    """Codes of contiguous words [k, n], a word eight outputs of one input: uint8 [outputs, k], contiguous. Even
    outputs lie in a word's lower half and odd ones in its upper."""
    inputs, words = packed.shape
    return _nibbles(packed).view(inputs, words, 2, 4).permute(1, 3, 2, 0).reshape(8 * words, inputs)


def _integers(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of contiguous words [n, k]: uint8 of four bits, or int8 about zero."""
    if bits == 4:
        return _nibbles(packed)
    return (packed.view(torch.uint8) ^ _MIDDLE).view(torch.int8)
