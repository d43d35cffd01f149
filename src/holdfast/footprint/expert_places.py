"""What experts take that do not all stay on the GPU which computes their layer: some lie there in one stack, the others
wait in pinned RAM, and where RAM allows the host has all of them once more, in the layout that its cores compute with.

    VRAM    [ resident experts of each layer | table of places ] [ slot ] [ slot ]
    RAM     pinned: [ waiting experts of each layer, in the GPU's layout ]     the host's own: [ all experts of each ]

Steps with many tokens copy a layer's waiting experts into a slot, layer by layer; steps with few tokens copy nothing.
Pure arithmetic: execution allocates by it, the planner counts by it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast.footprint.streamed import with_gaps

EXPERT_SLOTS = 2
"""In VRAM, each for all waiting experts of a layer: one is filled while the other is computed with. A layer's experts
follow the last one's at once, so that with one slot the link would wait for every layer to be computed."""
PLACE_BYTES = 4
"""Of an expert in its layer's table of places, int32."""


@dataclass(frozen=True, slots=True)
class ExpertPlaces:
    layers: tuple[int, ...]
    """Whose experts do not all stay on the GPU, in their order."""
    resident: tuple[int, ...]
    """Experts of each of `layers` that stay there."""
    experts: int
    """Of each of `layers`."""
    sizes: tuple[int, ...]
    """Of one expert of each of `layers`, in the GPU's layout."""
    host_sizes: tuple[int, ...] = ()
    """Of one expert of each, in the layout that the host computes with; empty: it computes none."""
    slots: int = EXPERT_SLOTS

    @property
    def waiting(self) -> tuple[int, ...]:
        """Experts of each of `layers` in pinned RAM."""
        return tuple(self.experts - resident for resident in self.resident)

    @property
    def waiting_bytes(self) -> tuple[int, ...]:
        """Of these, for each of `layers`, as they would lie on the GPU."""
        return tuple(count * size for count, size in zip(self.waiting, self.sizes, strict=True))

    @property
    def resident_bytes(self) -> int:
        """Of VRAM, for the stacks of `layers`."""
        return sum(count * size for count, size in zip(self.resident, self.sizes, strict=True))

    @property
    def pinned_sizes(self) -> tuple[int, ...]:
        """Of the one piece that each layer's waiting experts are kept in and copied from, with the gaps between its
        tensors."""
        return tuple(with_gaps(nbytes) for nbytes in self.waiting_bytes)

    @property
    def pinned_bytes(self) -> int:
        return sum(self.pinned_sizes)

    @property
    def slot_bytes(self) -> int:
        """Of the largest piece."""
        return max(self.pinned_sizes, default=0)

    @property
    def slots_used(self) -> int:
        return min(self.slots, len(self.layers))

    @property
    def slots_bytes(self) -> int:
        return self.slots_used * self.slot_bytes

    @property
    def tables_bytes(self) -> int:
        """Of VRAM: where each expert of each of `layers` is."""
        return len(self.layers) * self.experts * PLACE_BYTES

    @property
    def vram_bytes(self) -> int:
        """All that experts of `layers` take there."""
        return self.resident_bytes + self.slots_bytes + self.tables_bytes

    @property
    def host_bytes(self) -> int:
        """Of the copies that the host computes with."""
        return self.experts * sum(self.host_sizes)

    @property
    def moved_bytes(self) -> int:
        """Over the link in a step with many tokens."""
        return self.pinned_bytes

    @property
    def resident_share(self) -> float:
        """Of the experts of `layers`: where all are used alike, the share of uses that the GPU serves from VRAM."""
        return sum(self.resident) / (self.experts * len(self.layers))


def spread_experts(
    sizes: Mapping[int, int], experts: int, resident: int, host_sizes: Mapping[int, int] | None = None
) -> ExpertPlaces:
    """So many experts of all layers together stay, as evenly as can be: the first layers have one more where it does
    not divide. `sizes`: bytes of one expert of each MoE layer, by the layer's number."""
    each, more = divmod(resident, len(sizes))
    counts = {layer: each + (at < more) for at, layer in enumerate(sorted(sizes))}
    return expert_places(sizes, experts, counts, host_sizes)


def all_wait(
    sizes: Mapping[int, int], experts: int, layers: Sequence[int], host_sizes: Mapping[int, int] | None = None
) -> ExpertPlaces:
    """All experts of these layers, and none of the others."""
    return expert_places(sizes, experts, dict.fromkeys(layers, 0), host_sizes)


def expert_places(
    sizes: Mapping[int, int], experts: int, resident: Mapping[int, int], host_sizes: Mapping[int, int] | None = None
) -> ExpertPlaces:
    """`resident`: experts that stay, by layer; all of a layer that is not named."""
    layers = tuple(layer for layer in sorted(sizes) if resident.get(layer, experts) < experts)
    return ExpertPlaces(
        layers=layers,
        resident=tuple(resident[layer] for layer in layers),
        experts=experts,
        sizes=tuple(sizes[layer] for layer in layers),
        host_sizes=() if host_sizes is None else tuple(host_sizes[layer] for layer in layers),
    )
