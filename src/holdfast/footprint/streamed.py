"""What layers take that do not stay where they are computed: slots that they take turns in, and where they wait.

    computed on a CPU    slots in RAM   ◄── all of them in a file on a disk
    computed on a GPU    slots in VRAM  ◄── pinned RAM  ◄── those that RAM does not hold, in a file on a disk

Pure arithmetic: execution allocates by it, the planner counts by it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

from holdfast.checkpoints import StoredTensor
from holdfast.footprint.cpu import held_tensors
from holdfast.footprint.layouts import Quantize
from holdfast.footprint.scaled_layouts import ScaledLayout
from holdfast.models import ModelSpec
from holdfast.units import MIB

AHEAD = 1
"""Layers that come while another is computed, each in a slot of its own. The link is never idle while a layer comes
more slowly than it is computed; one more slot would take the room of a layer that could stay, whose bytes would then
move in every step."""
READ_SLOTS = 2
"""In pinned RAM, of layers that come from a disk to a GPU: one is read while the other is copied, which is sooner."""
STAGED_ROWS_BYTES = 8 * MIB
"""In pinned RAM, where the embedding is on a disk: rows of it on their way."""
GATHERS_EMBEDDING = True
"""Whether a GPU takes rows of an embedding that is not the head as well from pinned RAM."""
PLACE_GRAIN_BYTES = MIB // 16
"""A place is a whole number of these: whole pages of the disk and of memory, and room for the gaps between tensors."""
DRIVER_PAGE_BYTES = 2 * MIB
"""Of a GPU's memory that is put behind addresses: layers there have whole ones, so that they can come and go."""


PAGE_BYTES, ENTRY_BYTES, TABLE_BYTES = 4096, 8, 2 * MIB
"""Of host memory, its entry in a GPU's page tables, and what tables grow by."""


