"""One rank's runner on a CPU: weights loaded, buffers allocated, the heaviest step measured. The same for the only rank
of an engine and for each of several. Starts no process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.checkpoints import ModelFiles, open_checkpoint
from holdfast.config import EngineConfig
from holdfast.engine.ranks.messages import Measured
from holdfast.engine.startup.streamed_layers import layer_slots
from holdfast.execution.device import CPU, DTYPES, KV_DTYPES, compute_threads, warm_up
from holdfast.execution.lora.slots import LoraLimits
from holdfast.execution.parallel.segment import SegmentLayout
from holdfast.execution.parallel.share import RankShare
from holdfast.execution.runner import ProfileRun, Runner, RunnerLimits
from holdfast.execution.weights.load import load_weights
from holdfast.execution.weights.products_by import torch_share
from holdfast.footprint.cpu import SLOT_PAGE_BYTES, head_rows
from holdfast.hardware import Resident, memory, resident
from holdfast.models import ModelSpec
from holdfast.models.stages import rank_spec
from holdfast.observability.decisions import Decision
from holdfast.planner import Plan
from holdfast.planner.fit.result import EngineChoices

if TYPE_CHECKING:
    from holdfast.execution.parallel.collectives import Collectives
    from holdfast.execution.parallel.pipeline import PipelineStage

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
    rank: int = 0,
    collectives: Collectives | None = None,
    stage: PipelineStage | None = None,
) -> LoadedRank:
    """`rank`: which of the plan's. `collectives`: with the others of its stage; None: there are none. `stage`: what it
    has to do with other stages; None: there are none."""
    share, dtype = None, DTYPES[plan.dtype]
    own, layout = rank_spec(spec, *plan.engine.part_of(rank)), plan.engine.layout_of(rank)
    if collectives is not None:
        rows = head_rows(spec.vocab_size, plan.limits.max_num_seqs)
        vocab, kv_heads = zip(*((shard.vocab, shard.kv_heads) for shard in plan.engine.shards), strict=True)
        share = RankShare(collectives, vocab, rows, dtype, kv_heads)
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
        stage=stage,
        whole=spec,
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
        free_bytes=memory().available_bytes,
    )


def segment_layout(engine: EngineChoices) -> SegmentLayout:
    """Of the memory that the ranks of this plan share. Ranks on GPUs have plans and orders there, and no numbers."""
    if engine.rank_gpus:
        return SegmentLayout(engine.rank_count, SLOT_PAGE_BYTES)
    stages = max(1, len(engine.stages))
    return SegmentLayout(engine.rank_count, engine.slot_bytes, stages, engine.stream_bytes, engine.answer_bytes)


def threads_of(cores: int, size: int, rank: int) -> int:
    """Of the cores that compute: as many for each rank, those left over for the first ones."""
    return max(1, cores // size + (rank < cores % size))
