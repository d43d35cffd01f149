"""Quantized matrices as a GGUF file stores them, of every kind the engine reads, and what the gguf package reads from
them. The package writes few kinds itself; of the others every bit is drawn, and the scales are numbers of a sane size.
"""

from __future__ import annotations

import gguf
import numpy
import numpy.typing

Bytes = numpy.typing.NDArray[numpy.uint8]
Floats = numpy.typing.NDArray[numpy.float32]

OLD_KINDS = ("Q8_0", "Q4_0", "Q4_1")
NEW_KINDS = ("Q5_0", "Q5_1", "IQ4_NL", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
WRITTEN = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
"""Kinds that the package can quantize numbers to."""
_SCALES_AT = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2)} | {
    "Q6_K": (208,)
}
"""Bytes of a block's halves; others have one, at 0."""


def scales_at(kind: str) -> tuple[int, ...]:
    """Where a block's halves begin."""
    return _SCALES_AT.get(kind, (0,))


def block_shape(kind: str) -> tuple[int, int]:
    """(elements, bytes) of a block."""
    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]


def drawn(kind: str, rows: int, columns: int, seed: int, *, scale: float = 0.05) -> tuple[Bytes, Floats]:
    """Bytes [rows, bytes of a row] in which every code and small scale may stand, and their elements."""
    random = numpy.random.default_rng(seed)
    elements, size = block_shape(kind)
    blocks = random.integers(0, 256, (rows, columns // elements, size), dtype=numpy.uint8)
    for place in scales_at(kind):
        halves = (scale * random.standard_normal((rows, columns // elements, 1))).astype(numpy.float16)
        blocks[..., place : place + 2] = halves.view(numpy.uint8)
    raw = blocks.reshape(rows, -1)
    return raw, read(kind, raw)


def written(kind: str, rows: int, columns: int, seed: int) -> tuple[Bytes, Floats]:
    """Normal numbers, quantized by the package."""
    numbers = numpy.random.default_rng(seed).standard_normal((rows, columns)).astype(numpy.float32)
    raw = gguf.quants.quantize(numbers, gguf.GGMLQuantizationType[kind])
    return raw, read(kind, raw)


def read(kind: str, raw: Bytes) -> Floats:
    """As the package does."""
    return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind]).astype(numpy.float32)