def page_tables_bytes(pinned_bytes: int) -> int:
    """Of VRAM, by which the GPU finds pinned memory. The driver counts them as no process's: 36 MiB more were in use on
    an H200 once 18.65 GiB were pinned."""
    return -(-pinned_bytes // PAGE_BYTES * ENTRY_BYTES // TABLE_BYTES) * TABLE_BYTES


@dataclass(frozen=True, slots=True)
class StreamedLayers:
    layers: tuple[int, ...]
    """In their order."""
    sizes: tuple[int, ...]
    """Of each of `layers` where it is computed from, in one piece with the gaps between its tensors."""
    weights_bytes: int
    """Of all of them, as they would lie where they are computed."""
    on_disk: tuple[int, ...]
    """Those of `layers` that are in a file; the others are in pinned RAM. On a CPU all of them."""
    ahead: int = AHEAD
    """Layers that come while one is computed."""
    embedding_bytes: int = 0
    """Of the embedding in pinned RAM, where rows of it are gathered, or in the file; 0: it is where layers are
    computed."""
    embedding_on_disk: bool = False
    """Rows of it are read for every step: RAM that it leaves holds layers, of which every byte would be read."""
    resident_sizes: tuple[int, ...] | None = None
    """Beside a GPU: of the other layers, as `sizes`. They may change places with these while serving, so each has
    memory of its own. None: they stay where they are."""
    saved: tuple[int, ...] = ()
    """Of every layer, what it has less where it waits and on the link: four-bit zero points lie two to a byte there.
    Empty: nothing."""

    @property
    def moved_sizes(self) -> tuple[int, ...]:
        """Of each of `layers` where it waits, and as it is copied, at most."""
        if not self.saved:
            return self.sizes
        pairs = zip(self.layers, self.sizes, strict=True)
        return tuple(size - self.saved[layer] // PLACE_GRAIN_BYTES * PLACE_GRAIN_BYTES for layer, size in pairs)

    @property
    def waiting_bytes(self) -> int:
        """Of the largest where it waits: of a place in the file."""
        return max(self.moved_sizes, default=0)

    @property
    def in_ram(self) -> tuple[int, ...]:
        """In pinned RAM, beside a GPU."""
        apart = set(self.on_disk)
        return tuple(layer for layer in self.layers if layer not in apart)

    @property
    def place_bytes(self) -> int:
        """Of the largest where it is computed from: of a slot."""
        return max(self.sizes, default=0)

    @property
    def slots(self) -> int:
        """Where layers are computed from: in VRAM, or in RAM on a CPU."""
        return min(1 + self.ahead, len(self.layers))

    @property
    def slot_bytes(self) -> int:
        """Of the largest of all that may ever be in it."""
        if self.resident_sizes is None:
            return self.place_bytes
        return driver_pages(max((*self.sizes, *self.resident_sizes), default=0))

    @property
    def slots_bytes(self) -> int:
        return self.slots * self.slot_bytes

    @property
    def resident_bytes(self) -> int:
        """Of the other layers, where they may change places with these."""
        return sum(driver_pages(size) for size in self.resident_sizes or ())

    @property
    def all_sizes(self) -> tuple[int, ...]:
        """Of every layer, where all may change places."""
        assert self.resident_sizes is not None
        own, others = dict(zip(self.layers, self.sizes, strict=True)), iter(self.resident_sizes)
        total = len(self.sizes) + len(self.resident_sizes)
        return tuple(own[layer] if layer in own else next(others) for layer in range(total))

    @property
    def read_slots(self) -> int:
        """In pinned RAM beside a GPU, for what comes from the file."""
        return min(READ_SLOTS, len(self.on_disk))

    @property
    def pinned_sizes(self) -> list[int]:
        """Of the pieces beside a GPU: the layers in RAM, then the slots that those of the file are read into, then the
        embedding if it is there, or its rows that are read."""
        apart, sizes = set(self.on_disk), zip(self.layers, self.moved_sizes, strict=True)
        slots = [self.waiting_bytes] * self.read_slots
        embedding = [with_gaps(self.embedding_bytes)] if self.embedding_bytes else []
        if self.embedding_on_disk:
            embedding = [STAGED_ROWS_BYTES]
        return [*(size for layer, size in sizes if layer not in apart), *slots, *embedding]

    @property
    def pinned_bytes(self) -> int:
        return sum(self.pinned_sizes)

    @property
    def file_bytes(self) -> int:
        return self.embedding_offset + (with_gaps(self.embedding_bytes) if self.embedding_on_disk else 0)

    @property
    def embedding_offset(self) -> int:
        """In the file, behind the layers."""
        return len(self.on_disk) * self.waiting_bytes

    @property
    def moved_bytes(self) -> int:
        """In every step, into slots."""
        return sum(self.moved_sizes)

    @property
    def read_bytes(self) -> int:
        """In every step, from the disk."""
        apart = set(self.on_disk)
        return sum(size for layer, size in zip(self.layers, self.moved_sizes, strict=True) if layer in apart)


def streamed_layers(
    by_layer: Sequence[int], streamed: int | tuple[int, ...], on_disk: int | None = None
) -> StreamedLayers:
    """These of the layers, whose bytes are given, or so many of them spread evenly: while those between are computed,
    the next one is on its way. `on_disk`: so many of these, spread evenly too; None: all."""
    chosen = evenly(tuple(range(len(by_layer))), streamed) if isinstance(streamed, int) else streamed
    apart = chosen if on_disk is None else evenly(chosen, on_disk)
    sizes = tuple(with_gaps(by_layer[layer]) for layer in chosen)
    return StreamedLayers(chosen, sizes, sum(by_layer[layer] for layer in chosen), apart)


def saved_by_layer(
    spec: ModelSpec, stored: Mapping[str, StoredTensor] | None, *, dtype: str, quantize: Quantize | None = None
) -> tuple[int, ...]:
    """What each layer has less where it waits for a GPU."""
    found = Counter[int | None]()
    held = held_tensors(spec, stored, dtype=dtype, expand=False, compiled=False, quantize=quantize)
    for tensor, _, layout in held:
        if isinstance(layout, ScaledLayout):
            *stacked, rows, columns = tensor.shape
            found[tensor.layer] += layout.saved_bytes(prod(stacked) * rows, columns, tensor.experts)
    return tuple(found[layer.index] for layer in spec.layers)


def beside_gpu(streamed: StreamedLayers, by_layer: Sequence[int]) -> StreamedLayers:
    """With the other layers able to change places with these while serving."""
    chosen = set(streamed.layers)
    others = tuple(with_gaps(size) for layer, size in enumerate(by_layer) if layer not in chosen)
    return replace(streamed, resident_sizes=others)


def with_others_streamed(streamed: StreamedLayers, layers: Sequence[int]) -> StreamedLayers:
    """With these streamed instead, where all may change places."""
    sizes, chosen = streamed.all_sizes, set(layers)
    return replace(
        streamed,
        layers=tuple(layers),
        sizes=tuple(sizes[layer] for layer in layers),
        weights_bytes=sum(sizes[layer] for layer in layers),
        on_disk=tuple(layer for layer in streamed.on_disk if layer in chosen),
        ahead=ahead_of(layers, streamed.ahead),
        resident_sizes=tuple(size for layer, size in enumerate(sizes) if layer not in chosen),
    )


def ahead_of(layers: Sequence[int], asked: int) -> int:
    """How many of these come while one is computed: none need to where others stay between any two, unless more were
    set than usual."""
    if asked > AHEAD:
        return asked
    return 0 if all_apart(layers) else AHEAD


def driver_pages(nbytes: int) -> int:
    return -(-nbytes // DRIVER_PAGE_BYTES) * DRIVER_PAGE_BYTES


def with_gaps(nbytes: int) -> int:
    """Of the one piece that tensors of so many bytes lie in, with room for the gaps between them."""
    return (nbytes // PLACE_GRAIN_BYTES + 2) * PLACE_GRAIN_BYTES


def whole_grains(nbytes: int) -> int:
    """Of pinned memory, that so many bytes lie in."""
    return -(-nbytes // PLACE_GRAIN_BYTES) * PLACE_GRAIN_BYTES


def all_apart(layers: Sequence[int]) -> bool:
    """Whether others stay between any two of them: while these are computed, one slot is filled again."""
    return all(second - first > 1 for first, second in pairwise(layers))


def one_more(streamed: Collection[int], layers: int, able: Collection[int], cheap: Collection[int]) -> int | None:
    """Which of the `able` ones is best streamed too: the farthest from the others, counted round and round, and of
    equals one of the `cheap`. None: there is none."""

    def apart(layer: int) -> int:
        return min((min((layer - one) % layers, (one - layer) % layers) for one in streamed), default=layers)

    return max(able, key=lambda layer: (apart(layer), layer in cheap, -layer), default=None)


def one_less(streamed: Collection[int], layers: int, first: Collection[int]) -> int:
    """Which of them is best no longer streamed: one of those that shall go `first`, and of these the one between the
    closest neighbours."""
    order = sorted(streamed)

    def between(layer: int) -> int:
        at = order.index(layer)
        return (order[(at + 1) % len(order)] - order[at - 1]) % layers or layers

    return min(order, key=lambda layer: (layer not in first, between(layer), layer))


def last_of_groups(layers: int, group: int, streamed: int) -> tuple[int, ...]:
    """Of every `group` of them the last `streamed`; of 32 in groups of 8 with 2: 6, 7, 14, 15, 22, 23, 30, 31."""
    return tuple(layer for layer in range(layers) if layer % group >= group - streamed)


def evenly(layers: Sequence[int], count: int) -> tuple[int, ...]:
    """So many of them."""
    of = len(layers)
    return tuple(layer for at, layer in enumerate(layers) if (at + 1) * count // of > at * count // of)


# MLPs of streamed layers that the host's cores compute, beside a GPU

WORTH = 1.1
"""What steps must become faster by, as they are estimated, for the host to compute beside them."""
MOST_IN_A_ROW = 2
"""Layers that the host computes between two that come whole. The attention of a third would wait behind a whole MLP on
the link, and the host with it."""
DURING_COPIES = 0.8
"""Of what the host reads alone, what is left beside the link's copies: 93 of 127 GB/s on an H200's host, and 52 of 54
for the link. For plans, and for starts that could not measure both at once; all others go by what they measured."""
COPIES_LEFT = 0.05, 0.65
"""Of the link's rate, what each token more that the host's cores compute MLPs for takes, and what is left at least: on
an H200's host it copied 51 GB/s beside one token, and 36 of 55 beside eight. As the one above."""


def estimated_speedup(
    in_a_row: int, attention_bytes: float, mlp_bytes: float, link_bytes_per_s: float, host_mlp_s: float, tokens: int
) -> float:
    """As `speedup`, from what link and host do alone: `host_mlp_s` for one MLP and so many tokens."""
    left = max(COPIES_LEFT[1], 1 - (tokens - 1) * COPIES_LEFT[0])
    computed, beside = host_mlp_s / DURING_COPIES, link_bytes_per_s * left
    return left * speedup(in_a_row, attention_bytes, mlp_bytes, beside, beside, computed)


def speedup(
    in_a_row: int,
    attention_bytes: float,
    mlp_bytes: float,
    link_bytes_per_s: float,
    beside_bytes_per_s: float,
    host_mlp_s: float,
) -> float:
    """Of a step whose streamed layers are computed so. `in_a_row`: layers that the host computes between two that come
    whole; `host_mlp_s`: for one MLP, beside copies, of which the link brings `beside_bytes_per_s` meanwhile."""

    def brought_s(nbytes: float, computing_s: float) -> float:
        """For so many bytes, of the first seconds of which the host computes."""
        beside = computing_s * beside_bytes_per_s
        if nbytes <= beside:
            return nbytes / beside_bytes_per_s
        return computing_s + (nbytes - beside) / link_bytes_per_s

    first = attention_bytes / link_bytes_per_s
    # The next MLP comes beside the first that is computed here, the attention of each other one after that.
    chain = first + max(host_mlp_s, brought_s(mlp_bytes, host_mlp_s)) + (in_a_row - 1) * (first + host_mlp_s)
    link = brought_s(mlp_bytes + (in_a_row + 1) * attention_bytes, in_a_row * host_mlp_s)
    return (in_a_row + 1) * (attention_bytes + mlp_bytes) / link_bytes_per_s / max(chain, link)


def hosted_layers(streamed: Sequence[int], in_a_row: int, most: int) -> tuple[int, ...]:
    """Of these, at most so many, spread evenly: the first comes whole."""
    if in_a_row == 0 or most <= 0:
        return ()
    found = [layer for number, layer in enumerate(streamed) if number % (in_a_row + 1)]
    count = min(most, len(found))
    return tuple(found[number * len(found) // count] for number in range(count))
