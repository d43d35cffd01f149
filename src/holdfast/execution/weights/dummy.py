"""Weights out of nothing: seeded per tensor name, different in every layer, scaled so that logits have spread."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

import torch

from holdfast.execution.device import tile_elements
from holdfast.execution.weights.scaled_matrix import ScaledMatrix
from holdfast.models import TensorSpec

_LOGIT_SPREAD = 3.0
"""Standard deviation of logits: a greedy choice is clear, a sampled one varied."""
_LARGEST: Mapping[str, float] = {"int4": 8, "int8": 128, "fp8": 448, "nf4": 1, "mxfp4": 6}
"""Of what a code stands for."""
_STATIC_INPUTS: Mapping[str, float] = {"fp8": 16 / 448, "int8": 16 / 127}
_TILE_ELEMENTS = 1 << 20


def fill_dummy(target: torch.Tensor, tensor: TensorSpec, *, tied: bool) -> None:
    """In place and on the tensor's own device; the same name and shape give the same numbers."""
    generator = _generator(tensor.name, target.device)
    kind = tensor.name.rpartition(".")[2]
    if kind.endswith("norm"):
        target.uniform_(0.8, 1.2, generator=generator)
        return
    if len(tensor.shape) == 1:
        target.uniform_(-0.1, 0.1, generator=generator)
        return
    # Norms feed unit-size vectors to every product; 1/sqrt(inputs) keeps its outputs of that size too, and the
    # embedding so small that what the layers add decides the logits.
    deviation = tensor.shape[-1] ** -0.5
    if kind == "head" or (kind == "embed" and tied):
        deviation *= _LOGIT_SPREAD
    reach = deviation * 3**0.5
    target.uniform_(-reach, reach, generator=generator)


def fill_dummy_codes(matrix: ScaledMatrix, first: int, tensor: TensorSpec, expert: int | None = None) -> None:
    """Rows first, first+1, ... of a quantized matrix, or of one expert's: random codes, and scales that give them the
    same spread. The order of columns is as it is, and inputs are divided by a scale that holds unit-size vectors."""
    layout, rows = matrix.layout, tensor.shape[-2]
    generator = _generator(f"{tensor.name}, expert {expert}", matrix.codes.device)
    reach = (3 / tensor.shape[-1]) ** 0.5
    step = max(1, tile_elements(_TILE_ELEMENTS, matrix.codes.device) // matrix.columns)
    for start in range(first, first + rows, step):
        tile = matrix.codes[start : min(start + step, first + rows)]
        if layout.codes == "fp8":
            tile.copy_(torch.empty(tile.shape, device=tile.device).uniform_(-448, 448, generator=generator))
            continue
        codes = tile.view(torch.uint8).random_(0, 256, generator=generator)
        if layout.codes == "int4":
            # Codes from 1 to 15 about 8: were they less on the average, all tokens would become alike layer by layer.
            codes |= (codes & 0x0F == 0).to(torch.uint8) << 3
            codes |= (codes & 0xF0 == 0).to(torch.uint8) << 7
    high = layout.group_rows
    scales = matrix.scales[first // high : -(-(first + rows) // high)]
    if layout.scales == "uint8":
        scales.fill_(127 + round(math.log2(reach / _LARGEST[layout.codes])))
    else:
        scales.fill_(reach / _LARGEST[layout.codes])
    if matrix.zeros is not None:
        matrix.zeros[first // high : -(-(first + rows) // high)] = 8 if layout.codes == "int4" else 0
    if matrix.order is not None:
        matrix.order.copy_(torch.arange(matrix.columns, dtype=torch.int32))
    if matrix.inputs is not None and not layout.divided_inputs:
        matrix.inputs.fill_(_STATIC_INPUTS[layout.inputs])


def _generator(name: str, device: torch.device) -> torch.Generator:
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1
    if device.type == "cpu":
        # A new one would need what an engine process leaves out of torch's import (engine/startup/preload_torch.py).
        return torch.default_generator.clone_state().manual_seed(seed)
    return torch.Generator(device=device).manual_seed(seed)
