"""How LoRA adapters lie in memory: sites, places and the bytes of them. Execution takes its sizes from here; no torch.

A site is one product of a layer. In a place each has both factors, those of fused matrices beside each other:

    A [parts · rank, columns]     qkv: the three of q, k and v one below the other, all over the same input
    B [rows of all parts, rank]   rows of q read the first `rank` inner numbers, rows of k the next, …

Ranks are padded with zeros to RANK_STEP: grouped products and the GPU's tiles want whole pieces.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from holdfast.checkpoints.lora.adapter import adaptable
from holdfast.footprint.cpu import ELEMENT_BYTES, MLP_TILE, Limits
from holdfast.footprint.gpu import whole_lines
from holdfast.footprint.identity_key import Same
from holdfast.models import ModelSpec

RANK_STEP = 16
PRODUCTS: Mapping[str, tuple[str, ...]] = {
    "qkv": ("q", "k", "v"),
    "o": (),
    "gate_up": ("gate", "up"),
    "up": (),
    "down": (),
}
"""What a layer multiplies with, and what it is fused of where a checkpoint keeps it apart."""


@dataclass(frozen=True, slots=True)
class Site:
    layer: int
    """By its place among those of the spec, which may be a stage's."""
    product: str
    parts: tuple[str, ...]
    """Canonical names of the matrices, in the order of their rows."""
    columns: int
    rows: tuple[int, ...]
    """Of each part."""

    def elements(self, rank: int) -> int:
        return rank * (len(self.parts) * self.columns + sum(self.rows))


def places_rank(max_rank: int) -> int:
    return -(-max_rank // RANK_STEP) * RANK_STEP


def sites(spec: ModelSpec) -> tuple[Site, ...]:
    """Everything of the model that can be adapted, in the order in which it lies in a place."""
    return _sites(Same(spec))


@lru_cache(maxsize=64)
def _sites(model: Same[ModelSpec]) -> tuple[Site, ...]:
    spec, found = model.held, list[Site]()
    shapes = {tensor.name: tensor.shape for tensor in adaptable(spec).values()}
    for place, layer in enumerate(spec.layers):
        gated = f"layers.{layer.index}.gate" in shapes
        for product, parts in PRODUCTS.items():
            if product == "up" and gated:
                continue
            name = f"layers.{layer.index}.{product}"
            names = [name] if name in shapes else [f"layers.{layer.index}.{part}" for part in parts]
            if names and all(one in shapes for one in names):
                rows = tuple(shapes[one][0] for one in names)
                found.append(Site(place, product, tuple(names), shapes[names[0]][1], rows))
    return tuple(found)


def place_elements(spec: ModelSpec, max_rank: int) -> int:
    rank = places_rank(max_rank)
    return sum(site.elements(rank) for site in sites(spec))


def copy_rows(cached: int, *, on_cpu: bool) -> int:
    """Adapters that are kept in RAM beside those in places; on a CPU one more, through which they change places."""
    return cached + 1 if on_cpu and cached else cached


def held_bytes(spec: ModelSpec, *, dtype: str, places: int, max_rank: int, copies: int = 0) -> int:
    """On the device: of places, and on a CPU of copies too."""
    return (places + copies) * place_elements(spec, max_rank) * ELEMENT_BYTES[dtype]


def step_bytes(spec: ModelSpec, step_tokens: int, *, dtype: str, max_rank: int) -> int:
    """On a CPU, of the widest product with all tokens adapted: their inputs in order, the inner numbers, what is
    added, and where each goes."""
    rank, size = places_rank(max_rank), ELEMENT_BYTES[dtype]
    widest = 0
    for site in sites(spec):
        tokens = step_tokens if site.product in ("qkv", "o") else min(step_tokens, MLP_TILE)
        widest = max(widest, tokens * (site.columns + len(site.parts) * rank + max(site.rows)) * size)
    return widest + step_tokens * 16


TILE_ROWS = 16
"""On a GPU: rows of one adapter that a program takes together."""
SPLITS, SPLIT_ROWS = 8, 256
"""Up to so many rows of a step, inputs are cut into so many parts: few rows alone would not fill the GPU."""


def most_tiles(rows: int, places: int) -> int:
    """That so many rows of so many adapters can make."""
    return min(rows, rows // TILE_ROWS + places)


def inner_elements(spec: ModelSpec, step_tokens: int, max_rank: int) -> int:
    """float32 numbers between the two factors, those of all parts of the inputs."""
    width = max(len(site.parts) for site in sites(spec)) * places_rank(max_rank)
    return max(step_tokens, SPLITS * min(step_tokens, SPLIT_ROWS)) * width


def packet_words(rows: int) -> int:
    """Which row comes where, and of each tile its place, its first row and its end."""
    return 4 * whole_lines(rows)


def gpu_bytes(spec: ModelSpec, limits: Limits, *, dtype: str, places: int, max_rank: int) -> int:
    """Of places, and of what a step needs beside them."""
    packets = packet_words(limits.max_num_seqs) + packet_words(limits.max_num_batched_tokens)
    between = inner_elements(spec, limits.max_num_batched_tokens, max_rank) * 4
    return held_bytes(spec, dtype=dtype, places=places, max_rank=max_rank) + between + packets * 4
