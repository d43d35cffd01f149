"""LoRA adapters on a GPU: places that never move, which rows of a step are whose, and products beside the base ones.

A step's tiles are sent before it is launched, steps of single tokens always to the same addresses: graphs are captured
with adapters and without. Rows without one are computed as they are without adapters.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import numpy.typing
import torch

from holdfast.execution.batch import RunnerLimits
from holdfast.execution.gpu.layers.linear import GpuLinear
from holdfast.execution.gpu.memory.pinned_staging import PacketRing, Words
from holdfast.execution.lora.products import SiteFactors
from holdfast.execution.lora.slots import AdapterPlaces, LoraLimits
from holdfast.execution.ops.interface import Activation
from holdfast.execution.triton_kernels import layer as kernels
from holdfast.execution.triton_kernels.lora import LoraTiles, add_adapters
from holdfast.footprint.gpu import whole_lines
from holdfast.footprint.lora import TILE_ROWS, inner_elements, most_tiles, packet_words
from holdfast.models import ModelSpec
from holdfast.records import Row


class GpuAdapters:
    """`whole`: the model, where `spec` is one rank's part of it."""

    def __init__(
        self,
        spec: ModelSpec,
        lora: LoraLimits,
        limits: RunnerLimits,
        dtype: torch.dtype,
        device: torch.device,
        whole: ModelSpec | None = None,
    ) -> None:
        self.places = AdapterPlaces(spec, lora, dtype, device, whole)
        self._count, self._rows = lora.max_loras, limits.max_num_seqs
        self._factors = self.places.factors()
        tokens = limits.max_num_batched_tokens
        self.inner = torch.empty(inner_elements(spec, tokens, lora.max_rank), dtype=torch.float32, device=device)
        self._decode = PacketRing(packet_words(self._rows), device)
        self._mixed = PacketRing(packet_words(tokens), device)
        self.tiles: LoraTiles | None = None
        """Of the step that is launched next; None: no row of it has an adapter."""
        self._present: frozenset[int] | None = None
        """Places of its rows; None: any, because it may be captured."""

    @property
    def nbytes(self) -> int:
        """On the device."""
        return self.places.places.nbytes + self.inner.nbytes + self._decode.nbytes + self._mixed.nbytes

    def beside(self, layer: int, product: str, base: GpuLinear) -> GpuLinear:
        factors = self._factors.get((layer, product))
        return base if factors is None else AdaptedGpuLinear(base, factors, self)

    def send_decode(self, rows: Sequence[Row], places: Words, size: int) -> bool:
        """Before a step of single tokens that is padded to `size` rows. Says whether any has an adapter."""
        found = _tiles(places[[row.slot for row in rows]], self._count)
        if found is None:
            return False
        order, *tiles = found
        most = most_tiles(size, self._count)
        padded = [numpy.pad(tile, (0, most - len(tile)), constant_values=-1) for tile in tiles]
        self._decode.send([numpy.pad(order, (0, size - len(order))), *padded], whole_lines(self._rows))
        return True

    def use_decode(self, size: int, *, adapted: bool) -> None:
        """The next launch is such a step; what was sent for it lies there, or will when a graph is replayed."""
        apart, most = whole_lines(self._rows), most_tiles(size, self._count)
        order, places, starts, ends = (
            self._decode.arrived[number * apart :][:count] for number, count in enumerate((size, most, most, most))
        )
        self.tiles = LoraTiles(order, places, starts, ends, size) if adapted else None
        self._present = None

    def tiles_for(self, factors: SiteFactors) -> LoraTiles | None:
        """None: no adapter of the step changes this product."""
        if self._present is not None and self._present.isdisjoint(factors.used):
            return None
        return self.tiles

    def use_mixed(self, rows: Sequence[Row], places: Words) -> None:
        """The next launch is a step of any rows, as `BatchBuilder.mixed` puts their tokens: single ones first."""
        counts = numpy.array([row.count for row in rows])
        order = numpy.argsort(counts > 1, kind="stable")
        slots = numpy.array([row.slot for row in rows])[order]
        found = _tiles(numpy.repeat(places[slots], counts[order]), self._count)
        if found is None:
            self.tiles = None
            return
        tokens, whose, starts, ends = self._mixed.send(found)
        self.tiles = LoraTiles(tokens, whose, starts, ends, int(counts.sum()))
        self._present = frozenset(found[1].tolist())

    def profile_decode(self, size: int) -> None:
        """All tiles that there may be, each with a row."""
        rows = [Row(slot, 0, 1, True) for slot in range(size)]
        self.send_decode(rows, numpy.arange(size, dtype=numpy.int32) % self._count, size)


def _tiles(places: Words, count: int) -> tuple[Words, Words, Words, Words] | None:
    """Rows in order, and of each tile its place, its start and its end; None: no row has an adapter."""
    adapted = numpy.flatnonzero(places >= 0)
    if not len(adapted):
        return None
    order = adapted[numpy.argsort(places[adapted], kind="stable")].astype(numpy.int32)
    lengths = numpy.bincount(places[adapted], minlength=count)
    ends = numpy.cumsum(lengths)
    each = -(-lengths // TILE_ROWS)
    whose = numpy.repeat(numpy.arange(count), each)
    number = numpy.arange(len(whose)) - numpy.repeat(numpy.cumsum(each) - each, each)
    starts = (ends - lengths)[whose] + number * TILE_ROWS
    stops = numpy.minimum(starts + TILE_ROWS, ends[whose])
    return order, whose.astype(numpy.int32), starts.astype(numpy.int32), stops.astype(numpy.int32)


class AdaptedGpuLinear:
    """A product, and what adapters add to some of its rows."""

    def __init__(self, base: GpuLinear, factors: SiteFactors, adapters: GpuAdapters) -> None:
        self._base, self._factors, self._adapters = base, factors, adapters

    @property
    def kind(self) -> tuple[object, ...]:
        return self._base.kind

    def write(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self._base.write(x, out)
        self._adapt(x, out)

    def add(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self._base.add(x, out)
        self._adapt(x, out)

    def write_normed(
        self, x: torch.Tensor, norm: torch.Tensor, epsilon: float, normed: torch.Tensor, out: torch.Tensor
    ) -> None:
        self._base.write_normed(x, norm, epsilon, normed, out)
        if self._adapters.tiles_for(self._factors) is not None:
            kernels.rms_norm(x, norm, epsilon, normed)  # The base product may have normed in its own kernel.
            self._adapt(normed, out)

    def gated(
        self,
        x: torch.Tensor,
        norm: torch.Tensor,
        epsilon: float,
        activation: Activation,
        normed: torch.Tensor,
        gate_up: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        if self._adapters.tiles_for(self._factors) is None:
            self._base.gated(x, norm, epsilon, activation, normed, gate_up, out)
            return
        self.write_normed(x, norm, epsilon, normed, gate_up)
        kernels.gate(gate_up, activation, out)

    def embed(self, tokens: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
        self._base.embed(tokens, slots, positions, out)

    def _adapt(self, x: torch.Tensor, out: torch.Tensor) -> None:
        factors = self._factors
        tiles = self._adapters.tiles_for(factors)
        if tiles is not None:
            add_adapters(x, factors.a, factors.b, factors.rows, factors.changes, tiles, self._adapters.inner, out)
