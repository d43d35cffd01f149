"""Ranks of one model as threads of this process: the very runners and collectives of several processes, without their
start. A runner as the engine loop has it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from holdfast.checkpoints import match
from holdfast.checkpoints.checkpoint import Checkpoint
from holdfast.execution.parallel.segment import Segment, SegmentLayout
from holdfast.execution.parallel.share import RankShare
from holdfast.execution.parallel.shared_memory import SharedMemoryCollectives
from holdfast.execution.runner import Runner, RunnerLimits
from holdfast.execution.weights.load import load_weights
from holdfast.footprint.cpu import head_rows
from holdfast.kvcache.groups import KVLayout
from holdfast.models import ModelSpec
from holdfast.models.shards import shard_spec
from holdfast.planner.sizing.shards import Placement, divide
from holdfast.records import StepPlan, StepResult, TokenMasks

CPU = torch.device("cpu")
DEADLINE_S = 60.0


class ThreadRanks:
    """`open_checkpoint`: of the whole model, for each rank anew."""

    def __init__(
        self,
        spec: ModelSpec,
        open_checkpoint: Callable[[], Checkpoint],
        size: int,
        layout: KVLayout,
        limits: RunnerLimits,
        blocks: int,
        *,
        dtype: torch.dtype = torch.float32,
        slot_bytes: int = 4096,
        placement: Placement | None = None,
        **loading: Any,
    ) -> None:
        self.layout, self.shards = layout, divide(spec, match(spec, open_checkpoint()), size, placement)
        self._failed = threading.Event()
        shared = SegmentLayout(size, slot_bytes)
        first = Segment(shared)
        self._pool = ThreadPoolExecutor(size)
        rows = head_rows(spec.vocab_size, limits.max_num_seqs)
        self.runners = []
        for shard in self.shards:
            own = shard_spec(spec, shard)
            segment = first if shard.rank == 0 else Segment(shared, first.descriptor)
            collectives = SharedMemoryCollectives(segment, shard.rank, self._look)
            weights = load_weights(
                own, open_checkpoint(), dtype=dtype, device=CPU, whole=spec, **{"expand": True, **loading}
            )
            runner = Runner(
                own,
                weights,
                replace(layout, kv_heads=own.kv_heads),
                limits,
                CPU,
                compiled=bool(loading.get("compiled")),
                share=RankShare(collectives, [one.vocab for one in self.shards], rows, dtype),
            )
            runner.back_kv(blocks)
            self.runners.append(runner)

    def _look(self, waited_s: float) -> None:
        if self._failed.is_set() or waited_s > DEADLINE_S:
            raise AssertionError("another rank has failed, or does not come")

    def execute(self, plan: StepPlan, masks: TokenMasks | None = None) -> StepResult:
        def run(rank: int) -> StepResult:
            try:
                return self.runners[rank].execute(plan, masks if rank == 0 else None)
            except BaseException:
                self._failed.set()
                raise

        running = [self._pool.submit(run, rank) for rank in range(len(self.runners))]
        problems = [error for one in running if (error := one.exception()) is not None]
        if problems:
            raise next((error for error in problems if not isinstance(error, AssertionError)), problems[0])
        return running[0].result()

    def submit(self, plan: StepPlan, masks: TokenMasks | None = None) -> _Done:
        done: Future[StepResult] = Future()
        done.set_result(self.execute(plan, masks))
        return _Done(done)

    @property
    def weights_bytes(self) -> list[int]:
        return [runner.weights_bytes for runner in self.runners]

    def close(self) -> None:
        self._pool.shutdown()
        for runner in self.runners:
            runner.close()


class _Done:
    late = ()

    def __init__(self, done: Future[StepResult]) -> None:
        self.result = done.result
