"""One rank's runner on a CPU: weights loaded, buffers allocated, the heaviest step measured. The same for the only rank
of an engine and for each of several. Starts no process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from holdfast.checkpoints import ModelFiles, open_checkpoint
from holdfast.config import EngineConfig
from holdfast.engine.ranks.messages import Measured
from holdfast.engine.startup.streamed_layers import layer_slots
from holdfast.execution.device import CPU, DTYPES, KV_DTYPES, compute_threads, warm_up
from holdfast.execution.lora.slots import LoraLimits
from holdfast.execution.parallel.share import RankShare
from holdfast.execution.runner import ProfileRun, Runner, RunnerLimits
from holdfast.execution.weights.load import load_weights
from holdfast.execution.weights.products_by import torch_share
from holdfast.footprint.cpu import head_rows
from holdfast.hardware import Resident, resident
from holdfast.models import ModelSpec
from holdfast.models.shards import shard_spec
from holdfast.observability.decisions import Decision
from holdfast.planner import Plan

if TYPE_CHECKING:
    from holdfast.execution.parallel.collectives import Collectives

TensorsLoaded = Callable[[int, int], None]
"""(tensors done, tensors in all)"""


@dataclass(frozen=True, slots=True)
class LoadedRank:
    runner: Runner
    before: Resident
    """What the process held before its first weight, and with them."""
    loaded: Resident
    decisions: tuple[Decision, ...] = ()


def load_rank(
    config: EngineConfig,
    files: ModelFiles,
    spec: ModelSpec,
    plan: Plan,
    progress: TensorsLoaded,
    *,
    threads: int,
    beat: Callable[[], None] | None = None,
    collectives: Collectives | None = None,
) -> LoadedRank:
    """`collectives`: with the other ranks of the plan's shards; None: there are none."""
    own, layout, share, dtype = spec, plan.engine.layout, None, DTYPES[plan.dtype]
    if collectives is not None:
        shards = plan.engine.shards
        own = shard_spec(spec, shards[collectives.rank])
        layout = replace(layout, kv_heads=own.kv_heads)
        rows = head_rows(spec.vocab_size, plan.limits.max_num_seqs)
        share = RankShare(collectives, [shard.vocab for shard in shards], rows, dtype)
    stored = contextlib.nullcontext() if config.load_format == "dummy" else open_checkpoint(files)
    with stored as checkpoint, compute_threads(threads).computing():
        warm_up(dtype, CPU)
        before = held()
        progress(0, 0)
        slots = layer_slots(config, plan)
        weights = load_weights(
            own,
            checkpoint,
            dtype=dtype,
            device=CPU,
            expand=plan.engine.expand_weights,
            compiled=plan.engine.compiled,
            quantize=plan.engine.quantize,
            progress=progress,
            slots=slots,
            whole=spec,
        )
    by_kernels = plan.engine.compiled_attention and not config.lora_places
    runner = Runner(
        own,
        weights,
        layout,
        RunnerLimits.of(plan.limits, config.lora_places),
        CPU,
        kv_dtype=KV_DTYPES[plan.kv_dtype],
        compiled=plan.engine.compiled_attention,
        lora=LoraLimits.of(config),
        beat=beat,
        threads=compute_threads(threads, torch_share(weights) if by_kernels else 1.0),
        share=share,
    )
    return LoadedRank(runner, before, held(), () if slots is None else (slots.decision(),))


def held() -> Resident:
    return resident() or Resident(0, 0)


def measured(rank: LoadedRank, profile: ProfileRun) -> Measured:
    """What it took, by term, and what no term accounts for."""
    runner, before = rank.runner, rank.before
    terms = {
        "weights": runner.weights_bytes,
        "layer_slots": runner.layer_slots_bytes,
        "scratch": profile.scratch_bytes,
        "activations": profile.activations_bytes,
        "logits": profile.logits_bytes,
        "adapters": runner.adapters_bytes,
    }
    gained = held().now_bytes - before.now_bytes
    nameless = gained - sum(terms.values()) - runner.buffers_bytes + profile.given_back_bytes
    base = {"framework": before.now_bytes - before.files_bytes, "libraries": before.files_bytes}
    return Measured(
        terms=terms | base | {"buffers": runner.buffers_bytes},
        nameless_bytes=nameless,
        given_back_bytes=profile.given_back_bytes,
        peak_bytes=rank.loaded.peak_bytes,
    )


def threads_of(cores: int, size: int, rank: int) -> int:
    """Of the cores that compute: as many for each rank, those left over for the first ones."""
    return max(1, cores // size + (rank < cores % size))
