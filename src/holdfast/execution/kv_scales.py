"""How float8 pages hold keys and values: divided by a scale each, and keys without what all of them have in common.

    page = (key - center) / key scale        a center for every dimension of every head; two scales a layer
    page = value / value scale

A checkpoint may bring scales (`weights.kv_scales`). Otherwise both are calibrated once, before the first step: made-up
tokens run through the model with pages in its own number type, and what the pages then hold is measured.

Centers are never added back: q·center is the same for all keys of a query, and softmax does not see it. Some models
(Qwen2, Qwen2.5) have keys with constants of 100 and more beside signals of 1; a code of three bits of mantissa would
round the signal away. The constants stand in dimensions that positions hardly turn, and only those have a center.
Knows no device.
"""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from holdfast.errors import EngineError
from holdfast.execution.batch import RunnerLimits
from holdfast.execution.kv_pool import LARGEST
from holdfast.kvcache.groups import KVLayout
from holdfast.models import ModelSpec
from holdfast.records import Row, SamplingParams, SequenceStart, StepPlan, StepResult, TableWrite

SEQUENCES, TOKENS = 4, 64
"""Of the calibration: several, because the first token of a sequence is often the one with the largest keys."""
MARGIN = 2.0
"""How much larger than any that was seen keys and values may get before they are cut off. Positions alone turn a pair
of dimensions to 1.41 times the larger one. In a format with exponents a margin costs no precision, only range at the
small end: of the 28,672 times between the largest and the smallest normal number of e4m3 one bit is spent."""


@dataclass(frozen=True, slots=True)
class KVScales:
    """By layer."""

    keys: tuple[float, ...]
    values: tuple[float, ...]
    centers: tuple[torch.Tensor, ...] = ()
    """[kv heads · dim] each, float32, divided by the scale of keys already; none: pages hold whole keys."""

    @classmethod
    def ones(cls, layers: int) -> KVScales:
        return cls((1.0,) * layers, (1.0,) * layers)

    def widened(self, keys: Sequence[float], values: Sequence[float]) -> KVScales:
        """With these scales; centers mean the same keys as before."""
        centers = tuple(center * (old / new) for center, old, new in zip(self.centers, self.keys, keys, strict=False))
        return KVScales(tuple(keys), tuple(values), centers)

    def of(self, layer: int) -> tuple[float, float]:
        return self.keys[layer], self.values[layer]

    def center(self, layer: int) -> torch.Tensor | None:
        return self.centers[layer] if self.centers else None

    def digest_parts(self) -> Iterator[bytes]:
        """All that a page in float8 means another thing with."""
        yield struct.pack(f"<{2 * len(self.keys)}d", *self.keys, *self.values)
        for center in self.centers:
            yield center.float().cpu().numpy().tobytes()

    def described(self) -> str:
        return f"keys {_range(self.keys)}, values {_range(self.values)}"


def _range(scales: Sequence[float]) -> str:
    low, high = min(scales), max(scales)
    return f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"


class Executes(Protocol):
    def execute(self, plan: StepPlan) -> StepResult: ...


class Calibration:
    """The steps of one, and the scales that follow from the pages they filled. `blocks`: pages that it needs, the null
    page included."""

    def __init__(self, spec: ModelSpec, limits: RunnerLimits, layout: KVLayout) -> None:
        self._layout, self._limits = layout, limits
        # Where scores are capped, a constant in all of them is not without effect.
        self._centered = not spec.decoder.attention_softcap
        tokens = min(TOKENS, limits.max_model_len)
        each = layout.blocks_for(tokens)
        drawn = random.Random(0)  # The same after every start: an engine that is restarted goes on as it was.
        self._sequences = [[drawn.randrange(spec.vocab_size) for _ in range(tokens)] for _ in range(SEQUENCES)]
        first = 1
        self._tables: list[list[list[int]]] = []
        for _ in self._sequences:
            tables = []
            for _ in layout.groups:
                tables.append(list(range(first, first + each)))
                first += each
            self._tables.append(tables)
        self.blocks = first

    def run(self, runner: Executes) -> None:
        """One sequence after the other, in chunks as large as a step may be. Nothing is sampled."""
        step, params = self._limits.max_num_batched_tokens, SamplingParams(temperature=0.0)
        for tokens, tables in zip(self._sequences, self._tables, strict=True):
            for begin in range(0, len(tokens), step):
                starts, writes = [], []
                if begin == 0:
                    starts = [SequenceStart(0, "calibration", tokens, len(tokens), params)]
                    writes = [TableWrite(0, group, 0, blocks) for group, blocks in enumerate(tables)]
                row = Row(0, begin, min(step, len(tokens) - begin), False)
                runner.execute(StepPlan(step_id=0, starts=starts, table_writes=writes, rows=[row]))

    def scales(self, pages: torch.Tensor, dtype: torch.dtype, frequencies: Sequence[torch.Tensor]) -> KVScales:
        """`dtype`: the one that keys and values are to be kept in. `frequencies`: radians that a position turns each
        pair of dimensions by, of every layer."""
        keys, values, centers = dict[int, float](), dict[int, float](), dict[int, torch.Tensor]()
        tokens = len(self._sequences[0])
        for group in self._layout.groups:
            blocks = torch.tensor([tables[group.index] for tables in self._tables], device=pages.device)
            for place, layer in enumerate(group.layers):
                # [sequence, block, key or value, token, head, dim]: what stands behind the last token is left out.
                held = pages[blocks, place].float().transpose(1, 2).flatten(2, 3)[:, :, :tokens]
                center = self._center(held[:, 0].mean(dim=(0, 1)), frequencies[layer])
                away = (held[:, 0] - center).abs().amax(dim=(0, 1)) + self._turned(center, frequencies[layer])
                keys[layer] = _scale(float(away.max()), dtype, layer, "keys")
                values[layer] = _scale(float(held[:, 1].abs().max()), dtype, layer, "values")
                centers[layer] = (center / keys[layer]).flatten().contiguous()
        order = range(len(keys))
        return KVScales(
            tuple(keys[layer] for layer in order),
            tuple(values[layer] for layer in order),
            tuple(centers[layer] for layer in order) if self._centered else (),
        )

    def _center(self, mean: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        """`mean` [heads, dim] in dimensions that no position of the context turns by more than a radian, else 0. Turned
        further, a key would be farther from its center than from zero."""
        if not self._centered:
            return torch.zeros_like(mean)
        center, half = mean.clone(), len(frequencies)
        turned = frequencies * self._limits.max_model_len > 1.0
        center[:, :half][:, turned] = 0
        center[:, half : 2 * half][:, turned] = 0
        return center

    def _turned(self, center: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        """[heads, dim]: how far the last position of the context turns a center away from itself."""
        away, half = torch.zeros_like(center), len(frequencies)
        chord = 2 * torch.sin((frequencies * self._limits.max_model_len).clamp(max=1.0) / 2)
        away[:, :half] = torch.hypot(center[:, :half], center[:, half : 2 * half]) * chord
        away[:, half : 2 * half] = away[:, :half]
        return away


def _scale(most: float, dtype: torch.dtype, layer: int, what: str) -> float:
    """A power of two: scaling then rounds nothing, on any device and in any number type."""
    if not math.isfinite(most):
        raise EngineError(
            f"the {what} of layer {layer} are not finite: no scale can be found for them",
            needed="finite numbers in a run over made-up tokens",
            found=str(most),
            fix="check the weights; or run without --kv-cache-dtype",
        )
    return 2.0 ** math.ceil(math.log2(MARGIN * most / LARGEST[dtype])) if most > 0 else 1.0
