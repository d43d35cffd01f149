"""The files of a LoRA adapter as one flat row of numbers: both factors of every site, padded to one rank.

What B is multiplied by is folded into it. Of a model that several ranks have, a rank's row has what belongs to its part
of each matrix: of rows that is so much of B, of columns so much of A. A rank of another node than the head reads that
node's files, which must be the head's to the byte. Knows files and rows; not which row is whose, nor when one is read.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

import torch

from holdfast.checkpoints.checkpoint import Checkpoint
from holdfast.checkpoints.lora.adapter import Adapter, adaptable, changed, not_finite, read_adapter, stamp
from holdfast.checkpoints.lora.same_files import find_same
from holdfast.errors import AdapterError, CheckpointError
from holdfast.execution.weights.gguf_blocks import expand_into
from holdfast.footprint.lora import Site, place_elements, places_rank, sites
from holdfast.models import ModelSpec
from holdfast.models.spec import ShardPiece
from holdfast.records.lora import AdapterRef
from holdfast.units import shorten

log = logging.getLogger("holdfast")

Changes = frozenset[tuple[int, str]]
"""Layers and products that an adapter changes."""
Writing = Callable[[], contextlib.AbstractContextManager[None]]


class AdapterFiles:
    """`whole`: the model that the adapters are for, where `spec` is one rank's part of it. `elsewhere`: this is
    another node than the one whose files were looked at."""

    def __init__(
        self,
        spec: ModelSpec,
        max_rank: int,
        dtype: torch.dtype,
        whole: ModelSpec | None = None,
        *,
        elsewhere: bool = False,
    ) -> None:
        self._whole, self._max_rank, self._dtype = whole or spec, max_rank, dtype
        self._elsewhere = elsewhere
        self._pieces = {tensor.name: tensor.piece for tensor in adaptable(spec).values()}
        self._rank, self._sites = places_rank(max_rank), sites(spec)
        self.elements = place_elements(spec, max_rank)

    def read(self, ref: AdapterRef, target: torch.Tensor, writing: Writing = contextlib.nullcontext) -> Changes:
        """Fills `target` [elements]. Raises what is wrong with the files; the target then holds anything. May be called
        by any thread. `writing`: around each write to the target, and around nothing that reads files."""
        folder, stamped = self._find(ref)
        adapter = read_adapter(folder, self._whole, name=ref.name, model="the served model", max_rank=self._max_rank)
        if adapter.stamp != stamped:
            raise changed(ref.name)
        with torch.inference_mode():
            with writing():
                target.zero_()
            try:
                self._expand(adapter, target, writing)
            except CheckpointError as error:  # It says where the file lies, and may reach a client.
                raise changed(ref.name) from error
            if not torch.isfinite(target).all():
                raise not_finite(ref.name, str(self._dtype).removeprefix("torch."))
        if stamp(adapter.folder) != stamped:
            raise changed(ref.name)
        return frozenset(
            (site.layer, site.product) for site in self._sites if not adapter.factors.keys().isdisjoint(site.parts)
        )

    def _find(self, ref: AdapterRef) -> tuple[Path, str]:
        """Its folder on this node, and the stamp that its files have there."""
        if not self._elsewhere:
            return Path(ref.path), ref.stamp
        try:
            return find_same(ref.shared_path, ref.digest, ref.name)
        except AdapterError as error:  # Which names no folder: clients hear of it too.
            log.warning("LoRA adapter at %s: %s (%s)", shorten(ref.shared_path, 4096), error.message, error.found)
            raise

    def _expand(self, adapter: Adapter, target: torch.Tensor, writing: Writing) -> None:
        tensors = {one.name: one for factors in adapter.factors.values() for one in (factors.a, factors.b)}
        with Checkpoint(tensors, "safetensors") as checkpoint:

            def numbers(name: str) -> torch.Tensor:
                stored = tensors[name]
                wide = torch.empty(stored.shape, dtype=torch.float32)
                expand_into(wide, torch.from_numpy(checkpoint.read(name)), stored)
                return wide

            for site, a, b in self.views(target.unsqueeze(0)):
                first = 0
                for part, (name, rows) in enumerate(zip(site.parts, site.rows, strict=True)):
                    factors = adapter.factors.get(name)
                    if factors is not None:
                        inner = part * self._rank
                        read_a = _own(numbers(factors.a.name), 1, self._pieces[name])
                        read_b = _own(numbers(factors.b.name), 0, self._pieces[name]) * factors.scale
                        with writing():
                            a[0, inner : inner + factors.rank].copy_(read_a)
                            b[0, first : first + rows, : factors.rank].copy_(read_b)
                    first += rows

    def views(self, flat: torch.Tensor) -> list[tuple[Site, torch.Tensor, torch.Tensor]]:
        """Both factors of every site in `flat` [places, elements]."""
        found, first = [], 0
        for site in self._sites:
            inner, rows = len(site.parts) * self._rank, sum(site.rows)
            middle, end = first + inner * site.columns, first + site.elements(self._rank)
            a = flat[:, first:middle].unflatten(1, (inner, site.columns))
            b = flat[:, middle:end].unflatten(1, (rows, self._rank))
            found.append((site, a, b))
            first = end
        return found


def _own(factor: torch.Tensor, axis: int, piece: ShardPiece | None) -> torch.Tensor:
    """What a rank has of it: B has the matrix's rows, A its columns. The other factor is each rank's whole."""
    if piece is None or piece.axis != axis:
        return factor
    return torch.cat([factor.narrow(axis, first, last - first) for first, last in piece.ranges], axis)
