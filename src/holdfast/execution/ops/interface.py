"""What a device must offer the decoder, and the shape of what passes between. No arithmetic here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy
import numpy.typing
import torch

from holdfast.execution.kv_pool import KVPool
from holdfast.kvcache.groups import KVGroup

if TYPE_CHECKING:
    from holdfast.execution.native import CompiledSums
    from holdfast.execution.weights.decoder_weights import LayerWeights

Integers = numpy.typing.NDArray[numpy.int64]
Activation = Literal["silu", "gelu", "gelu_tanh"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    block_tokens: int
    places: int
    """Layer places of a page."""
    dtype: torch.dtype
    """Of queries and outputs; pages may be kept in another."""
    softcap: float = 0.0
    """Scores s become cap · tanh(s / cap); 0: they do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Views of one fused product [tokens, (heads + 2 · kv heads) · dim]."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    """[tokens, heads, dim] each."""
    query_rows: torch.Tensor
    """[tokens, heads · dim]"""
    rotated: torch.Tensor
    """Queries, then keys: what positions turn."""
    key_rows: torch.Tensor
    value_rows: torch.Tensor
    """[tokens, kv heads · dim]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """The rows of a batch as host arrays: single-token rows first, longest context first, then the others."""

    starts: Integers
    counts: Integers
    firsts: Integers
    """Where each row's tokens begin in the batch."""
    single: int
    """How many rows have one token."""


class AttentionBackend(Protocol):
    """Holds its own workspace. A plan is valid for the step it was made for, for all layers of its group."""

    name: str

    def plan(self, rows: StepRows, group: KVGroup, tables: Integers) -> Any:
        """`tables` [rows, blocks]: the pages of each row; entries a row cannot see may hold anything."""

    def run(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv: KVPool,
        place: int,
        plan: Any,
        out: torch.Tensor,
    ) -> None:
        """query [tokens, heads, dim], key and value [tokens, kv heads, dim] (already written) into out like query."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBuffers:
    """The decoder's buffers as one step sees them: cut once a step, not once a layer."""

    stream: torch.Tensor
    normed: torch.Tensor
    qkv: torch.Tensor
    heads: Heads
    """Views of qkv."""
    attended: torch.Tensor
    attended_heads: torch.Tensor
    gate_up: torch.Tensor
    inner: torch.Tensor
    """Both for as many tokens as the MLP takes at a time."""
    angles: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    """cos and sin, each [tokens, 1, dim / 2], of every rotation that layers have."""


class LayerScales(Protocol):
    """How pages hold the keys and values of each layer."""

    def of(self, layer: int) -> tuple[float, float]:
        """What keys and values are divided by."""

    def center(self, layer: int) -> torch.Tensor | None:
        """[kv heads · dim]: what keys are without, once they are divided; None: nothing."""


class FusedLayers(Protocol):
    layer_bytes: int
    """Of the weights of one layer."""

    def begin(self, step: StepBuffers, kv: KVPool, places: Sequence[int], scales: LayerScales) -> None:
        """The layers run next work on these, each with its place in the pages; valid until the next call."""

    def run(self, first: int, last: int, token_rows: torch.Tensor, plan: Any) -> None:
        """Adds layers first..last-1, all of one KV group, to the step's stream and writes their keys and values:
        divided by their scales, keys without their center then."""


class Fuse(Protocol):
    def __call__(
        self,
        layers: Sequence[LayerWeights],
        shape: AttentionShape,
        epsilon: float,
        activation: Activation,
        sums: CompiledSums | None = None,
        branch: torch.Tensor | None = None,
        /,
    ) -> FusedLayers | None:
        """`sums`, `branch` [tile, hidden]: of layers that several ranks share. None: these weights have no such
        form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ops:
    name: str
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float, torch.Tensor], None]
    """(x, weight, epsilon, out); out must not be x."""
    layer_norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, float, torch.Tensor], None]
    """(x, weight, bias, epsilon, out)"""
    norm_in_place: Callable[[torch.Tensor, torch.Tensor, float], None]
    """(x [tokens, ..., width], weight [width], epsilon): rms_norm of slices of a wider buffer."""
    rotate_and_store: Callable[
        [Heads, torch.Tensor, torch.Tensor, KVPool, int, torch.Tensor, torch.Tensor | None], None
    ]
    """(heads, cos, sin [tokens, 1, dim / 2], store, place, token rows, center): turns queries and keys in place, takes
    the center [kv heads · dim] off keys where there is one, and writes keys and values to the store; float8 pages may
    leave them rounded as they are kept."""
    gate: Callable[[torch.Tensor, Activation, torch.Tensor], None]
    """(gate beside up [tokens, 2·inner], activation, out [tokens, inner]); may use its input as scratch."""
    activate: Callable[[torch.Tensor, Activation], None]
    """In place."""
    make_attention: Callable[[AttentionShape, torch.device], AttentionBackend]
    fuse: Fuse | None = None
    """All operations of a layer as one, where the device has that for these weights. The parts above stay what it is
    tested against."""
