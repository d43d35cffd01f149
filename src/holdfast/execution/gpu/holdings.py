"""What a GPU runner holds, by name and in bytes: parts of it, and errors where one is not there. Computes nothing."""

from __future__ import annotations

import torch

from holdfast.errors import EngineError
from holdfast.execution.gpu.decoder import GpuDecoder
from holdfast.execution.gpu.layers.lora import GpuAdapters
from holdfast.execution.gpu.memory.kv_range import KVRange
from holdfast.execution.gpu.sampling import DeviceSampler
from holdfast.execution.gpu.slots import DeviceSlots
from holdfast.execution.gpu.step import BatchBuilder
from holdfast.execution.streaming.device_experts import DeviceExperts
from holdfast.execution.streaming.device_layers import DeviceLayers
from holdfast.execution.tiers.gpu import GpuPageCopies


class GpuHoldings:
    _decoder: GpuDecoder | None
    _kv: KVRange | None
    _adapters: GpuAdapters | None
    _slots: DeviceSlots
    _forms: BatchBuilder
    _sampler: DeviceSampler
    _logits: torch.Tensor
    _fixed_bytes: int
    _page_copies: GpuPageCopies | None = None

    def use_tiers(self, copies: GpuPageCopies) -> None:
        """What moves pages between the pool and tiers below it; before the first step that asks for it."""
        self._page_copies = copies

    @property
    def kv_ram_bytes(self) -> int:
        """Pinned for KV pages."""
        return 0 if self._page_copies is None else self._page_copies.pinned_bytes

    @property
    def buffers_bytes(self) -> int:
        return self._slots.nbytes + self._forms.nbytes

    @property
    def logits_bytes(self) -> int:
        return self._logits.nbytes + self._sampler.nbytes

    @property
    def adapters_bytes(self) -> int:
        return 0 if self._adapters is None else self._adapters.nbytes

    @property
    def weights_bytes(self) -> int:
        """On the GPU, at the moment."""
        movable = self.movable_layers
        return self._fixed_bytes + (0 if movable is None else movable.resident_bytes)

    @property
    def mapped_bytes(self) -> int:
        """Of weights and layers' slots, what is not a tensor of torch's."""
        movable = self.movable_layers
        return 0 if movable is None else movable.resident_bytes + movable.nbytes

    @property
    def movable_layers(self) -> DeviceLayers | None:
        """None: none may come to stay on the GPU, or leave it."""
        streamed = self.decoder.streamed
        return streamed if streamed is not None and streamed.movable else None

    @property
    def layer_slots_bytes(self) -> int:
        return 0 if self.decoder.streamed is None else self.decoder.streamed.nbytes

    @property
    def expert_slots_bytes(self) -> int:
        """With the tables of their places."""
        return 0 if self.decoder.experts is None else self.decoder.experts.nbytes

    @property
    def pinned_bytes(self) -> int:
        """Of RAM, for layers or experts that do not stay on the GPU."""
        return 0 if self._coming is None else self._coming.pinned_bytes

    @property
    def _coming(self) -> DeviceLayers | DeviceExperts | None:
        """What does not all stay on the GPU."""
        return self.decoder.streamed or self.decoder.experts

    @property
    def kv(self) -> KVRange:
        if self._kv is None:
            raise EngineError("the runner has no KV pages yet", fix="call back_kv before the first step")
        return self._kv

    @property
    def decoder(self) -> GpuDecoder:
        if self._decoder is None:
            raise EngineError("the runner is closed")
        return self._decoder
