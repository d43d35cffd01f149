"""What experts take that do not all stay on the GPU which computes their layer: some lie there in one stack, the others
wait in pinned RAM, and where RAM allows the host has all of them once more, in the layout that its cores compute with.

    VRAM    [ resident experts of each layer | tables ] [ slot ] [ slot ]
    RAM     pinned: [ waiting experts of each layer, in the GPU's layout ]     the host's own: [ all experts of each ]

Steps with many tokens copy a layer's waiting experts into a slot, layer by layer; steps with few tokens copy nothing.
Pure arithmetic: execution allocates by it, the planner counts by it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from holdfast.checkpoints import StoredTensor
from holdfast.footprint.cpu import ELEMENT_BYTES, held_tensors
from holdfast.footprint.experts import ExchangeLayout, kinds
from holdfast.footprint.gpu import padded_sizes
from holdfast.footprint.layouts import BLOCK_COLUMNS, Quantize
from holdfast.footprint.scaled_layouts import ScaledLayout
from holdfast.footprint.streamed import with_gaps
from holdfast.models import ModelSpec, TensorSpec

EXPERT_SLOTS = 2
"""In VRAM, each for all waiting experts of a layer: one is filled while the other is computed with. A layer's experts
follow the last one's at once, so that with one slot the link would wait for every layer to be computed."""
HOST_DTYPE = "float32"
"""That the host computes in."""
HOST_ACTIVATIONS = "silu", "gelu_tanh"
"""That its compiled kernels have."""
FEW_TOKENS = 32
"""At most, in a step for which no experts are copied: there is room for so many between the GPU and the host. Which
steps have few is decided by calibration at the start."""
LINK_SHARE = 0.8
"""Of the link's share by its speed, beside the host's, what it gets of the experts that a step chose and that wait."""
MLP_MATRICES = ".gate", ".up", ".gate_up", ".down"
MLP_BIASES = tuple(f"{name}_bias" for name in MLP_MATRICES)
TABLE_BYTES = 8
"""Of an expert in its layer's tables: its place, and how often it was chosen, int32 each."""


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
        """Of VRAM: where each expert of each of `layers` is, and how often it was chosen."""
        return len(self.layers) * self.experts * TABLE_BYTES

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


# How large one expert is


def expert_sizes(
    spec: ModelSpec, stored: Mapping[str, StoredTensor] | None, *, dtype: str, quantize: Quantize | None
) -> dict[int, int]:
    """Bytes of one expert of each layer that has some, by the layer's number, in the GPU's layout. `stored` by
    canonical name; None: dummies."""
    sizes = Counter[int]()
    for layer, tensor, kept, layout in _experts(spec, stored, dtype, False, quantize):
        sizes[layer] += _bytes_of_one(tensor, kept, layout, dtype)
    return dict(sizes)


def host_expert_sizes(
    spec: ModelSpec, stored: Mapping[str, StoredTensor] | None, *, quantize: Quantize | None
) -> dict[int, int] | None:
    """The same in the layout that the host's compiled products read, which is that of an engine on a CPU; None: they do
    not read such experts."""
    sizes = Counter[int]()
    for layer, tensor, kept, layout in _experts(spec, stored, HOST_DTYPE, True, quantize):
        columns = tensor.shape[-1]
        if columns % BLOCK_COLUMNS or (isinstance(layout, ScaledLayout) and not layout.compiles(columns)):
            return None
        sizes[layer] += _bytes_of_one(tensor, kept, layout, HOST_DTYPE)
    return dict(sizes)


def host_reads_mlps(
    spec: ModelSpec, stored: Mapping[str, StoredTensor] | None, *, dtype: str, quantize: Quantize | None
) -> bool:
    """Whether the host's compiled products read the MLPs of all layers, none of which has experts or biases."""
    if spec.decoder.mlp != "gated" or spec.activation not in HOST_ACTIVATIONS:
        return False
    for tensor, _, layout in held_tensors(spec, stored, dtype=dtype, expand=False, compiled=True, quantize=quantize):
        if tensor.experts or tensor.name.endswith(MLP_BIASES):
            return False
        if tensor.layer is not None and tensor.name.endswith(MLP_MATRICES):
            columns = tensor.shape[-1]
            if columns % BLOCK_COLUMNS or (isinstance(layout, ScaledLayout) and not layout.compiles(columns)):
                return False
    return True


def _experts(
    spec: ModelSpec,
    stored: Mapping[str, StoredTensor] | None,
    dtype: str,
    compiled: bool,
    quantize: Quantize | None,
) -> Iterator[tuple[int, TensorSpec, StoredTensor | None, str | ScaledLayout]]:
    for tensor, kept, layout in held_tensors(
        spec, stored, dtype=dtype, expand=False, compiled=compiled, quantize=quantize
    ):
        if tensor.experts and tensor.layer is not None:
            yield tensor.layer, tensor, kept, layout


def _bytes_of_one(tensor: TensorSpec, kept: StoredTensor | None, layout: str | ScaledLayout, dtype: str) -> int:
    """What a stack has once is not among it."""
    rows, columns = tensor.shape[-2:]
    if isinstance(layout, ScaledLayout):
        return layout.bytes_for(rows, columns) - layout.shared_bytes
    if layout in ELEMENT_BYTES or kept is None:
        return rows * columns * ELEMENT_BYTES.get(layout, ELEMENT_BYTES[dtype])
    return kept.nbytes // tensor.experts


def exchange_layout(spec: ModelSpec, places: ExpertPlaces, sequences: int, element_bytes: int) -> ExchangeLayout:
    """Between a GPU with so many sequences and the host that computes with its waiting experts: a token of each, with
    what that is padded by."""
    return ExchangeLayout(
        layers=len(places.layers),
        tokens=next((size for size in padded_sizes(FEW_TOKENS) if size >= sequences), FEW_TOKENS),
        per_token=kinds(spec)[0].per_token,
        hidden=spec.hidden_size,
        element_bytes=element_bytes,
    )
