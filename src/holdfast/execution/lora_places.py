"""Where LoRA adapters lie: places on the device that steps compute from, copies in RAM behind them, files behind those.

    files ──read, checked, scaled──► RAM copies (LRU) ──one copy──► places [places, elements]

Everything is allocated at the start. Which adapter is in which place is decided by the scheduler; a place is filled
when a sequence starts with an adapter that is not in it. What B is multiplied by is folded into it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import torch

from holdfast.checkpoints.adapters import Adapter, changed, not_finite, read_adapter, stamp
from holdfast.checkpoints.checkpoint import Checkpoint
from holdfast.config import EngineConfig
from holdfast.errors import CheckpointError, HoldfastError
from holdfast.execution.lora import SiteFactors
from holdfast.execution.memory import exact_tensor
from holdfast.execution.weights import expand_into
from holdfast.models import ModelSpec
from holdfast.planner.lora_sizes import Site, copy_rows, place_elements, places_rank, sites
from holdfast.records.lora import AdapterRef
from holdfast.records.outputs import Failure
from holdfast.records.steps import SequenceStart, StepFailure


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraLimits:
    max_loras: int
    """Places: adapters in one step."""
    max_rank: int
    cached: int
    """Copies in RAM: on a GPU of all that come, on a CPU of those that are in no place."""

    @staticmethod
    def of(config: EngineConfig) -> LoraLimits | None:
        if not config.lora_places:
            return None
        return LoraLimits(max_loras=config.lora_places, max_rank=config.lora_rank, cached=config.lora_copies)


class AdapterPlaces:
    """`places` [places, elements] never moves: kernels and graphs may keep its address."""

    def __init__(self, spec: ModelSpec, limits: LoraLimits, dtype: torch.dtype, device: torch.device) -> None:
        self.limits, self._spec, self._device, self._dtype = limits, spec, device, dtype
        self._rank, self._sites = places_rank(limits.max_rank), sites(spec)
        elements = place_elements(spec, limits.max_rank)
        self.places = exact_tensor((limits.max_loras, elements), dtype, device).zero_()
        rows = copy_rows(limits.cached, on_cpu=self._on_cpu)
        self._copies = exact_tensor((rows, elements), dtype, torch.device("cpu")).zero_()
        self._held: list[AdapterRef | None] = [None] * limits.max_loras
        self._cached: OrderedDict[AdapterRef, int] = OrderedDict()
        self._free = list(range(rows))
        self._changes: dict[AdapterRef, frozenset[tuple[int, str]]] = {}
        """Products that each adapter here changes."""
        self._factors = {
            (site.layer, site.product): SiteFactors(a, b, site.rows, set()) for site, a, b in self._views(self.places)
        }

    @property
    def _on_cpu(self) -> bool:
        return self._device.type == "cpu"

    @property
    def nbytes(self) -> int:
        """On the device."""
        return self.places.nbytes + (self._copies.nbytes if self._on_cpu else 0)

    @property
    def held(self) -> tuple[AdapterRef | None, ...]:
        return tuple(self._held)

    @property
    def cached(self) -> tuple[AdapterRef, ...]:
        """Copies in RAM, the least recently used first."""
        return tuple(self._cached)

    def factors(self) -> dict[tuple[int, str], SiteFactors]:
        """Views of the places, by layer and product."""
        return self._factors

    def start(self, start: SequenceStart) -> StepFailure | None:
        """Before a sequence's first row: its adapter is in its place, or the sequence fails alone. The row is computed
        all the same, with whatever the place holds; nobody reads what comes of it."""
        if start.adapter is None or self._held[start.adapter_place] == start.adapter:
            return None
        try:
            self._fill(start.adapter_place, start.adapter)
        except HoldfastError as error:
            return StepFailure(slot=start.slot, failure=Failure.of(error))
        finally:
            self._note_used(start.adapter_place)
        return None

    def rehearse(self, on: bool) -> None:
        """While it is on, products are computed as if every place changed them."""
        for factors in self._factors.values():
            factors.used.clear()
            factors.used.update(range(self.limits.max_loras) if on else ())

    def _note_used(self, place: int) -> None:
        here = {*self._held, *self._cached}
        self._changes = {ref: changes for ref, changes in self._changes.items() if ref in here}
        held = self._held[place]
        changed_here = frozenset[tuple[int, str]]() if held is None else self._changes[held]
        for key, factors in self._factors.items():
            (factors.used.add if key in changed_here else factors.used.discard)(place)

    def _fill(self, place: int, ref: AdapterRef) -> None:
        if self._on_cpu:
            self._exchange(place, ref)
        else:
            self.places[place].copy_(self._copies[self._copied(ref)])
        self._held[place] = ref

    def _exchange(self, place: int, ref: AdapterRef) -> None:
        """Where places are in RAM themselves, a copy is of what is in none of them."""
        before = self._held[place]
        if not self.limits.cached:
            self._held[place] = None
            self._read(ref, self.places[place])
            return
        row = self._cached.pop(ref, None)
        if row is None:
            row = self._free.pop()
            try:
                self._read(ref, self._copies[row])
            except HoldfastError:
                self._free.append(row)
                raise
        if before is not None and before not in self._cached:
            kept = self._free.pop() if self._free else self._cached.popitem(last=False)[1]
            self._copies[kept].copy_(self.places[place])
            self._cached[before] = kept
        self.places[place].copy_(self._copies[row])
        self._free.append(row)

    def _copied(self, ref: AdapterRef) -> int:
        """The row of its copy, read from its files where there is none; the least recently used one's where all are
        taken."""
        if ref in self._cached:
            self._cached.move_to_end(ref)
            return self._cached[ref]
        row = self._free.pop() if self._free else self._cached.popitem(last=False)[1]
        try:
            self._read(ref, self._copies[row])
        except HoldfastError:
            self._free.append(row)
            raise
        self._cached[ref] = row
        return row

    def _read(self, ref: AdapterRef, target: torch.Tensor) -> None:
        adapter = read_adapter(
            Path(ref.path), self._spec, name=ref.name, model="the served model", max_rank=self.limits.max_rank
        )
        if adapter.stamp != ref.stamp:
            raise changed(ref.name)
        with torch.inference_mode():
            target.zero_()
            try:
                self._expand(adapter, target)
            except CheckpointError as error:  # It says where the file lies, and may reach a client.
                raise changed(ref.name) from error
            if not torch.isfinite(target).all():
                raise not_finite(ref.name, str(self._dtype).removeprefix("torch."))
        if stamp(adapter.folder) != ref.stamp:
            raise changed(ref.name)
        self._changes[ref] = frozenset(
            (site.layer, site.product) for site in self._sites if not adapter.factors.keys().isdisjoint(site.parts)
        )

    def _expand(self, adapter: Adapter, target: torch.Tensor) -> None:
        tensors = {one.name: one for factors in adapter.factors.values() for one in (factors.a, factors.b)}
        with Checkpoint(tensors, "safetensors") as checkpoint:

            def numbers(name: str) -> torch.Tensor:
                stored = tensors[name]
                wide = torch.empty(stored.shape, dtype=torch.float32)
                expand_into(wide, torch.from_numpy(checkpoint.read(name)), stored.layout)
                return wide

            for site, a, b in self._views(target.unsqueeze(0)):
                first = 0
                for part, (name, rows) in enumerate(zip(site.parts, site.rows, strict=True)):
                    factors = adapter.factors.get(name)
                    if factors is not None:
                        inner = part * self._rank
                        a[0, inner : inner + factors.rank].copy_(numbers(factors.a.name))
                        b[0, first : first + rows, : factors.rank].copy_(numbers(factors.b.name) * factors.scale)
                    first += rows

    def _views(self, flat: torch.Tensor) -> list[tuple[Site, torch.Tensor, torch.Tensor]]:
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
