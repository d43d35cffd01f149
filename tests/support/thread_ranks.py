"""Ranks of one model as threads of this process, of one stage or several: the very runners, links and queues of several
processes, without their start."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch
from greedy_runs import assert_near_in_most, few_answers, layout_of, make_core

from holdfast.checkpoints import match
from holdfast.checkpoints.checkpoint import Checkpoint
from holdfast.engine.ranks.following import AskedPlaces
from holdfast.engine.ranks.messages import AdapterSettled
from holdfast.engine.ranks.runner import RankedRunner
from holdfast.execution.lora.slots import LoraLimits
from holdfast.execution.parallel.rank_link import RankLink
from holdfast.execution.parallel.segment import Segment, SegmentLayout
from holdfast.execution.parallel.share import RankShare
from holdfast.execution.parallel.sockets.spread import Spread
from holdfast.execution.runner import Runner, RunnerLimits
from holdfast.execution.weights.load import load_weights
from holdfast.footprint.cpu import bytes_by_name, head_rows
from holdfast.footprint.identity_key import Same
from holdfast.kvcache.groups import KVLayout, form_groups
from holdfast.models import ModelSpec
from holdfast.models.stages import rank_spec
from holdfast.planner.sizing.engine_weights import EngineWeights
from holdfast.planner.sizing.rank_shares import rank_shares
from holdfast.planner.sizing.shards import Placement, divide
from holdfast.planner.sizing.stages import divide_stages
from holdfast.records import StepPlan

CPU = torch.device("cpu")
DEADLINE_S = 60.0


class ThreadRanks:
    """`size`: ranks of each of so many `stages`, which are cut at `ends`, or (empty) evenly. `open_checkpoint`: of the
    whole model, for each rank anew. `runner`: as the engine loop has it."""

    def __init__(
        self,
        spec: ModelSpec,
        open_checkpoint: Callable[[], Checkpoint],
        limits: RunnerLimits,
        blocks: int,
        *,
        size: int = 1,
        stages: int = 1,
        ends: Sequence[int] = (),
        placement: Placement | None = None,
        lora: LoraLimits | None = None,
        **loading: Any,
    ) -> None:
        loading = {"expand": True, "compiled": False, **loading}
        stored = match(spec, open_checkpoint())
        how = {name: loading.get(name) for name in ("expand", "compiled", "quantize")}
        nbytes = bytes_by_name(spec, stored, dtype="float32", **how)
        self.stages = divide_stages(spec, nbytes, stages, ends)
        self.shards = divide(spec, stored, size, placement, loading.get("quantize")) if size > 1 else ()
        groups, places = form_groups(
            [layer.window for layer in spec.layers], [(stage.first, stage.last) for stage in self.stages]
        )
        kv_heads = sum(shard.kv_head_count for shard in self.shards) or spec.kv_heads
        self.layout = KVLayout(
            groups=groups,
            block_tokens=4,
            layers_per_page=places,
            kv_heads=kv_heads,
            head_dim=spec.head_dim,
            element_bytes=4,
        )
        rows = head_rows(spec.vocab_size, limits.max_num_seqs)
        shared = SegmentLayout(
            size * stages,
            4096,
            stages,
            _pages(limits.max_num_batched_tokens * spec.hidden_size * 4),
            _pages(rows * max(spec.vocab_size, spec.hidden_size) * 4),
        )
        first, self._segments = Segment(shared), list[Segment]()
        self._failed, self.failures = threading.Event(), list[BaseException]()
        self.spread = Spread(size * stages, stages)
        self.size, self._settled = size * stages, queue.SimpleQueue[tuple[int, AdapterSettled]]()
        self.runners, self._queues, self._threads = list[Runner](), list[queue.SimpleQueue[Any]](), []
        for rank in range(size * stages):
            segment = first if rank == 0 else Segment(shared, os.dup(first.descriptor))
            self._segments.append(segment)
            link = RankLink(segment, rank, self._look)
            shard = self.shards[link.place] if self.shards else None
            stage = self.stages[link.stage_index]
            own = rank_spec(spec, stage, shard)
            weights = load_weights(own, open_checkpoint(), dtype=torch.float32, device=CPU, whole=spec, **loading)
            share = None
            if link.collectives is not None:
                vocab, held = ([getattr(one, part) for one in self.shards] for part in ("vocab", "kv_heads"))
                share = RankShare(link.collectives, vocab, rows, torch.float32, held)
            layout = self.layout.of_layers(stage.first, stage.last, own.kv_heads)
            runner = Runner(
                own,
                weights,
                layout,
                limits,
                CPU,
                compiled=bool(loading["compiled"]),
                lora=lora,
                share=share,
                stage=link.stage,
                whole=spec,
            )
            runner.back_kv(blocks)
            self.runners.append(runner)
            if rank == 0:
                self.link = link
                continue
            self._queues.append(queue.SimpleQueue())
            following = (rank, runner, link, self._queues[-1])
            self._threads.append(threading.Thread(target=self._follow, args=following, daemon=True))
            self._threads[-1].start()
        self.pids: list[int] = []
        self.runner = RankedRunner(self.runners[0], self)  # type: ignore[arg-type]

    @property
    def weights_bytes(self) -> list[int]:
        return [runner.weights_bytes for runner in self.runners]

    def _follow(self, rank: int, runner: Runner, link: RankLink, orders: queue.SimpleQueue[Any]) -> None:
        asked = AskedPlaces()
        try:
            while (order := orders.get()) is not None:
                if isinstance(order, StepPlan):
                    asked.note(order)
                    for arrival in runner.execute(order).adapters:
                        self._settled.put((rank, AdapterSettled(asked.pop(arrival.place), arrival)))
                elif link.stage is not None and link.stage.is_first:
                    runner.note_sampled(*map(numpy.array, order))
        except BaseException as error:
            self.failures.append(error)
            self._failed.set()

    def _look(self, waited_s: float) -> None:
        if self._failed.is_set() or waited_s > DEADLINE_S:
            raise AssertionError(f"another rank has failed, or does not come: {self.failures}")

    # What a runner asks of the group of ranks.

    def send_plan(self, plan: StepPlan) -> None:
        for orders in self._queues:
            orders.put(plan)

    def tell_sampled(self, slots: list[int], tokens: list[int]) -> None:
        for orders in self._queues:
            orders.put((slots, tokens))

    def settled_adapters(self, wait_s: float) -> list[tuple[int, AdapterSettled]]:
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._settled.get(timeout=wait_s) if wait_s and not found else self._settled.get_nowait())
        return found

    def interrupt(self) -> None:
        self._failed.set()

    def close(self) -> None:
        for orders in self._queues:
            orders.put(None)
        for thread in self._threads:
            thread.join(DEADLINE_S)
        for runner in self.runners:
            runner.close()
        for segment in self._segments:
            segment.close()
        assert not self.failures


def _pages(nbytes: int) -> int:
    return -(-nbytes // 4096) * 4096


def assert_same_of_ranks(
    spec: ModelSpec,
    opened: Callable[[], Checkpoint],
    *,
    size: int = 1,
    stages: int = 1,
    placement: Placement | None = None,
    rounded: bool = False,
    in_python: bool = False,
    **loading: Any,
) -> None:
    """The tokens of one rank, or where inputs are `rounded` its log-probabilities, and as many weights as are planned.
    Compiled layers where one rank has them, if not `in_python`. `placement`: of whole experts."""
    limits, blocks = RunnerLimits(max_num_seqs=2, max_num_batched_tokens=24, max_model_len=64), 60
    weights = load_weights(spec, opened(), dtype=torch.float32, device=CPU, **loading)
    one = Runner(spec, weights, layout_of(spec), limits, CPU, compiled=loading["compiled"])
    one.back_kv(blocks)
    ranks = ThreadRanks(spec, opened, limits, blocks, size=size, stages=stages, placement=placement, **loading)
    if one._decoder._fused is not None and not in_python:
        assert all(member._decoder._fused is not None for member in ranks.runners), "ranks are as compiled as one"
    alone, together = make_core(one, one.layout, blocks), make_core(ranks.runner, ranks.layout, blocks, stages=stages)
    if rounded:
        assert_near_in_most(together, alone)
    else:
        assert few_answers(together) == few_answers(alone)
    held = EngineWeights(spec, match(spec, opened()), quantize=loading.get("quantize"))
    how = {"dtype": "float32", "expand": loading["expand"], "compiled": loading["compiled"]}
    planned = rank_shares(Same(held), size, stages, placement, **how)
    assert ranks.weights_bytes == [part.nbytes(**how) for part in planned.weights]
    ranks.close()
