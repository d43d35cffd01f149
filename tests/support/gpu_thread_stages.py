"""Stages of one model as threads, each rank with the runner of a GPU that has one: kernels run in Triton's interpreter.
One rank runs at a time; others run while it waits for them. Rank 0 is the thread that asks, under the real
`RankedRunner`; lines between stages are fakes in the memory of the host, on which two may lie, as on real ones."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from gpu_thread_ranks import CPU, DEADLINE_S, TurnCollectives
from tiny_gpu import BLOCK_TOKENS, Tiny

from holdfast.checkpoints import match
from holdfast.engine.ranks.following import AskedPlaces
from holdfast.engine.ranks.messages import AdapterSettled
from holdfast.engine.ranks.runner import RankedRunner
from holdfast.execution.batch import RunnerLimits
from holdfast.execution.kv_pool import LARGEST
from holdfast.execution.lora.slots import LoraLimits
from holdfast.execution.parallel.gpu.share import GpuRankShare
from holdfast.execution.parallel.gpu.stage import GpuStage, rank_before, rank_behind
from holdfast.execution.parallel.gpu.staged_runner import StagedGpuRunner
from holdfast.execution.parallel.segment import Segment, SegmentLayout
from holdfast.execution.parallel.shared_memory import SharedMemoryCollectives
from holdfast.execution.parallel.sockets.spread import Spread
from holdfast.execution.weights.load import load_weights
from holdfast.footprint.cpu import kv_layout
from holdfast.models.stages import LayerStage, rank_spec
from holdfast.planner.sizing.shards import divide
from holdfast.records import StepPlan

SLOTS_OF_A_LINE = 2


class FakeLine:
    """From one rank to another."""

    def __init__(self) -> None:
        self.lying = deque[torch.Tensor]()


class FakeLines:
    """Of one rank. `turn`: held by the rank that runs. `check_others`: raises where waiting is in vain."""

    def __init__(
        self, before: FakeLine | None, behind: FakeLine | None, turn: Any, check_others: Callable[[], None]
    ) -> None:
        self._before, self._behind, self._turn, self._check_others = before, behind, turn, check_others

    def _wait(self, ready: Callable[[], bool]) -> None:
        until_s = time.monotonic() + DEADLINE_S
        while not ready():
            self._turn.release()
            time.sleep(0.001)
            self._turn.acquire()
            self._check_others()
            assert time.monotonic() < until_s, "a rank waits for ever"

    def put(self, numbers: torch.Tensor) -> None:
        line = self._behind
        assert line is not None
        assert numbers.is_contiguous()
        self._wait(lambda: len(line.lying) < SLOTS_OF_A_LINE)
        line.lying.append(numbers.clone())

    def take(self, out: torch.Tensor) -> None:
        line = self._before
        assert line is not None
        assert out.is_contiguous()
        self._wait(lambda: bool(line.lying))
        taken = line.lying.popleft()
        assert (taken.shape, taken.dtype) == (out.shape, out.dtype), "both ends speak of the same"
        out.copy_(taken)

    def limit(self, limit_s: float) -> None: ...

    def check(self) -> None: ...

    def give_up(self) -> None: ...

    def close(self) -> None: ...


class GpuThreadStages:
    """`each` ranks in every stage; `ends`: the layers that stages end before."""

    def __init__(
        self,
        tiny: Tiny,
        checkpoint: Any,
        ends: list[int],
        each: int,
        limits: RunnerLimits,
        blocks: int,
        lora: LoraLimits | None = None,
        *,
        kv_dtype: torch.dtype = torch.float32,
    ) -> None:
        spec, count = tiny.spec, len(ends)
        firsts = [0, *ends[:-1]]
        stages = [
            LayerStage(index=index, count=count, first=first, last=last)
            for index, (first, last) in enumerate(zip(firsts, ends, strict=True))
        ]
        shards = divide(spec, match(spec, checkpoint()), each) if each > 1 else (None,)
        stored = "fp8" if kv_dtype in LARGEST else "float32"
        ranges = [(stage.first, stage.last) for stage in stages]
        self.layout = kv_layout(spec, block_tokens=BLOCK_TOKENS, kv_dtype=stored, stages=ranges)
        self._turn, self._failures = threading.Lock(), list[BaseException]()
        segments = [self._segment(each) for _ in stages]
        self.lines = {rank: FakeLine() for rank in range(count * each) if rank_behind(rank, count, each) is not None}
        self.runners = list[StagedGpuRunner]()
        for rank in range(count * each):
            stage, shard = stages[rank // each], shards[rank % each]
            own, share = rank_spec(spec, stage, shard), None
            if shard is not None:
                segment = segments[stage.index]
                if rank % each:
                    segment = Segment(segment.layout, os.dup(segment.descriptor))
                sums = TurnCollectives(SharedMemoryCollectives(segment, rank % each, self._look), self._turn)
                share = GpuRankShare(
                    sums, [one.vocab for one in shards if one is not None], limits.max_num_seqs,
                    limits.max_num_batched_tokens, torch.float32, CPU,
                )  # fmt: skip
            weights = load_weights(
                own, checkpoint(), dtype=torch.float32, device=CPU, whole=spec, pack=False, expand=True
            )
            sender = rank_before(rank, count, each)
            lines = FakeLines(
                None if sender is None else self.lines[sender], self.lines.get(rank), self._turn, self._check_others
            )
            layout = self.layout.of_layers(stage.first, stage.last, own.kv_heads)
            runner = StagedGpuRunner(
                own, weights, layout, limits, CPU, kv_dtype=kv_dtype, share=share,
                stage=GpuStage(rank, count, each, lines), lora=lora, whole=spec,
            )  # fmt: skip
            runner.back_kv(blocks)
            self.runners.append(runner)
        self._asked = [AskedPlaces() for _ in self.runners]
        self._settled = queue.SimpleQueue[tuple[int, AdapterSettled]]()
        self._orders = [queue.SimpleQueue[Callable[[StagedGpuRunner], Any] | None]() for _ in self.runners[1:]]
        self._threads = [threading.Thread(target=self._follow, args=(rank,)) for rank in range(1, count * each)]
        for thread in self._threads:
            thread.start()
        self.size, self.told = len(self.runners), list[tuple[list[int], list[int]]]()
        self.spread = Spread(self.size, count)
        sums_there = object() if each > 1 else None
        self.link = SimpleNamespace(stage=self.runners[0].stage, collectives=sums_there)
        first: Any = _InTurn(self.runners[0], self._turn)
        group: Any = self
        self.ranked, self.most_under_way = RankedRunner(first, group), 0
        if kv_dtype in LARGEST:
            self.together(lambda runner: runner.calibrate_kv())
            self._await_all()

    @staticmethod
    def _segment(each: int) -> Segment:
        return Segment(SegmentLayout(each, 4096))

    def _look(self, waited_s: float) -> None:
        self._check_others()
        assert waited_s < DEADLINE_S, "a rank does not come"

    def _check_others(self) -> None:
        assert not self._failures, f"another rank has failed: {self._failures[0]!r}"

    def _follow(self, rank: int) -> None:
        while (order := self._orders[rank - 1].get()) is not None:
            with self._turn:
                try:
                    order(self.runners[rank])
                except BaseException as error:
                    self._failures.append(error)
                    return

    def together(self, work: Callable[[StagedGpuRunner], Any]) -> Any:
        """On every rank; what rank 0 returns."""
        for orders in self._orders:
            orders.put(work)
        with self._turn:
            return work(self.runners[0])

    def _await_all(self) -> None:
        """Until every rank has done what it was told: the interpreter is of one thread at a time."""
        done = [threading.Event() for _ in self._orders]
        for orders, event in zip(self._orders, done, strict=True):
            orders.put(lambda _, ready=event: ready.set())
        for event in done:
            assert event.wait(DEADLINE_S), self._failures

    # What `RankedRunner` asks of a group.

    def send_plan(self, plan: StepPlan) -> None:
        self.most_under_way = max(self.most_under_way, 1 + len(self.ranked._under_way))
        for rank, orders in enumerate(self._orders, 1):
            orders.put(lambda runner, rank=rank: self._submit(rank, runner, plan))

    def _submit(self, rank: int, runner: StagedGpuRunner, plan: StepPlan) -> None:
        self._asked[rank].note(plan)
        for arrival in runner.submit(plan).adapters:
            self._settled.put((rank, AdapterSettled(self._asked[rank].pop(arrival.place), arrival)))

    def tell_sampled(self, slots: list[int], tokens: list[int]) -> None:
        self.told.append((slots, tokens))
        for orders in self._orders:
            orders.put(lambda runner: runner.note_sampled(slots, tokens) if runner.stage.is_first else None)

    def settled_adapters(self, wait_s: float) -> list[tuple[int, AdapterSettled]]:
        found = list[tuple[int, AdapterSettled]]()
        with contextlib.suppress(queue.Empty):
            found.append(self._settled.get(timeout=wait_s) if wait_s else self._settled.get_nowait())
            while True:
                found.append(self._settled.get_nowait())
        return found

    def interrupt(self) -> None:
        self._check_others()

    def explained(self, error: Exception) -> Exception:
        return error

    def close(self) -> None:
        for orders in self._orders:
            orders.put(None)
        for thread in self._threads:
            thread.join(DEADLINE_S)


class _InTurn:
    """Rank 0's runner, which runs while nobody else does."""

    def __init__(self, runner: StagedGpuRunner, turn: Any) -> None:
        self._runner, self._turn = runner, turn
        self.most_blocks = runner.most_blocks

    def submit(self, plan: StepPlan, masks: Any = None) -> Any:
        with self._turn:
            step = self._runner.submit(plan, masks)
        return _StepInTurn(step, self._turn)

    def close(self) -> None: ...


class _StepInTurn:
    late = ()

    def __init__(self, step: Any, turn: Any) -> None:
        self._step, self._turn = step, turn

    def result(self) -> Any:
        with self._turn:
            return self._step.result()
