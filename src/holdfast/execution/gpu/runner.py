"""Executes step plans on one GPU, one step ahead of the host: a plan is launched before the last one's tokens are read.

    submit: check, ids and tables to the device, launch, copy of the sampled ids begins      (host never waits, but
            for the masks of answers that must follow a grammar, while the decoder runs)
    result: waits for that copy

Steps of single tokens are graphs while no layer comes; others are launched kernel by kernel. Decides nothing: that was
the scheduler.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import numpy
import torch

from holdfast.errors import EngineError
from holdfast.execution.batch import RunnerLimits, SlotBuffers
from holdfast.execution.gpu.batch_sizes import padded, padded_sizes
from holdfast.execution.gpu.decoder import GpuDecoder
from holdfast.execution.gpu.graphs.decode_graphs import DecodeGraphs
from holdfast.execution.gpu.graphs.kept_graphs import KeptGraphs
from holdfast.execution.gpu.launched_step import GpuStep, Launched, Sampled, Told, in_order
from holdfast.execution.gpu.layers.lora import GpuAdapters
from holdfast.execution.gpu.memory.kv_range import KVRange
from holdfast.execution.gpu.memory.oom import finish, give_back_cached, is_shortage
from holdfast.execution.gpu.memory.page_tiers import PageTiers
from holdfast.execution.gpu.memory.pinned_staging import carry
from holdfast.execution.gpu.sampling import DeviceSampler, FoundScores, Work
from holdfast.execution.gpu.slots import DeviceSlots
from holdfast.execution.gpu.split_step import run_in_parts
from holdfast.execution.gpu.step import BatchBuilder, DeviceStep, is_decode
from holdfast.execution.kv_pool import LARGEST
from holdfast.execution.kv_scales import Calibration, KVScales
from holdfast.execution.layers.pooling import vectors
from holdfast.execution.lora.slots import LoraLimits
from holdfast.execution.parallel.gpu.following_sampler import FollowingSampler
from holdfast.execution.parallel.gpu.share import GpuRankShare
from holdfast.execution.parallel.gpu.stage import GpuStage
from holdfast.execution.profile_run import heaviest_plan
from holdfast.execution.triton_kernels.tiles import prefill_tile_tokens
from holdfast.execution.weights.decoder_weights import Weights
from holdfast.footprint.gpu import sampling_lanes
from holdfast.kvcache.groups import KVLayout
from holdfast.models import ModelSpec
from holdfast.observability.decisions import Decision
from holdfast.records import (
    AdapterArrival,
    ExpertUse,
    LinkUse,
    Row,
    StepPlan,
    StepResult,
    TokenMasks,
)

STEPS_AHEAD = 1


class GpuRunner(KeptGraphs, PageTiers):
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
        lora: LoraLimits | None = None,
        beat: Callable[[], None] | None = None,
        share: GpuRankShare | None = None,
        stage: GpuStage | None = None,
        whole: ModelSpec | None = None,
    ) -> None:
        """`share`: of a model that several ranks compute; spec, weights and layout are this rank's, `whole` is all of
        it. Only the first samples. `stage`: of one whose layers are on several: parallel/gpu/staged_runner.py."""
        self._share, self._stage = share, stage
        self.spec, self.layout, self.limits, self.device = spec, layout, limits, device
        self.kv_dtype = kv_dtype or weights.dtype
        super().__init__(weights)
        self._books = SlotBuffers(limits, layout, spec.vocab_size)
        self._slots = DeviceSlots(layout, limits, device)
        self._dtype = weights.dtype
        tile_tokens = prefill_tile_tokens(
            spec.heads, spec.kv_heads, spec.head_dim, weights.dtype.itemsize, codes=self.kv_dtype in LARGEST
        )
        self._forms = BatchBuilder(limits, device, tile_tokens, layout.block_tokens)
        self._adapters = None if lora is None else GpuAdapters(spec, lora, limits, weights.dtype, device, whole)
        self._decoder: GpuDecoder | None = GpuDecoder(
            spec, weights, layout, limits, self._slots, device, self._adapters, beat, share, stage
        )
        rows, vocab = limits.max_num_seqs, spec.vocab_size
        shows = stage is not None and stage.shows
        columns = vocab if self._samples or shows else 0
        self._logits = torch.empty((rows, columns), dtype=weights.dtype, device=device)
        self._sampler: DeviceSampler | FollowingSampler
        if self._samples:
            lanes, tokens = sampling_lanes(rows), limits.max_num_batched_tokens
            self._sampler = DeviceSampler(self._slots, rows, lanes, tokens, vocab, device)
        else:
            self._sampler = FollowingSampler(rows, device)
        pin = device.type == "cuda"
        self._sampled = [
            torch.empty(rows, dtype=torch.int32, device="cpu", pin_memory=pin) for _ in range(STEPS_AHEAD + 2)
        ]
        self._arrived = [torch.cuda.Event() if pin else None for _ in self._sampled]
        self._next = 0
        self._embeds = numpy.zeros(rows, dtype=bool)
        self._kv: KVRange | None = None
        # All experts of a layer are waited for by a step with many tokens.
        experts = self._decoder.experts
        most = limits.max_num_batched_tokens
        few = most if experts is None else experts.few_tokens
        self._most_captured = max((size for size in padded_sizes(rows) if padded(size, most) <= few), default=0)
        around = None if experts is None else self._decoder.step
        shared = share is not None or stage is not None
        if graphs and pin and self.may_capture:
            self._graphs = DecodeGraphs(rows, self._run_decode, device, around, shared=shared)

    @property
    def _samples(self) -> bool:
        if self._stage is not None:
            return self._stage.samples
        return self._share is None or self._share.samples

    @property
    def buffers_bytes(self) -> int:
        return self._slots.nbytes + self._forms.nbytes

    @property
    def logits_bytes(self) -> int:
        """With what sampling holds beside them."""
        return self._logits.nbytes + self._sampler.nbytes + (0 if self._share is None else self._share.nbytes)

    @property
    def beside_torch_bytes(self) -> int:
        """On the GPU: pages, and weights in ranges of addresses."""
        return self.mapped_bytes + (0 if self._kv is None else self._kv.nbytes)

    @property
    def adapters_bytes(self) -> int:
        return 0 if self._adapters is None else self._adapters.nbytes

    @property
    def attention_backend(self) -> str:
        return "triton"

    @property
    def decisions(self) -> list[Decision]:
        return [*self.decoder.decisions, *self.decoder.product_decisions]

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

    def measure_link(self) -> list[Decision]:
        """Of layers or experts that do not stay on the GPU; nothing where all do."""
        with self._here():
            return [] if self._coming is None else self._coming.decisions()

    def link_use(self) -> list[LinkUse]:
        """Of each direction of the link over which layers, experts or KV pages move; none where all stay on the GPU."""
        return self.uses_of(self.link if self._page_copies is None else self._page_copies.link)

    def expert_use(self) -> ExpertUse | None:
        """None where all experts stay on the GPU."""
        return None if self.decoder.experts is None else self.decoder.experts.expert_use()

    def reserve_kv(self, most_blocks: int) -> None:
        self._kv = KVRange(self.layout, most_blocks, self.device, self.kv_dtype)

    def back_kv(self, blocks: int) -> None:
        """The first pages, the null page included; `resize_kv` while serving."""
        if self._kv is None:
            self.reserve_kv(blocks)
        self.resize_kv(blocks)

    @property
    def most_blocks(self) -> int:
        """Pages that addresses are reserved for."""
        return self.kv.most_blocks

    def resize_kv(self, blocks: int) -> None:
        """Raises RangeError, and changes nothing, where the GPU has too little for so many."""
        with self._here():
            self.kv.resize(blocks)

    @property
    def kv_scales(self) -> KVScales:
        return self.decoder.kv_scales

    def use_kv_scales(self, scales: KVScales) -> None:
        """Of float8 pages; before anything is captured."""
        self.decoder.kv_scales = scales

    def calibrate_kv(self) -> None:
        """Finds the scales of float8 pages, with other pages for a moment; before anything is captured."""
        trial = Calibration(self.spec, self.limits, self.layout)
        layout = replace(self.layout, element_bytes=self._dtype.itemsize)
        kept, pages = self._kv, KVRange(layout, trial.blocks, self.device, self._dtype)
        self._kv = pages
        try:
            pages.resize(trial.blocks)
            trial.run(self)
            with self._here():
                found = trial.scales(pages.pages, self.kv_dtype, self.decoder.frequencies())
                if self._share is not None:  # A layer has the same on all ranks, as it has on one: that of its largest.
                    layers = len(found.keys)
                    largest = self._share.largest([*found.keys, *found.values])
                    found = found.widened(largest[:layers], largest[layers:])
            self.use_kv_scales(found)
        finally:
            self._kv = kept
            self._books.known[:] = 0
            pages.close()

    def submit(self, plan: StepPlan, masks: TokenMasks | None = None) -> GpuStep:
        with self._here():
            arrived = self._enter(plan)
            step = self._start(plan, masks)
            self._launch_stores(plan, step)
        step.adapters = arrived
        for row in plan.rows:
            if row.samples and row.slot not in step.late:
                self._books.known[row.slot] += 1
        return step

    def execute(self, plan: StepPlan) -> StepResult:
        return self.submit(plan).result()

    def _send_beside_pages(self) -> None:
        self._slots.send_beside_pages()
        self._forms.send_beside_pages()
        carry(self._sampled[0], self._sampler.sampled, beside_pages=True)  # Compiled before a step needs it.

    @contextmanager
    def _here(self) -> Iterator[None]:
        """On this runner's device, whatever the thread that calls has chosen."""
        with torch.inference_mode(), torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            yield

    def _enter(self, plan: StepPlan) -> list[AdapterArrival]:
        """Adapters that are there now."""
        if not self._samples:  # Which of its tokens count, the first rank has settled; and its plans are right.
            for row in plan.rows:
                self._books.known[row.slot] = row.start + row.count
        self._books.apply(plan, self.kv.blocks, () if self._page_copies is None else self._page_copies.tiers)
        if moved := [copy for copy in plan.copies if copy.before_step]:
            self._slots.move_pages(self.kv.pages, moved)
        if self._page_copies is not None:
            self._page_copies.begin(plan)
        arrived = [] if self._adapters is None else self._adapters.places.follow(plan)
        for start in plan.starts:
            self._sampler.start(start)
            self._embeds[start.slot] = start.embed
        return arrived

    def _start(self, plan: StepPlan, masks: TokenMasks | None) -> GpuStep:
        place, self._next = self._next, (self._next + 1) % len(self._sampled)
        try:
            self._slots.apply(plan)
            launched = self._launch(plan.rows, place, masks) if plan.rows else None
            embeddings = in_order(plan.rows, launched.embeddings) if launched is not None else []
            return GpuStep(self.read, plan, launched=launched, embeddings=embeddings)
        except RuntimeError as error:
            # Of several ranks each would have its own parts.
            if not is_shortage(error) or self._share is not None:
                raise
        return self._run_in_parts(plan, place, masks)

    def _run_in_parts(self, plan: StepPlan, place: int, masks: TokenMasks | None) -> GpuStep:
        """A step that did not find the memory it needed, once more and then in smaller ones."""
        return run_in_parts(
            plan,
            enter=lambda: self._slots.apply(plan),
            launch=lambda part: self._launch(part, place, masks),
            read=self.read,
            give_back=lambda: give_back_cached(self.device),
        )

    def _launch(self, rows: Sequence[Row], place: int, masks: TokenMasks | None = None) -> Launched:
        stream, embeds = None, any(row.samples and self._embeds[row.slot] for row in rows)
        late: list[int] = []
        graphs = self.graphs_now
        if graphs is not None and is_decode(rows) and len(rows) <= self._most_captured and not embeds:
            size = graphs.padded(len(rows))
            slots = [row.slot for row in rows]
            step, work = self._forms.decode(rows, size), self._sampler.prepare(slots)
            adapters, places = self._adapters, self._books.adapter_places
            graphs.replay(size, work, adapters is not None and adapters.send_decode(rows, places, size))
            self._close_too_large_graphs()
            if work is Work.FORWARD:
                late = self._choose(self._forms.decode_places(size), size, slots, masks)
        else:
            step = self._forms.mixed(rows)
            if self._adapters is not None:
                self._adapters.use_mixed(rows, self._books.adapter_places)
            sampling = [row.slot for row in rows if row.samples]
            slots = [sampling[index] for index in step.order]
            work = self._sampler.prepare(slots) if slots else Work.DRAW
            stream = self._run(step, len(slots), work)
            if work is Work.FORWARD:
                late = self._choose(step, len(slots), slots, masks)
        found = scores = None
        if slots:
            found = self._sampler.logprobs(self._logits, slots)
            told, sampled = self._sampled[place][: len(slots)], self._sampler.sampled[: len(slots)]
            carry(told, sampled, beside_pages=self._page_copies is not None)
        if stream is not None and step.scored is not None:
            scores = self._score(step, step.scored, stream, [row for row in rows if row.scored])
        arrived = self._arrived[place]
        if arrived is not None and (slots or scores is not None):
            arrived.record()
        embeds = embeds and self._samples
        embeddings = self._embed(step, stream, slots) if stream is not None and embeds else {}
        return Launched(step, place, found, scores, embeddings, late)

    def _embed(self, step: DeviceStep, stream: torch.Tensor, slots: list[int]) -> dict[int, bytes]:
        """Waits for the step: its buffers are the next one's."""
        wanted = self._embeds[slots]
        states = self.decoder.states(stream, step.sampling, len(slots))
        found = vectors(states, wanted, self.decoder.classifier)
        return {slot: vector for slot, vector in zip(slots, found, strict=True) if vector}

    def _score(
        self, step: DeviceStep, at: torch.Tensor, stream: torch.Tensor, rows: Sequence[Row]
    ) -> FoundScores | None:
        """Of tokens of prompts, in turns of as many as may sample. Overwrites the logits of the step."""
        slots, most = [row.slot for row in rows], len(self._logits)
        width = self._slots.tokens.shape[1]
        behind = step.rows.slots.index_select(0, at).long() * width + step.rows.positions.index_select(0, at) + 1
        targets = self._slots.tokens.take(behind)
        for first in range(0, len(at), most):
            part = at[first : first + most]
            self.decoder.logits(stream, part, self._logits)
            self._sampler.score(self._logits[: len(part)], targets[first : first + most], first, slots)
        return self._sampler.scores(slots, [row.scored for row in rows], targets)

    def _run_decode(self, size: int, work: Work, adapted: bool = False) -> None:
        if self._adapters is not None:
            self._adapters.use_decode(size, adapted=adapted)
        with torch.inference_mode():
            self._run(self._forms.decode_places(size), size, work)

    def _run(self, step: DeviceStep, sampling: int, work: Work) -> torch.Tensor:
        stream = self.decoder.forward(step.rows, self.kv.pages)
        if sampling:
            logits = self._logits[:sampling]
            self.decoder.logits(stream, step.sampling, logits if step.sampling is None else self._logits)
            if work is not Work.FORWARD:
                self._sample(step, sampling, work)
        return stream

    def _sample(self, step: DeviceStep, sampling: int, work: Work) -> None:
        slots, lengths = step.sampling_slots[:sampling], step.sampling_lengths[:sampling]
        self._sampler.sample(self._logits[:sampling], slots, lengths, work)
        if self._share is not None:
            self._share.spread_tokens(self._sampler.sampled[:sampling], slots, lengths, self._slots.tokens)

    def _choose(self, step: DeviceStep, sampling: int, present: list[int], masks: TokenMasks | None) -> list[int]:
        """The tokens of a step whose decoder was launched: now is when the masks of its rows are waited for. Returns
        the slots of those that are late."""
        late = self._sampler.mask(present, masks, self._busy())
        self._sample(step, sampling, Work.ADJUST)
        return late

    def _busy(self) -> Callable[[], bool]:
        """Whether the device still computes what was launched so far."""
        if self.device.type != "cuda":
            return lambda: False
        done = torch.cuda.Event()
        done.record()
        return lambda: not done.query()

    def read(self, launched: Launched) -> tuple[Sampled, Told]:
        """Waits until the tokens of a step are here, and puts them in the order of its rows."""
        arrived, order = self._arrived[launched.place], launched.step.order.tolist()
        if arrived is not None and (order or launched.scores is not None):
            arrived.synchronize()
        beside = self.decoder.experts or self.decoder.host_mlps
        if beside is not None:
            beside.check()
        if self._share is not None:
            self._share.collectives.check()
        tokens = self._sampled[launched.place][: len(order)].tolist()
        told = [None] * len(order) if launched.logprobs is None else launched.logprobs.of(tokens)
        placed = sorted(zip(order, tokens, told, strict=True), key=lambda one: one[0])
        scores = [] if launched.scores is None else launched.scores.told()
        return [(token, logprobs) for _, token, logprobs in placed], scores

    def check(self) -> None:
        """Raises what has failed on the device so far; waits for nothing."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).query()
        if self._share is not None:
            self._share.collectives.check()

    def profile_run(self) -> None:
        """The heaviest step the limits allow, for real and whole; then products and single tokens of every size: what
        the driver loads when it is first used is there then."""
        plans = [heaviest_plan(self.limits, self.layout)]
        if is_decode(plans[0].rows):  # A sequence for every token of a step; but one may also have them all.
            plans.append(heaviest_plan(replace(self.limits, max_num_seqs=1), self.layout))
        with self._here():
            if self._adapters is not None:
                self._adapters.places.profile_run(True)
            for plan in plans:
                self._enter(plan)
                if self._adapters is not None:  # All tokens with one, all places taken.
                    self._books.adapter_places[:] = numpy.arange(self.limits.max_num_seqs) % self.limits.max_loras
                self._slots.apply(plan)
                self.read(self._launch(plan.rows, 0))
            if self._adapters is not None:
                self._adapters.tiles = None  # Of the step before: its rows are more than a product tried has.
            if self.device.type == "cuda":
                self._slots.load_mover(self.kv.pages)
                with nullcontext() if self._coming is None else self._coming.as_they_are():
                    self._load_kernels()
            if self._adapters is not None:
                self._adapters.places.profile_run(False)
        self._books.known[:] = 0
        self._books.adapter_places[:] = -1

    def _load_kernels(self) -> None:
        self.decoder.load_products(self._logits)
        for size in padded_sizes(self.limits.max_num_seqs):
            self._forms.decode([], size)
            for work in Work:
                self._run_decode(size, work)
            if self._adapters is not None:
                self._adapters.profile_decode(size)
                self._run_decode(size, Work.DRAW, True)

    def capture(self) -> None:
        """The graphs that are needed first: of one row, and of as many as there may be. Others when they are needed."""
        graphs = self.graphs_now
        if graphs is None:
            return
        for rows in (self._most_captured, 1) if self._most_captured else ():
            size = graphs.padded(rows)
            with self._here():
                self._forms.decode([], size)
                graphs.replay(size, Work.DRAW)
                if self._share is not None:  # The first launch of a graph may need memory: as a step of all ranks.
                    graphs.replay(size, Work.DRAW)

    def close(self) -> None:
        """Gives everything back; the runner cannot be used afterwards."""
        if self._decoder is None:
            return
        with self._here():
            # A step that nobody has read may still be computed: with graphs, layers that come, or packets of numbers.
            finish(self.device)
            if self._graphs is not None:
                self._graphs.close()
            self._graphs = None
            if self._page_copies is not None:
                self._page_copies.close()
            self._page_copies = None
            if self._kv is not None:
                self._kv.close()
            if self._adapters is not None:
                self._adapters.places.close()
            if self._decoder.host_mlps is not None:
                self._decoder.host_mlps.close()
            if self._coming is not None:
                self._coming.close()
            self._decoder = self._kv = self._adapters = None
            del self._sampler, self._slots, self._forms, self._logits, self._sampled
            gc.collect()
            if self.device.type == "cuda":
                torch._C._cuda_clearCublasWorkspaces()
            give_back_cached(self.device)
