"""How long a step takes whose experts are over VRAM and RAM, if all experts are used alike:

    many tokens   the experts that wait are all copied:   max(computing, bytes that wait / link)
    few tokens    nothing is copied:                      computing without those that wait, and for these
                  with the host's cores    max(bytes met / memory of the host, operations / cores) beside the experts
                                           that stay and those that the GPU fetches meanwhile, and a round trip a layer
                  without them             bytes met / link, as kernels read over it

Whichever is sooner counts. A router that prefers some experts is faster than this: those that are used most stay.
And one whose layers are streamed, where the host's cores compute some MLPs: `footprint.streamed.estimated_speedup`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from holdfast.footprint.expert_places import FEW_TOKENS, LINK_SHARE, MLP_MATRICES, ExpertPlaces
from holdfast.footprint.experts import kinds
from holdfast.footprint.identity_key import Same
from holdfast.footprint.streamed import MOST_IN_A_ROW, WORTH, StreamedLayers, estimated_speedup, hosted_layers
from holdfast.hardware import Processor
from holdfast.planner.fit.count import experts_on_gpu
from holdfast.planner.fit.placement import pinned_room
from holdfast.planner.fit.result import Plan
from holdfast.planner.sizing.engine_weights import engine_weights
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
    waiting: float
    """Experts of a layer, in the mean."""
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
            waiting=waiting / len(places.layers),
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

    def fetched(self, tokens: int, link_bytes_per_s: float, share: float) -> float:
        """Share of the experts met that the GPU fetches itself while the cores compute the others: by the speeds of
        both, and whole ones of each layer, so that one token's are mostly the cores'. `share` as above."""
        met = self.waiting * self.met(tokens)
        part = LINK_SHARE * link_bytes_per_s / (link_bytes_per_s + self.host_gb_s * GB * share)
        return math.floor(met * part) / met if met else 0.0

    def link_s(self, tokens: int, link_bytes_per_s: float) -> float:
        """That kernels take which read over the link what tokens meet."""
        return self.waiting_bytes * self.met(tokens) / (KERNEL_SHARE * link_bytes_per_s)

    def trips_s(self) -> float:
        return self.layers * ROUND_TRIP_S if self.host else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpSpeed:
    """Of one plan with streamed layers, whose MLPs the host's cores may compute in steps of few tokens."""

    layers: tuple[int, ...]
    """That are streamed."""
    attention_bytes: float
    mlp_bytes: float
    """Of one of them."""
    parameters: float
    """Of its MLP."""
    room: int | None
    """MLPs that RAM holds once more; None: it is not known."""
    host: Processor

    def gain(self, tokens: int, link_bytes_per_s: float, share: float) -> float:
        """How many times as fast a step of so many tokens is, as a start would estimate it; 1: they are not asked.
        `share` of what cores are taken to do."""
        if tokens > FEW_TOKENS:
            return 1.0

        def one(count: int) -> float:
            """Seconds of an MLP with so many tokens."""
            reading = self.mlp_bytes / (host_gb_s(self.host) * GB * share)
            return max(reading, 2 * count * self.parameters / (host_flops(self.host) * share))

        def gained(in_a_row: int, count: int) -> float:
            return estimated_speedup(
                in_a_row, self.attention_bytes, self.mlp_bytes, link_bytes_per_s, one(count), count
            )

        in_a_row = max(range(1, MOST_IN_A_ROW + 1), key=lambda row: gained(row, 1))
        found = gained(in_a_row, tokens)
        all_of_them = len(hosted_layers(self.layers, in_a_row, len(self.layers)))
        if found < WORTH or not all_of_them:
            return 1.0
        hosted = 1.0 if self.room is None else min(1.0, max(0, self.room) / all_of_them)
        return 1 / (1 - hosted * (1 - 1 / found))


def expert_speed(fit: Plan) -> ExpertSpeed | None:
    """None: all experts stay on the GPU."""
    places = experts_on_gpu(fit.question) if fit.own is None else fit.own.expert_places
    if places is None:
        return None
    (kind,) = kinds(fit.question.model.spec)
    parameters = 3 * fit.question.model.spec.hidden_size * kind.intermediate_size
    return ExpertSpeed.of(places, kind.per_token, parameters, fit.question.machine.host)


def mlp_speed(fit: Plan, streamed: StreamedLayers) -> MlpSpeed | None:
    """None: the host's cores compute nothing, or it is not known what they do."""
    question, spec = fit.question, fit.question.model.spec
    host, weights = question.machine.host, engine_weights(Same(question.model))
    may = question.settings.offload.cpu_compute and question.machine.host_computes and not question.settings.max_loras
    if not may or host is None or weights is None or not streamed.layers or streamed.on_disk:
        return None
    if not weights.host_reads_mlps(dtype=fit.dtype):
        return None
    matrices = [tensor for tensor in spec.tensors if tensor.layer == streamed.layers[0] and len(tensor.shape) == 2]
    mlp = sum(tensor.elements for tensor in matrices if tensor.name.endswith(MLP_MATRICES))
    size = streamed.weights_bytes / len(streamed.layers)
    mlp_bytes = size * mlp / sum(tensor.elements for tensor in matrices)
    room = pinned_room(question)
    return MlpSpeed(
        layers=streamed.layers,
        attention_bytes=size - mlp_bytes,
        mlp_bytes=mlp_bytes,
        parameters=mlp,
        room=None if room is None else int((room - streamed.pinned_bytes) // mlp_bytes),
        host=host,
    )
