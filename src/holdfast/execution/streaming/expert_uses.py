"""How often each expert was used in steps with few tokens, as a GPU counts it: looked at now and then, without waiting.
Knows nothing of where experts lie but which of them stay on the GPU."""

from __future__ import annotations

import torch

STEPS_BETWEEN = 32
"""From one look to the next."""


class ExpertUses:
    """`places` int32 [layers, experts] on the host, as `device_experts` has it on the GPU: kept up by its owner."""

    def __init__(self, places: torch.Tensor) -> None:
        self.places = places
        self.pairs, self.hits = 0, 0
        """So far: of a token and an expert, and of these whose expert was on the GPU."""
        self._before = torch.zeros_like(places)
        self._seen: torch.Tensor | None = None
        self._arrived: torch.cuda.Event | None = None
        self._coming, self._steps = False, 0

    def look_at(self, uses: torch.Tensor) -> torch.Tensor | None:
        """To be called before each step; `uses` int32 [layers, experts] only grow. Returns how often each was used from
        one look to another, once that is known; None: not now."""
        if self._seen is None:
            pin = uses.device.type == "cuda"
            self._seen = torch.zeros(uses.shape, dtype=torch.int32, pin_memory=pin)
            self._arrived = torch.cuda.Event() if pin else None
        self._steps += 1
        if self._coming and (self._arrived is None or self._arrived.query()):
            self._coming = False
            return self._count(self._seen)
        if not self._coming and self._steps >= STEPS_BETWEEN:
            self._steps, self._coming = 0, True
            self._seen.copy_(uses, non_blocking=True)
            if self._arrived is not None:
                self._arrived.record()
        return None

    def _count(self, seen: torch.Tensor) -> torch.Tensor:
        found = seen - self._before
        self._before.copy_(seen)
        self.pairs += int(found.sum())
        self.hits += int(found[self.places >= 0].sum())
        return found
