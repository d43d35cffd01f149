"""What a step holds for experts beside their weights, on a CPU and on a GPU: execution takes its sizes from here.

A token goes to `per_token` experts, so that there is a line for each of these pairs. Pure arithmetic: no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.models import ExpertsSpec, ModelSpec
from holdfast.units import MIB

TILE_BYTES = 8 * MIB
"""Of the tile that quantized experts are expanded to where there are no compiled products."""
TILE_COPIES = 4
"""Quants as they lie, their expansion, it in another number type, and the product of a tile."""

GPU_TOKENS = 8192
"""That a GPU's experts take at a time: enough that reading every expert is not what takes longest, and that tiles of a
line are full. 128 experts of which a token takes 8 took 2 x 1.08 ms for twice 4,096 tokens of a layer on an H200, and
1.68 ms for 8,192."""


SHARE_COLUMNS = 8
"""Of the buffer of an expert of all tokens, for the one number that says how much it counts: rows begin at whole lines,
as products ask for."""


def mlp_width(spec: ModelSpec) -> int:
    """Of the MLPs without experts; 0: there are none, nor buffers for them."""
    return spec.intermediate_size if any(layer.experts is None for layer in spec.layers) else 0


def kinds(spec: ModelSpec) -> tuple[ExpertsSpec, ...]:
    """Layers whose experts are alike use the same buffers."""
    return tuple(dict.fromkeys(layer.experts for layer in spec.layers if layer.experts is not None))


def cpu_bytes(spec: ModelSpec, tokens: int, element_bytes: int, *, compiled: bool) -> int:
    """`tokens`: that the MLP takes at a time. Compiled experts of one kind keep their buffers beside another's."""
    held = [_cpu_bytes(spec, experts, tokens, element_bytes, compiled) for experts in kinds(spec)]
    return sum(held) if compiled else max(held, default=0)


def _cpu_bytes(spec: ModelSpec, experts: ExpertsSpec, tokens: int, element_bytes: int, compiled: bool) -> int:
    pairs, lines, inner = tokens * experts.per_token, tokens * experts.most_here, experts.intermediate_size
    shared = tokens * (3 * experts.shared_intermediate_size + spec.hidden_size + 1) * element_bytes
    if not experts.shared_intermediate_size:
        shared = 0
    routing = tokens * experts.count * element_bytes + pairs * 12 + (experts.count + 1) * 4
    if compiled:
        return lines * (spec.hidden_size + 3 * inner) * element_bytes + routing + shared
    # Lines and gate and up beside their parts, or what comes of them, its weights and a product: the larger counts.
    computed = lines * (2 * spec.hidden_size + 4 * inner) * element_bytes
    sorting = tokens * experts.count * 8 + pairs * 40
    return computed + routing + sorting + shared + TILE_COPIES * TILE_BYTES


def gpu_bytes(spec: ModelSpec, tokens: int, element_bytes: int) -> int:
    """All kinds keep their buffers; inputs that are rounded lie in them too. Of a rank with whole experts there is room
    for all pairs, as if every token chose those: how tokens are spread changes no bytes."""
    tokens = min(tokens, GPU_TOKENS)
    total = 0
    for experts in kinds(spec):
        pairs = tokens * experts.per_token
        lines = (tokens + 1) * len(experts.numbers) * 4 + pairs * 4
        homes = experts.count * 4 if experts.here else 0
        columns = spec.hidden_size + experts.intermediate_size
        beside = experts.count + 3 * experts.shared_intermediate_size + SHARE_COLUMNS
        total += lines + homes + (pairs * columns + tokens * beside) * element_bytes
    return total


LINE_BYTES = 64
"""Of a cache line. What one side writes while the other polls lies in lines of its own."""
EXCHANGE_BUFFERS = 2


@dataclass(frozen=True, slots=True)
class ExchangeLayout:
    """Where things lie in the pinned memory through which a GPU has experts computed by the host. All offsets count
    bytes; every part begins at a cache line:

        requests  int32, one a line    the GPU writes a step's number there last, when all below is there
        replies   int32, one a line    the host writes it there when y is
        buffer 0, buffer 1:            of layers with even and with odd numbers; a step has one layer after the other
            chosen   int32 [tokens, per_token]      experts the host is to compute; -1: none, the GPU has that one
            weights  float32 [tokens, per_token]    of these pairs
            x        [tokens, hidden]               in the number type the GPU computes in
            y        float32 [tokens, hidden]       the weighted sums of the host's experts; 0 where it has none

    Layers are numbered from 0 among those that the host computes for. With fewer tokens than there is room for, rows
    are as long, and those beyond are neither read nor written.
    """

    layers: int
    tokens: int
    """At most, in a step."""
    per_token: int
    """Experts that a token chooses; 1: an MLP without experts is one that every token chooses."""
    hidden: int
    element_bytes: int
    """Of x."""

    def request(self, layer: int) -> int:
        return layer * LINE_BYTES

    def reply(self, layer: int) -> int:
        return (self.layers + layer) * LINE_BYTES

    def chosen(self, layer: int) -> int:
        return 2 * self.layers * LINE_BYTES + layer % EXCHANGE_BUFFERS * self._buffer_bytes

    def weights(self, layer: int) -> int:
        return self.chosen(layer) + self._pairs_bytes

    def x(self, layer: int) -> int:
        return self.weights(layer) + self._pairs_bytes

    def y(self, layer: int) -> int:
        return self.x(layer) + _lines(self.tokens * self.hidden * self.element_bytes)

    @property
    def nbytes(self) -> int:
        return self.chosen(0) + EXCHANGE_BUFFERS * self._buffer_bytes

    @property
    def _pairs_bytes(self) -> int:
        return _lines(self.tokens * self.per_token * 4)

    @property
    def _buffer_bytes(self) -> int:
        x, y = (_lines(self.tokens * self.hidden * each) for each in (self.element_bytes, 4))
        return 2 * self._pairs_bytes + x + y


def _lines(nbytes: int) -> int:
    return -(-nbytes // LINE_BYTES) * LINE_BYTES
