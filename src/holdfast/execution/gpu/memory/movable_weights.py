"""What of a runner's weights is on its GPU at the moment, and which of it may come and go: layers, or experts. Moves
nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import msgspec

from holdfast.execution.gpu.decoder import GpuDecoder
from holdfast.execution.streaming.copies import Copies
from holdfast.execution.streaming.device_experts import DeviceExperts
from holdfast.execution.streaming.device_layers import DeviceLayers
from holdfast.execution.weights.decoder_weights import Weights
from holdfast.records import LinkUse


class MovableWeights(ABC):
    def __init__(self, weights: Weights) -> None:
        movable = weights.slots.resident_bytes if isinstance(weights.slots, DeviceLayers) else 0
        placed = 0 if weights.experts is None else weights.experts.resident_bytes
        self._fixed_bytes = weights.nbytes - movable - placed

    @property
    @abstractmethod
    def decoder(self) -> GpuDecoder: ...

    @property
    def weights_bytes(self) -> int:
        """On the GPU, at the moment."""
        movable, experts = self.movable_layers, self.decoder.experts
        placed = 0 if experts is None else experts.resident_bytes
        return self._fixed_bytes + placed + (0 if movable is None else movable.resident_bytes)

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
    def movable_experts(self) -> DeviceExperts | None:
        """None: none may come to stay on the GPU, or leave it."""
        experts = self.decoder.experts
        return experts if experts is not None and experts.movable else None

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
    def link(self) -> Copies | None:
        """Over which weights come, where not all stay on the GPU: it has one owner, and others go behind them."""
        return None if self._coming is None else self._coming.link

    def uses_of(self, link: Copies | None) -> list[LinkUse]:
        """Of each direction of the link over which weights, or pages alone, come and go; and of the disk that weights
        come from."""
        if link is None:
            return []
        coming = self._coming
        if coming is None:
            return [link.use(), link.use_back()]
        back = msgspec.structs.replace(link.use_back(), possible_bytes_per_s=coming.possible_back)
        disk = coming.disk_use() if isinstance(coming, DeviceLayers) else None
        return [coming.use(), back, *([] if disk is None else [disk])]

    @property
    def weights_come(self) -> bool:
        """Whether steps wait for some of them now."""
        return self._coming is not None and self._coming.comes

    def leave_to_kv(self, to_come: Callable[[], int]) -> None:
        """Bytes of RAM that will still be pinned for KV pages: weights that leave the GPU do not take these."""
        if self._coming is not None:
            self._coming.kv_to_come = to_come

    @property
    def _coming(self) -> DeviceLayers | DeviceExperts | None:
        """What does not all stay on the GPU."""
        return self.decoder.streamed or self.decoder.experts
