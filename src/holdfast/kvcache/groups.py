"""How layers remember, and what one page of the KV pool holds. Bytes and indices only.

Layers that remember alike form a group. Every group has its own block table; one pool of equal pages serves
them all. A page is contiguous across the layers of its group:

    page ─► [layer of the group][key | value][token of the block][kv head][head dim]

so that a block moves between tiers as one piece. Where groups would differ in size, the larger kind is split
into several groups, and the last may leave some layer places of its pages empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class KVGroup:
    index: int
    layers: tuple[int, ...]
    """Model layers in the order in which they lie in a page."""
    window: int | None
    """A position sees itself and window-1 before it; None: everything before it."""

    def first_needed(self, position: int) -> int:
        """The earliest position whose KV a query at `position` still reads."""
        return 0 if self.window is None else max(0, position - self.window + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    groups: tuple[KVGroup, ...]
    block_tokens: int
    layers_per_page: int
    kv_heads: int
    head_dim: int
    element_bytes: int

    @property
    def page_shape(self) -> tuple[int, int, int, int, int]:
        return (self.layers_per_page, 2, self.block_tokens, self.kv_heads, self.head_dim)

    @property
    def page_bytes(self) -> int:
        size = self.element_bytes
        for extent in self.page_shape:
            size *= extent
        return size

    def of_layers(self, first: int, last: int, kv_heads: int) -> KVLayout:
        """What one stage of several keeps of the same pages: its own layers, numbered from its first one, in as many
        groups, some of which may have none of them. `kv_heads`: of one rank of that stage."""
        groups = tuple(
            KVGroup(group.index, tuple(layer - first for layer in group.layers if first <= layer < last), group.window)
            for group in self.groups
        )
        places = max(len(group.layers) for group in groups)
        return replace(self, groups=groups, layers_per_page=places, kv_heads=kv_heads)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens in one group that forgets nothing."""
        return -(-tokens // self.block_tokens)

    def peak_blocks(self, context_tokens: int, step_tokens: int) -> int:
        """Pages one sequence of `context_tokens` holds at most, computed in chunks of at most `step_tokens`."""
        return self.blocks_side_by_side(1, context_tokens, step_tokens)

    def blocks_side_by_side(self, sequences: int, context_tokens: int, step_tokens: int) -> int:
        """Pages that so many of them need so as to run at once, in steps of at most `step_tokens` for all together."""
        total, whole = 0, sequences * self.blocks_for(context_tokens)
        for group in self.groups:
            held = whole
            if group.window is not None:
                held = min(whole, window_blocks(sequences, group.window, step_tokens, self.block_tokens))
            total += held
        return total


def window_blocks(sequences: int, window: int, step_tokens: int, block_tokens: int) -> int:
    """Of one group that forgets, however long the sequences are.

    The tokens of a step are there once, whoever they belong to. Each sequence has the window before its own, with a
    block cut at each end, and beside others a block to grow into, without which nobody is admitted.
    """
    before = window - 1 + block_tokens - 1
    beside = sequences if sequences > 1 else 0
    return (sequences * before + step_tokens) // block_tokens + sequences + beside


def form_groups(
    windows: Sequence[int | None], stages: Sequence[tuple[int, int]] = ()
) -> tuple[tuple[KVGroup, ...], int]:
    """Groups for layers with these windows, and the layer places a page needs.

    The page size is that of the rarest kind of layer, so that the common kinds split into several whole
    groups: it wastes least, because only the last group of a kind can have empty places.

    `stages`: layers from a first to behind a last one that are kept apart from the others. Each deals its layers of a
    kind out to all groups of that kind, so that none has many layers in one page and none in another; places are then
    those of all stages together.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)
    places = min(len(layers) for layers in kinds.values())
    groups: list[KVGroup] = []
    for window, layers in kinds.items():
        if stages:
            parts = _dealt(layers, stages, -(-len(layers) // places))
        else:
            parts = [layers[first : first + places] for first in range(0, len(layers), places)]
        groups += [KVGroup(len(groups) + at, tuple(part), window) for at, part in enumerate(parts)]
    if stages:
        places = sum(
            max(sum(first <= layer < last for layer in group.layers) for group in groups) for first, last in stages
        )
    return tuple(groups), places


def _dealt(layers: Sequence[int], stages: Sequence[tuple[int, int]], count: int) -> list[list[int]]:
    """These layers in so many parts, of each stage as many in one as in another, or one more."""
    parts: list[list[int]] = [[] for _ in range(count)]
    turn = 0
    for first, last in stages:
        for layer in layers:
            if first <= layer < last:
                parts[turn % count].append(layer)
                turn += 1
    return parts
