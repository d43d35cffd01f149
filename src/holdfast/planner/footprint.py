"""What a model costs on one device, term by term. Counts bytes; decides nothing.

The terms of a process that serves on a CPU:

    framework    interpreter, torch and its libraries, before the first tensor
    weights      as they lie in memory: expanded, or in the blocks of their file
    activations  the widest live set of the largest step, attention's workspace included
    logits       rows that sample x vocabulary, in the copies that sampling holds at once
    buffers      token ids and block tables of every slot
    kv_pool      pages
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from holdfast.checkpoints import StoredTensor
from holdfast.kvcache.groups import KVLayout, form_groups
from holdfast.models import ModelSpec
from holdfast.planner.layouts import memory_layout
from holdfast.units import MIB, format_bytes

ELEMENT_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}

FRAMEWORK_BYTES = 320 * MIB
"""Resident after importing torch's CPU build and making one product; 240-300 MiB seen."""

LOGITS_COPIES = 4
"""Raw, adjusted, probabilities and one sort or mask of them, all float32."""

EXPAND_SHARE = 0.25
"""Room to spare: expanded weights within this share of the budget."""

ATTENTION_WORKSPACE_BYTES = 64 * MIB
"""Scores and gathered pages are tiled to stay within this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int


def weights_bytes(
    spec: ModelSpec, stored: Mapping[str, StoredTensor] | None, *, dtype: str, expand: bool, compiled: bool = False
) -> int:
    """`stored` by canonical name; None for dummy weights. `compiled`: products come from compiled kernels."""
    total = 0
    for tensor in spec.tensors:
        kept = None if stored is None else stored.get(tensor.name)
        if kept is None and (tensor.optional or stored is not None):
            continue
        as_stored = None if kept is None else kept.layout
        layout = memory_layout(tensor, as_stored, dtype=dtype, expand=expand, compiled=compiled)
        total += prod(tensor.shape) * ELEMENT_BYTES[dtype] if kept is None or layout == dtype else kept.nbytes
    return total


def weight_sizes(spec: ModelSpec, stored: Mapping[str, StoredTensor], dtype: str) -> str:
    """Both, for people to read."""
    expanded = weights_bytes(spec, stored, dtype=dtype, expand=True)
    kept = weights_bytes(spec, stored, dtype=dtype, expand=False)
    return f"{format_bytes(expanded)} in {dtype} against {format_bytes(kept)} in blocks"


def expands(
    spec: ModelSpec, stored: Mapping[str, StoredTensor], *, dtype: str, fast_blocks: bool, budget_bytes: int
) -> tuple[bool, str]:
    """Whether quantized weights are expanded when nobody says, and why. `fast_blocks`: products with blocks as they
    are stored are the faster ones here."""
    sizes = weight_sizes(spec, stored, dtype)
    if fast_blocks:
        return False, f"compiled products read blocks as they are: fewer bytes, and faster: {sizes}"
    if weights_bytes(spec, stored, dtype=dtype, expand=True) <= EXPAND_SHARE * budget_bytes:
        return True, f"faster, and there is room to spare: {sizes}"
    return False, f"expanded they would take more than {EXPAND_SHARE:.0%} of the budget: {sizes}"


def kv_layout(spec: ModelSpec, *, block_tokens: int, kv_dtype: str) -> KVLayout:
    groups, places = form_groups([layer.window for layer in spec.layers])
    return KVLayout(
        groups=groups,
        block_tokens=block_tokens,
        layers_per_page=places,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        element_bytes=ELEMENT_BYTES[kv_dtype],
    )


def activations_bytes(spec: ModelSpec, limits: Limits, *, dtype: str) -> int:
    attention_width = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
    width = 4 * spec.hidden_size + attention_width + spec.heads * spec.head_dim + 3 * spec.intermediate_size
    return limits.max_num_batched_tokens * width * ELEMENT_BYTES[dtype] + ATTENTION_WORKSPACE_BYTES


def logits_bytes(spec: ModelSpec, limits: Limits) -> int:
    return LOGITS_COPIES * limits.max_num_seqs * spec.vocab_size * 4


def buffers_bytes(layout: KVLayout, limits: Limits) -> int:
    tables = len(layout.groups) * limits.max_num_seqs * layout.blocks_for(limits.max_model_len) * 4
    return tables + limits.max_num_seqs * limits.max_model_len * 4
