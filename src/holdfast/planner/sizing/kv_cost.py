"""What sequences cost in KV: a byte count for any length, and the lengths and numbers that some bytes hold.

    full and latent layers     grow with every token
    windowed layers            grow to the window and stop; the step in flight comes once, whoever it belongs to
    recurrent layers           hold a constant
    layers that share          cost nothing

Counts for one rank: kv heads are split over tensor-parallel ranks, or repeated when there are fewer. Knows no budget.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from holdfast.footprint.identity_key import Same
from holdfast.kvcache.groups import KVLayout, window_blocks
from holdfast.models import LayerSpec, ModelSpec

RECURRENT_BYTES = 4
"""An element of a recurrent state: engines keep it in float32."""
MOST_SHARE = 0.999
"""Of a sequence that does not fit whole."""


def largest(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """Up to `high` of what holds, found by halving; `low` is taken to hold."""
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCost:
    """Of one rank that holds some of the layers."""

    growing_bytes: int
    """A token, in the layers that forget nothing."""
    windows: tuple[tuple[int, int], ...]
    """(window, bytes a token) of the layers that forget."""
    fixed_bytes: int
    """A sequence, in recurrent states."""
    block_tokens: int
    step_tokens: int
    """Most tokens computed at once, of all sequences together: windowed layers hold them beside the windows."""

    @property
    def window_bytes(self) -> int:
        """What full windows hold of a sequence, the step in flight not counted."""
        return sum(window * size for window, size in self.windows)

    def sequence_bytes(self, tokens: int) -> int:
        """At most, of one sequence of that length, in whole blocks."""
        return self.needed_bytes(1, tokens)

    def needed_bytes(self, sequences: int, tokens: int) -> int:
        """Of so many sequences of that length side by side, in whole blocks."""
        blocks = sequences * -(-tokens // self.block_tokens)
        total = blocks * self.block_tokens * self.growing_bytes + sequences * self.fixed_bytes
        for window, size in self.windows:
            held = window_blocks(sequences, window, self.step_tokens, self.block_tokens)
            total += min(blocks, held) * self.block_tokens * size
        return total

    def longest(self, pool_bytes: int, most_tokens: int, *, sequences: int = 1) -> int:
        """The longest sequences of which so many fit; 0: none."""
        if not self.windows and self.growing_bytes:
            blocks = (pool_bytes // sequences - self.fixed_bytes) // (self.block_tokens * self.growing_bytes)
            return max(0, min(most_tokens, blocks * self.block_tokens))
        return largest(0, most_tokens, lambda tokens: self.needed_bytes(sequences, tokens) <= pool_bytes)

    def concurrency(self, pool_bytes: int, tokens: int) -> float:
        """Sequences of that length that fit side by side, with the share that is there of one more."""
        if not self.sequence_bytes(tokens):
            return float("inf")
        high = 1
        while self.needed_bytes(high, tokens) <= pool_bytes:
            high *= 2
        low = largest(high // 2, high - 1, lambda sequences: self.needed_bytes(sequences, tokens) <= pool_bytes)
        held = self.needed_bytes(low, tokens) if low else 0
        share = (pool_bytes - held) / (self.needed_bytes(low + 1, tokens) - held)
        return low + max(0.0, min(share, MOST_SHARE))

    def held_tokens(self, pool_bytes: int, sequence_tokens: int) -> int:
        """Tokens the pool holds: where every layer grows, whatever the sequences; else in sequences of that length."""
        if not self.windows and not self.fixed_bytes:
            block = self.growing_bytes * self.block_tokens
            return max(0, pool_bytes) // block * self.block_tokens if block else 0
        return int(self.concurrency(max(0, pool_bytes), sequence_tokens) * sequence_tokens)

    def tokens(self, pool_bytes: int, sequence_tokens: int) -> int:
        """As vLLM counts and prints it: a step's tokens in the windows of every sequence."""
        one = self.sequence_bytes(sequence_tokens)
        if not one or (not self.windows and not self.fixed_bytes):
            return self.held_tokens(pool_bytes, sequence_tokens)
        return int(max(0, pool_bytes) / one * sequence_tokens)


def layout_cost(layout: KVLayout, step_tokens: int) -> KVCost:
    """Of this engine's pool, in whole pages: a group may leave places of its pages empty."""
    windows, each = dict[int, int](), layout.page_bytes // layout.block_tokens
    for group in layout.groups:
        if group.window is not None:
            windows[group.window] = windows.get(group.window, 0) + each
    return KVCost(
        growing_bytes=each * sum(group.window is None for group in layout.groups),
        windows=tuple(sorted(windows.items())),
        fixed_bytes=0,
        block_tokens=layout.block_tokens,
        step_tokens=step_tokens,
    )


def kv_cost(
    spec: ModelSpec,
    *,
    element_bytes: int,
    state_bytes: int,
    tensor_parallel: int = 1,
    layers: Sequence[int] | None = None,
    block_tokens: int = 16,
    step_tokens: int = 0,
) -> KVCost:
    """`state_bytes`: of an element of a short convolution's inputs."""
    chosen = range(len(spec.layers)) if layers is None else layers if isinstance(layers, range) else tuple(layers)
    growing, windows, fixed = _sums(Same(spec), element_bytes, state_bytes, tensor_parallel, chosen)
    return KVCost(
        growing_bytes=growing,
        windows=windows,
        fixed_bytes=fixed,
        block_tokens=block_tokens,
        step_tokens=step_tokens,
    )


@lru_cache(maxsize=1024)
def _sums(
    model: Same[ModelSpec],
    element_bytes: int,
    state_bytes: int,
    tensor_parallel: int,
    layers: range | tuple[int, ...],
) -> tuple[int, tuple[tuple[int, int], ...], int]:
    """Bytes that grow with every token, those of each window, and those of a sequence."""
    spec, growing, fixed = model.held, 0, 0
    windows: dict[int, int] = {}
    for index in layers:
        layer = spec.layers[index]
        size = rank_bytes(spec, layer, tensor_parallel, element_bytes)
        if layer.window is None:
            growing += size
        elif size:
            windows[layer.window] = windows.get(layer.window, 0) + size
        if layer.state is not None:
            recurrent = layer.state.recurrent_elements * RECURRENT_BYTES
            fixed += -(-(recurrent + layer.state.convolution_elements * state_bytes) // tensor_parallel)
    return growing, tuple(sorted(windows.items())), fixed


def rank_bytes(spec: ModelSpec, layer: LayerSpec, ranks: int, element_bytes: int) -> int:
    """Keys and values of a token in one layer on one rank. A latent is whole on every rank."""
    whole = spec.kv_bytes(layer, element_bytes)
    if layer.latent is not None or ranks == 1 or whole == 0:
        return whole
    kv_heads = spec.kv_heads if layer.kv_heads is None else layer.kv_heads
    return whole // kv_heads * max(1, kv_heads // ranks)
