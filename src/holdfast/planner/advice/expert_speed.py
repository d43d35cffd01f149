"""How long a step takes whose experts are over VRAM and RAM, if all experts are used alike:

    many tokens   the experts that wait are all copied:   max(computing, bytes that wait / link)
    few tokens    nothing is copied:                      computing without those that wait, and for these
                  with the host's cores    max(bytes met / memory of the host, operations / cores) beside the experts
                                           that stay, and a round trip a layer
                  without them             bytes met / link, as kernels read over it

Whichever is sooner counts. A router that prefers some experts is faster than this: those that are used most stay.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.footprint.expert_places import FEW_TOKENS, ExpertPlaces
from holdfast.hardware import Processor
from holdfast.planner.sizing.host_cores import KERNEL_SHARE, host_flops, host_gb_s

GB = 10**9
ROUND_TRIP_S = 15e-6
"""Of each layer whose experts the host computes: from the GPU's request to its reading the reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSpeed:
    """Of one plan: what a step of so many tokens costs because experts wait in RAM."""

    waiting_bytes: int
    """Of all layers."""
    met_share: float
    """Of a layer's experts that one token chooses."""
    layers: int
    host: bool
    """The host's cores compute."""
    host_gb_s: float
    host_flops: float
    parameters: float
    """Of experts that wait, which one token meets."""

    @staticmethod
    def of(places: ExpertPlaces, per_token: int, expert_parameters: int, host: Processor | None) -> ExpertSpeed:
        """`expert_parameters`: of one expert. `host`: whose cores may compute; None: not known."""
        waiting = sum(places.waiting)
        return ExpertSpeed(
            waiting_bytes=sum(places.waiting_bytes),
            met_share=per_token / places.experts,
            layers=len(places.layers),
            host=bool(places.host_sizes),
            host_gb_s=host_gb_s(host),
            host_flops=host_flops(host),
            parameters=waiting * per_token / places.experts * expert_parameters,
        )

    def met(self, tokens: int) -> float:
        """Share of experts that so many tokens choose, each as if by lot."""
        return 1 - (1 - self.met_share) ** tokens

    def is_few(self, tokens: int) -> bool:
        return tokens <= FEW_TOKENS

    def host_s(self, tokens: int, share: float) -> float:
        """That the cores take; `share` of what they are taken to do."""
        reading = self.waiting_bytes * self.met(tokens) / (self.host_gb_s * GB * share)
        return max(reading, 2 * tokens * self.parameters / (self.host_flops * share))

    def link_s(self, tokens: int, link_bytes_per_s: float) -> float:
        """That kernels take which read over the link what tokens meet."""
        return self.waiting_bytes * self.met(tokens) / (KERNEL_SHARE * link_bytes_per_s)

    def trips_s(self) -> float:
        return self.layers * ROUND_TRIP_S if self.host else 0.0
