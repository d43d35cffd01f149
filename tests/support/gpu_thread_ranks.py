"""Ranks of one model as threads, each with the runner of a GPU: kernels run in Triton's interpreter.
One rank runs at a time; others run while it waits for them. The collectives are those of CPU ranks."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from tiny_gpu import Tiny

from holdfast.checkpoints import match
from holdfast.checkpoints.checkpoint import Checkpoint
from holdfast.engine.ranks.following import AskedPlaces
from holdfast.engine.ranks.messages import AdapterSettled
from holdfast.engine.ranks.runner import JoinedAdapters
from holdfast.execution.batch import RunnerLimits
from holdfast.execution.gpu.runner import GpuRunner
from holdfast.execution.kv_pool import LARGEST
from holdfast.execution.lora.slots import LoraLimits
from holdfast.execution.parallel.gpu.row_norms import GpuRowNorms
from holdfast.execution.parallel.gpu.share import GpuRankShare
from holdfast.execution.parallel.segment import Segment, SegmentLayout
from holdfast.execution.parallel.shared_memory import SharedMemoryCollectives
from holdfast.execution.weights.load import load_weights
from holdfast.models.shards import shard_spec
from holdfast.planner.sizing.shards import divide
from holdfast.records import StepPlan, StepResult, TokenMasks

CPU = torch.device("cpu")
DEADLINE_S = 120.0


class TurnCollectives:
    """`turn`: held by the rank that runs."""

    name = "turns"

    def __init__(self, own: SharedMemoryCollectives, turn: threading.Lock) -> None:
        self._own, self._turn, self.rank, self.size = own, turn, own.rank, own.size
        self.calls: list[tuple[str, tuple[int, ...]]] = []

    @contextmanager
    def _others_run(self, name: str, x: torch.Tensor) -> Iterator[None]:
        self.calls.append((name, tuple(x.shape[:1])))
        self._turn.release()
        try:
            yield
        finally:
            self._turn.acquire()

    def all_reduce(self, x: torch.Tensor) -> None:
        assert x.is_contiguous()
        with self._others_run("all_reduce", x):
            self._own.all_reduce(x)

    def add_reduced(self, x: torch.Tensor, onto: torch.Tensor) -> None:
        self.all_reduce(x)
        onto.add_(x)

    def gather(self, part: torch.Tensor, widths: Sequence[int], out: torch.Tensor | None) -> None:
        assert part.is_contiguous()
        with self._others_run("gather", part):
            self._own.gather(part, widths, out)

    def broadcast(self, x: torch.Tensor) -> None:
        with self._others_run("broadcast", x):
            self._own.broadcast(x)

    def limit(self, limit_s: float) -> None: ...

    def check(self) -> None: ...

    def give_up(self) -> None: ...

    def close(self) -> None:
        self._own.close()


class GpuThreadRanks:
    """A runner as the engine loop has it."""

    def __init__(
        self,
        tiny: Tiny,
        checkpoint: Any,
        size: int,
        limits: RunnerLimits,
        blocks: int,
        lora: LoraLimits | None = None,
        *,
        kv_dtype: torch.dtype = torch.float32,
        **loading: Any,
    ) -> None:
        spec, layout = tiny.spec, tiny.layout(kv_dtype.itemsize)
        self._asked, self._settled = [AskedPlaces() for _ in range(size)], list[tuple[int, AdapterSettled]]()
        self._adapters = JoinedAdapters(size, lambda wait_s: [self._settled.pop(0) for _ in range(len(self._settled))])
        self.shards = divide(spec, match(spec, checkpoint()), size, quantize=loading.get("quantize"))
        shared, self._turn, self._failed = SegmentLayout(size, 4096), threading.Lock(), threading.Event()
        first, self.runners, self.collectives = Segment(shared), list[GpuRunner](), list[TurnCollectives]()
        self._pool = ThreadPoolExecutor(size)
        for shard in self.shards:
            own, segment = (
                shard_spec(spec, shard),
                first if shard.rank == 0 else Segment(shared, os.dup(first.descriptor)),
            )
            turns = TurnCollectives(SharedMemoryCollectives(segment, shard.rank, self._look), self._turn)
            weights = load_weights(
                own,
                checkpoint(),
                dtype=torch.float32,
                device=CPU,
                whole=spec,
                pack=False,
                **{"expand": True, **loading},
            )
            tokens, norms = limits.max_num_batched_tokens, None
            if spec.decoder.query_key_norm == "whole":
                norms = GpuRowNorms(turns, spec, [one.kv_heads for one in self.shards], tokens, CPU)
            share = GpuRankShare(
                turns, [one.vocab for one in self.shards], limits.max_num_seqs, tokens, torch.float32, CPU, norms,
            )  # fmt: skip
            pages = replace(layout, kv_heads=own.kv_heads)
            runner = GpuRunner(own, weights, pages, limits, CPU, kv_dtype=kv_dtype, share=share, lora=lora, whole=spec)
            self.runners.append(runner)
            self.collectives.append(turns)
        if kv_dtype in LARGEST:
            self.together(lambda rank: self.runners[rank].calibrate_kv())
        for runner in self.runners:
            runner.back_kv(blocks)

    def _look(self, waited_s: float) -> None:
        if self._failed.is_set() or waited_s > DEADLINE_S:
            raise AssertionError("another rank has failed, or does not come")

    def together(self, work: Any) -> list[Any]:
        """`work(rank)` on every rank at once."""

        def run(rank: int) -> Any:
            with self._turn:
                try:
                    return work(rank)
                except BaseException:
                    self._failed.set()
                    raise

        running = [self._pool.submit(run, rank) for rank in range(len(self.runners))]
        problems = [error for one in running if (error := one.exception()) is not None]
        if problems:
            raise next((error for error in problems if not isinstance(error, AssertionError)), problems[0])
        return [one.result() for one in running]

    def submit(self, plan: StepPlan, masks: TokenMasks | None = None) -> Any:
        self._adapters.note(plan)

        def run(rank: int) -> Any:
            step = self.runners[rank].submit(plan, masks if rank == 0 else None)
            if rank == 0:
                return _Done(step.result(), step.late)
            self._asked[rank].note(plan)
            self._settled += [(rank, AdapterSettled(self._asked[rank].pop(one.place), one)) for one in step.adapters]
            return None

        return self._adapters.joined(plan, self.together(run)[0])

    @property
    def most_blocks(self) -> int:
        return self.runners[0].most_blocks

    def close(self) -> None:
        self._pool.shutdown()
        for one in self.collectives:
            one.close()


class _Done:
    def __init__(self, result: StepResult, late: Sequence[int]) -> None:
        self._result, self.late = result, late

    def result(self) -> StepResult:
        return self._result


def checkpoint_of(tiny: Tiny) -> Any:
    from holdfast.checkpoints.formats import safetensors

    return lambda: Checkpoint(safetensors.read_headers(sorted(tiny.folder.glob("*.safetensors"))), "safetensors")
