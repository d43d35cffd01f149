"""Logits after every token of a text, from Holdfast's decoder. Owns the wiring of one chunk; judges nothing.

`compiled` takes the kernels and the weights as an engine on this CPU would; without it torch multiplies in float32 with
every weight expanded, which is what the others are held against.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy
import numpy.typing
import torch

from holdfast.checkpoints import locate, open_checkpoint, spec_of
from holdfast.execution.batch import RunnerLimits, SlotBuffers
from holdfast.execution.kv_pool import LARGEST, KVPool
from holdfast.execution.ops import ops_for
from holdfast.execution.runner import Runner
from holdfast.execution.transformer import Transformer
from holdfast.execution.weights.decoder_weights import Weights
from holdfast.execution.weights.load import load_weights
from holdfast.kvcache.groups import KVLayout, form_groups
from holdfast.models import ModelSpec
from holdfast.records import Row, SamplingParams, SequenceStart, StepPlan, TableWrite

CPU = torch.device("cpu")
BLOCK_TOKENS = 16
LOGITS_ROWS = 64


def every_logit(
    model: Path | None,
    tokens: Sequence[int],
    *,
    compiled: bool,
    kv_dtype: torch.dtype = torch.float32,
    calibrated: bool = True,
    change: Callable[[ModelSpec, Weights], None] | None = None,
) -> numpy.typing.NDArray[numpy.float32]:
    """[tokens, vocabulary] of one chunk with all tokens in it. `model`: a GGUF file; None: the built-in model.
    `calibrated`: as an engine does with float8 pages; else their scales are 1. `change`: made to the weights first."""
    files = locate(None if model is None else str(model))
    spec = spec_of(files)
    with open_checkpoint(files) as checkpoint:
        weights = load_weights(
            spec, checkpoint, dtype=torch.float32, device=CPU, expand=not compiled, compiled=compiled
        )
    if change is not None:
        change(spec, weights)
    layout, count = _layout(spec, kv_dtype.itemsize), len(tokens)
    decoder = Transformer(spec, weights, layout, ops_for(CPU, compiled=compiled), count, CPU)
    limits = RunnerLimits(max_num_seqs=1, max_num_batched_tokens=count, max_model_len=count)
    if kv_dtype in LARGEST and calibrated:
        runner = Runner(spec, weights, layout, limits, CPU, kv_dtype=kv_dtype, compiled=compiled)
        runner.calibrate_kv()
        decoder.kv_scales = runner.kv_scales
    buffers = SlotBuffers(limits, layout, spec.vocab_size)
    blocks = layout.blocks_for(count)
    kv = KVPool(layout, 1 + blocks * len(layout.groups), CPU, kv_dtype)
    kv.clear(torch.arange(kv.blocks))
    start = SequenceStart(
        slot=0, request_id="text", token_ids=list(tokens), params=SamplingParams(temperature=0.0), prompt_length=count
    )
    writes = [
        TableWrite(0, group.index, 0, list(range(1 + group.index * blocks, 1 + (group.index + 1) * blocks)))
        for group in layout.groups
    ]
    plan = StepPlan(step_id=0, starts=[start], table_writes=writes, rows=[Row(0, 0, count, True)])
    found = numpy.empty((count, spec.vocab_size), dtype=numpy.float32)
    with torch.inference_mode():
        buffers.apply(plan, kv.blocks)
        batch = replace(buffers.form(plan, decoder.attention), sampling_tokens=torch.arange(count))
        hidden = decoder.forward(batch, kv)
        for first in range(0, count, LOGITS_ROWS):
            part = slice(first, min(first + LOGITS_ROWS, count))
            decoder.logits(hidden[part], torch.from_numpy(found[part]))
    return found


def _layout(spec: ModelSpec, element_bytes: int) -> KVLayout:
    groups, places = form_groups([layer.window for layer in spec.layers])
    return KVLayout(
        groups=groups,
        block_tokens=BLOCK_TOKENS,
        layers_per_page=places,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        element_bytes=element_bytes,
    )


def log_softmax(logits: numpy.typing.NDArray[numpy.float32]) -> numpy.typing.NDArray[numpy.float64]:
    wide = logits.astype(numpy.float64)
    wide -= wide.max(axis=1, keepdims=True)
    wide -= numpy.log(numpy.exp(wide).sum(axis=1, keepdims=True))
    return wide


def divergences(
    reference: numpy.typing.NDArray[numpy.float32], found: numpy.typing.NDArray[numpy.float32]
) -> numpy.typing.NDArray[numpy.float64]:
    """KL(reference || found) after every token, in nats."""
    expected, got = log_softmax(reference), log_softmax(found)
    divergence: numpy.typing.NDArray[numpy.float64] = (numpy.exp(expected) * (expected - got)).sum(axis=1)
    return divergence
