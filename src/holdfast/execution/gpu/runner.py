"""Executes step plans on one GPU, one step ahead of the host: a plan is launched before the last one's tokens are read.

    submit: check, ids and tables to the device, launch, copy of the sampled ids begins      (host never waits)
    result: waits for that copy

Steps of single tokens are graphs; others are launched kernel by kernel. Decides nothing: that was the scheduler.
"""

from __future__ import annotations

import gc
from collections import deque

import numpy
import torch

from holdfast.errors import EngineError
from holdfast.execution.batch import RunnerLimits, SlotBuffers
from holdfast.execution.gpu.decoder import GpuDecoder
from holdfast.execution.gpu.graphs import DecodeGraphs
from holdfast.execution.gpu.kv_range import KVRange
from holdfast.execution.gpu.sampling import DeviceSampler
from holdfast.execution.gpu.slots import DeviceSlots
from holdfast.execution.gpu.step import DeviceStep, StepForms, is_decode
from holdfast.execution.rehearsal import heaviest_plan
from holdfast.execution.triton_kernels.tiles import prefill_tile_tokens
from holdfast.execution.weights import Weights
from holdfast.kvcache.groups import KVLayout
from holdfast.models import ModelSpec
from holdfast.records import StepPlan, StepResult

STEPS_AHEAD = 1


class GpuStep:
    """A step that was launched. Its tokens arrive in pinned memory."""

    def __init__(self, runner: GpuRunner, plan: StepPlan, step: DeviceStep | None, place: int) -> None:
        self._runner, self._plan, self._step, self._place = runner, plan, step, place
        self._result: StepResult | None = None

    def result(self) -> StepResult:
        if self._result is None:
            self._result = self._runner.finish(self._plan, self._step, self._place)
        return self._result


class GpuRunner:
    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        layout: KVLayout,
        limits: RunnerLimits,
        device: torch.device,
        *,
        kv_dtype: torch.dtype | None = None,
        graphs: bool = True,
    ) -> None:
        self.spec, self.layout, self.limits, self.device = spec, layout, limits, device
        self.kv_dtype = kv_dtype or weights.dtype
        self.weights_bytes = weights.nbytes
        self._books = SlotBuffers(limits, layout, spec.vocab_size)
        self._slots = DeviceSlots(layout, limits, device)
        tile_tokens = prefill_tile_tokens(spec.heads, spec.kv_heads, spec.head_dim, weights.dtype.itemsize)
        self._forms = StepForms(limits, device, tile_tokens)
        self._decoder: GpuDecoder | None = GpuDecoder(spec, weights, layout, limits, self._slots, device)
        rows = limits.max_num_seqs
        self._logits = torch.empty((rows, spec.vocab_size), dtype=weights.dtype, device=device)
        self._sampler = DeviceSampler(self._books, self._slots, rows, spec.vocab_size, device)
        pin = device.type == "cuda"
        self._sampled = [torch.empty(rows, dtype=torch.int32, pin_memory=pin) for _ in range(STEPS_AHEAD + 2)]
        self._arrived = [torch.cuda.Event() if pin else None for _ in self._sampled]
        self._next = 0
        self._unread: deque[GpuStep] = deque()
        self._kv: KVRange | None = None
        self._graphs = DecodeGraphs(rows, self._run_decode, device) if graphs and pin else None

    @property
    def buffers_bytes(self) -> int:
        return self._slots.nbytes + self._forms.nbytes

    @property
    def logits_bytes(self) -> int:
        return self._logits.nbytes

    @property
    def attention_backend(self) -> str:
        return "triton"

    @property
    def kv(self) -> KVRange:
        if self._kv is None:
            raise EngineError("the runner has no KV pages yet", fix="call back_kv before the first step")
        return self._kv

    @property
    def decoder(self) -> GpuDecoder:
        if self._decoder is None:
            raise EngineError("the runner is closed")
        return self._decoder

    def reserve_kv(self, most_blocks: int) -> None:
        self._kv = KVRange(self.layout, most_blocks, self.device, self.kv_dtype)

    def back_kv(self, blocks: int) -> None:
        """Memory behind so many pages, the null page included. What pages hold stays."""
        if self._kv is None:
            self.reserve_kv(blocks)
        self.kv.back(blocks)

    def submit(self, plan: StepPlan) -> GpuStep:
        with torch.inference_mode():
            self._books.apply(plan, self.kv.blocks)
            self._slots.apply(plan)
            for start in plan.starts:
                self._sampler.start(start)
            place = self._next
            launched = GpuStep(self, plan, self._launch(plan, place) if plan.rows else None, place)
        self._next = (place + 1) % len(self._sampled)
        for row in plan.rows:
            if row.samples:
                self._books.known[row.slot] += 1
        return launched

    def execute(self, plan: StepPlan) -> StepResult:
        return self.submit(plan).result()

    def _launch(self, plan: StepPlan, place: int) -> DeviceStep:
        rows = plan.rows
        if self._graphs is not None and is_decode(rows):
            size = self._graphs.padded(len(rows))
            step = self._forms.decode(rows, size)
            self._graphs.replay(size)
        else:
            step = self._forms.mixed(rows)
            self._run(step, len(step.order))
        count = len(step.order)
        if count:
            self._sampled[place][:count].copy_(self._sampler.sampled[:count], non_blocking=True)
            arrived = self._arrived[place]
            if arrived is not None:
                arrived.record()
        return step

    def _run_decode(self, size: int) -> None:
        with torch.inference_mode():
            self._run(self._forms.decode_places(size), size)

    def _run(self, step: DeviceStep, sampling: int) -> None:
        stream = self.decoder.forward(step.rows, self.kv.pages)
        if sampling:
            logits = self._logits[:sampling]
            self.decoder.logits(stream, step.sampling, logits)
            self._sampler.sample(logits, step.sampling_slots[:sampling], step.sampling_lengths[:sampling])

    def finish(self, plan: StepPlan, step: DeviceStep | None, place: int) -> StepResult:
        if step is None or not len(step.order):
            return StepResult(step_id=plan.step_id, token_ids=[])
        arrived = self._arrived[place]
        if arrived is not None:
            arrived.synchronize()
        count = len(step.order)
        tokens = numpy.empty(count, dtype=numpy.int32)
        tokens[step.order] = self._sampled[place][:count].numpy()
        return StepResult(step_id=plan.step_id, token_ids=tokens.tolist())

    def rehearse(self) -> None:
        """The heaviest step the limits allow, for real."""
        self.execute(heaviest_plan(self.limits, self.layout))
        self._books.known[:] = 0

    def capture(self) -> None:
        """The graphs that are needed first: of one row, and of as many as there may be. Others when they are needed."""
        if self._graphs is None:
            return
        for rows in (self.limits.max_num_seqs, 1):
            size = self._graphs.padded(rows)
            with torch.inference_mode():
                self._forms.decode([], size)
                self._graphs.replay(size)

    def close(self) -> None:
        """Gives everything back; the runner cannot be used afterwards."""
        if self._graphs is not None:
            self._graphs.close()
        self._decoder = None
        if self._kv is not None:
            self._kv.close()
            self._kv = None
        self._logits = torch.empty(0)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
