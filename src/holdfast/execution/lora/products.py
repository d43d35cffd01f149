"""LoRA adapters beside the base products of a CPU: all adapters of a batch in two grouped products a matrix.

Rows are sorted by the place of their adapter, once a step; rows without one are never touched, and the base product is
what it is without adapters. Knows places, and neither names nor files (see `lora_places`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy
import numpy.typing
import torch
from torch.nn import functional

from holdfast.execution.layers.experts import ExpertWeights
from holdfast.execution.layers.linear import Linear
from holdfast.execution.weights.decoder_weights import GatedWeights, LayerWeights, MlpWeights, PlainWeights

Places = numpy.typing.NDArray[numpy.int32]
"""Of each row, the place of its adapter; -1: it has none."""


@dataclass(frozen=True, slots=True)
class SiteFactors:
    """Views of all places for one product."""

    a: torch.Tensor
    """[places, parts · rank, columns]"""
    b: torch.Tensor
    """[places, rows of all parts, rank]"""
    rows: tuple[int, ...]
    """Of each part."""
    used: set[int]
    """Places whose adapter changes this product; follows what is in them."""
    changes: torch.Tensor
    """int32 [places], not contiguous: 1 for these places, on the device. For kernels that cannot know otherwise."""


@dataclass(frozen=True, slots=True)
class AdaptedRows:
    order: torch.Tensor
    """int64: rows that have an adapter, by its place."""
    ends: torch.Tensor
    """int32 [places]: where the rows of each place end in `order`."""
    present: tuple[int, ...]
    """Places that have rows."""
    every: bool
    """All rows of the product have an adapter, and stand in order."""


class PlacedRows:
    """The places of a tensor's rows; valid for the step it was made for."""

    def __init__(self, places: Places, count: int) -> None:
        self._places, self._count = places, count
        self._parts: dict[tuple[int, int], AdaptedRows | None] = {}

    @staticmethod
    def of(places: Places, count: int) -> PlacedRows | None:
        """None where no row has an adapter. `count`: places there are."""
        return PlacedRows(places, count) if (places >= 0).any() else None

    def chosen(self, rows: numpy.typing.NDArray[numpy.int64]) -> PlacedRows | None:
        return PlacedRows.of(self._places[rows], self._count)

    def part(self, first: int, count: int) -> AdaptedRows | None:
        """Of rows first .. first+count-1, counted from `first`."""
        key = first, count
        if key not in self._parts:
            self._parts[key] = self._sorted(self._places[first : first + count])
        return self._parts[key]

    def _sorted(self, places: Places) -> AdaptedRows | None:
        adapted = numpy.flatnonzero(places >= 0)
        if not len(adapted):
            return None
        order = adapted[numpy.argsort(places[adapted], kind="stable")]
        ends = numpy.cumsum(numpy.bincount(places[adapted], minlength=self._count)).astype(numpy.int32)
        present = tuple(numpy.unique(places[adapted]).tolist())
        every = len(order) == len(places) and bool((numpy.diff(order) > 0).all())
        return AdaptedRows(torch.from_numpy(order), torch.from_numpy(ends), present, every)


class Current:
    """Which rows the product that is computed next has. Set by the decoder, read by every `AdaptedLinear`."""

    rows: AdaptedRows | None = None


class AdaptedLinear:
    """A product, and what adapters add to some of its rows."""

    def __init__(self, base: Linear, factors: SiteFactors, current: Current) -> None:
        self.base, self.rows, self.columns = base, base.rows, base.columns
        self._current, self._rank, self._used = current, factors.b.shape[2], factors.used
        self._a = factors.a.transpose(1, 2)
        self._b = [part.transpose(1, 2) for part in torch.split(factors.b, list(factors.rows), dim=1)]
        self._a_at, self._b_at = self._a.unbind(0), [part.unbind(0) for part in self._b]

    @property
    def nbytes(self) -> int:
        return self.base.nbytes

    def write(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self.base.write(x, out)
        self._adapt(x, out)

    def add(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self.base.add(x, out)
        self._adapt(x, out)

    def _adapt(self, x: torch.Tensor, out: torch.Tensor) -> None:
        rows = self._current.rows
        if rows is None or self._used.isdisjoint(rows.present):
            return
        lines = x if rows.every else x.index_select(0, rows.order)
        alone = rows.present[0] if len(rows.present) == 1 else None  # Plain products are faster then.
        inner = functional.grouped_mm(lines, self._a, offs=rows.ends) if alone is None else lines @ self._a_at[alone]
        first = 0
        for part, b in enumerate(self._b):
            read = inner[:, part * self._rank : (part + 1) * self._rank]
            target = out[:, first : first + b.shape[2]]
            first += b.shape[2]
            if alone is not None and rows.every:
                target.addmm_(read, self._b_at[part][alone])
                continue
            added = functional.grouped_mm(read, b, offs=rows.ends) if alone is None else read @ self._b_at[part][alone]
            target.index_add_(0, rows.order, added)


def adapt_layers(
    layers: Sequence[LayerWeights], factors: Mapping[tuple[int, str], SiteFactors], current: Current
) -> tuple[LayerWeights, ...]:
    """The same layers with adapters beside their products; `factors` by layer and product."""

    def adapted(layer: int, product: str, base: Linear) -> Linear:
        found = factors.get((layer, product))
        return base if found is None else AdaptedLinear(base, found, current)

    def mlp(layer: int, part: MlpWeights) -> MlpWeights:
        if isinstance(part, GatedWeights):
            return GatedWeights(adapted(layer, "gate_up", part.gate_up), adapted(layer, "down", part.down))
        if isinstance(part, PlainWeights):
            return PlainWeights(adapted(layer, "up", part.up), adapted(layer, "down", part.down))
        assert isinstance(part, ExpertWeights), "other MLPs have no site"
        return part

    return tuple(
        replace(
            layer,
            qkv=adapted(index, "qkv", layer.qkv),
            o=adapted(index, "o", layer.o),
            mlp=mlp(index, layer.mlp),
        )
        for index, layer in enumerate(layers)
    )
