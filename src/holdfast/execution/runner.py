"""Executes step plans on one device: slots, KV pages, the decoder and the sampler, in the order plans arrive.

It decides nothing: which row runs, in which page, was settled by the scheduler. A wrong plan is refused whole.
"""

from __future__ import annotations

import contextlib
import gc
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

import numpy
import numpy.typing
import torch

from holdfast.errors import EngineError
from holdfast.execution.batch import RunnerLimits, SlotBuffers, StepBatch
from holdfast.execution.device import lean_products
from holdfast.execution.kv_pool import KVPool
from holdfast.execution.kv_scales import Calibration, KVScales
from holdfast.execution.layers.pooling import vectors
from holdfast.execution.lora.slots import AdapterPlaces, LoraLimits
from holdfast.execution.memory import PeakMemory, trim_memory
from holdfast.execution.native import ComputeThreads
from holdfast.execution.ops import ops_for
from holdfast.execution.parallel.pipeline import PipelineStage
from holdfast.execution.parallel.share import NOT_SAMPLED, RankShare
from holdfast.execution.profile_run import heaviest_plan
from holdfast.execution.sampling.nonfinite import broken_rows, tell_of_others
from holdfast.execution.sampling.sampler import Masks, Sampler
from holdfast.execution.streaming.disk.layer_slots import LayerSlots
from holdfast.execution.tiers.cpu import CpuPageCopies, Over
from holdfast.execution.transformer import Transformer
from holdfast.execution.weights.decoder_weights import Weights
from holdfast.footprint.cpu import head_rows, logits_rows
from holdfast.hardware.numa import numa_nodes
from holdfast.kvcache.groups import KVLayout
from holdfast.models import ModelSpec
from holdfast.observability.decisions import Decision
from holdfast.records import LinkUse, StepPlan, StepResult, TokenLogprobs, TokenMasks
from holdfast.records.steps import AdapterArrival

__all__ = ["ProfileRun", "Runner", "RunnerLimits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRun:
    """Bytes that the heaviest step needed beyond what was held before. Their sum is its peak; each part is what the
    peak gained while that part was done."""

    scratch_bytes: int
    """torch's copy of a dense matrix."""
    activations_bytes: int
    logits_bytes: int
    given_back_bytes: int
    """Of the sum, what is not held between steps."""


class _Done:
    """The handle of a step that was computed when it was submitted."""

    def __init__(self, result: StepResult) -> None:
        self._result = result
        self.late = result.late

    def result(self) -> StepResult:
        return self._result


class _HandedOn:
    """The handle of a step that other stages go on with."""

    late: Sequence[int] = ()
    """No row of the next step goes on from this one's."""

    def __init__(self, end: Callable[[], StepResult]) -> None:
        self._end, self._result = end, None

    _result: StepResult | None

    def result(self) -> StepResult:
        if self._result is None:
            self._result = self._end()
        return self._result


@dataclass(frozen=True, slots=True)
class _Begun:
    """A step whose layers this rank has computed."""

    plan: StepPlan
    arrived: list[AdapterArrival]
    batch: StepBatch | None = None
    """None: it has no rows."""
    hidden: torch.Tensor | None = None


class Runner:
    """`kv_dtype`: how keys and values are kept; by default as the weights' activations are.
    `compiled`: the small operations and attention come from kernels of our own (float32 only).
    `beat`: called again and again while a step is computed, after each layer and each turn of logits.
    `threads`: those that compute; None: as torch and the kernels are set.
    `share`: of a model that several ranks compute; spec, weights and layout are this rank's. Only the first samples.
    `stage`: of one whose layers are on several ranks in turn, likewise; the first rank samples what the last stage
    shows it, and a step that it has handed on is finished when its result is asked for.
    `whole`: the model that `spec` is this rank's part of; None: it is all of it."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        layout: KVLayout,
        limits: RunnerLimits,
        device: torch.device,
        *,
        kv_dtype: torch.dtype | None = None,
        reference: bool = False,
        compiled: bool = False,
        lora: LoraLimits | None = None,
        beat: Callable[[], None] | None = None,
        threads: ComputeThreads | None = None,
        share: RankShare | None = None,
        stage: PipelineStage | None = None,
        whole: ModelSpec | None = None,
    ) -> None:
        self._threads, self._share, self._stage = threads, share, stage
        self.spec, self.layout, self.limits, self.device = spec, layout, limits, device
        self.kv_dtype = kv_dtype or weights.dtype
        self._beat = beat or (lambda: None)
        self.dtype, self.weights_bytes = weights.dtype, weights.nbytes
        ops = ops_for(device, reference=reference, compiled=compiled)
        self._adapters = None if lora is None else AdapterPlaces(spec, lora, weights.dtype, device, whole)
        self._transformer: Transformer | None = Transformer(
            spec,
            weights,
            layout,
            ops,
            limits.max_num_batched_tokens,
            device,
            context=limits.max_model_len,
            adapters=self._adapters,
            beat=beat,
            share=share,
            stage=stage,
        )
        self._buffers = SlotBuffers(limits, layout, spec.vocab_size)
        self._sampler = Sampler(self._buffers, spec.vocab_size)
        self._turn_rows = logits_rows(spec.vocab_size, limits.max_num_seqs)
        rows = self._logits_rows = head_rows(spec.vocab_size, limits.max_num_seqs)
        shows = stage is not None and stage.is_last and share is None
        columns = spec.vocab_size if self._samples or shows else 0
        self._logits = torch.empty((rows, columns), dtype=weights.dtype, device=device)
        self._embeds = numpy.zeros(limits.max_num_seqs, dtype=bool)
        self._kv: KVPool | None = None
        self._page_copies: CpuPageCopies | None = None

    def use_tiers(self, copies: CpuPageCopies) -> None:
        """What moves pages between the pool and tiers below it; before the first step that asks for it."""
        self._page_copies = copies

    def give_up_reads(self) -> list[int]:
        """Of pages that come from a disk: nobody waits for it. Returns copies that will never be over."""
        return [] if self._page_copies is None else self._page_copies.give_up_reads()

    def abandon_copies(self) -> None:
        """Pages on their way are nobody's from now on."""
        if self._page_copies is not None:
            self._page_copies.abandon()

    @property
    def _samples(self) -> bool:
        if self._stage is not None:
            return self._stage.samples
        return self._share is None or self._share.samples

    @property
    def _shows(self) -> bool:
        """Another rank samples what this one computes logits of."""
        return not self._samples and (self._stage is None or self._stage.is_last)

    @property
    def buffers_bytes(self) -> int:
        """Of token ids and block tables."""
        return self._buffers.nbytes

    @property
    def adapters_bytes(self) -> int:
        return 0 if self._adapters is None else self._adapters.nbytes

    @property
    def layer_slots_bytes(self) -> int:
        """Of layers that do not stay in memory."""
        slots = self._decoder.weights.slots
        return 0 if slots is None else slots.nbytes

    def link_use(self) -> list[LinkUse]:
        """Of the disk that layers come from; nothing where all stay in memory."""
        slots = self._decoder.weights.slots
        return [slots.use()] if isinstance(slots, LayerSlots) else []

    @property
    def attention_backend(self) -> str:
        return self._decoder.attention.name

    @property
    def decisions(self) -> list[Decision]:
        """What is chosen here, not in the plan: where pages of weights lie."""
        nodes = numa_nodes()
        if len(nodes.numbers) < 2:
            return []
        reason = "pages of quantized weights take turns among them"
        if nodes.refused is not None:
            reason = f"weights stay on the node that loaded them: pages cannot be spread ({nodes.refused})"
        return [Decision("numa_nodes", ", ".join(map(str, nodes.numbers)), reason, "hardware")]

    @property
    def kv(self) -> KVPool:
        if self._kv is None:
            raise EngineError("the runner has no KV pages yet", fix="call back_kv before the first step")
        return self._kv

    @property
    def _decoder(self) -> Transformer:
        if self._transformer is None:
            raise EngineError("the runner is closed")
        return self._transformer

    def back_kv(self, blocks: int, most_blocks: int | None = None) -> None:
        """Allocates the pool anew, the null page included; what the old one held is gone. `most_blocks`: it may grow to
        so many."""
        self._kv = None
        self._kv = KVPool(self.layout, blocks, self.device, self.kv_dtype, most_blocks=most_blocks)

    @property
    def most_blocks(self) -> int:
        """Pages that the pool may grow to."""
        return self.kv.most_blocks

    def resize_kv(self, blocks: int) -> None:
        """Nothing is kept of pages beyond; those before stay as they are."""
        self.kv.resize(blocks)

    @property
    def kv_scales(self) -> KVScales:
        return self._decoder.kv_scales

    def use_kv_scales(self, scales: KVScales) -> None:
        """Of float8 pages; before the first step."""
        self._decoder.kv_scales = scales

    def calibrate_kv(self) -> None:
        """Finds the scales of float8 pages, with other pages for a moment."""
        trial = Calibration(self.spec, self.limits, self.layout)
        layout = replace(self.layout, element_bytes=self.dtype.itemsize)
        kept, store = self._kv, KVPool(layout, trial.blocks, self.device, self.dtype)
        self._kv = store
        try:
            trial.run(self)
            found = trial.scales(store.pages, self.kv_dtype, self._decoder.frequencies())
            if self._share is not None:  # A layer has the same on all ranks, as it has on one: that of its largest.
                layers = len(found.keys)
                largest = self._share.largest([*found.keys, *found.values])
                found = found.widened(largest[:layers], largest[layers:])
            self.use_kv_scales(found)
        finally:
            self._kv = kept
            self._buffers.known[:] = 0
            del store
            trim_memory()

    def submit(self, plan: StepPlan, masks: TokenMasks | None = None) -> _Done | _HandedOn:
        """Computes the step before it returns: a CPU has nobody else to do the work meanwhile. Where other stages have,
        only its own part of it."""
        if self._stage is None:
            return _Done(self.execute(plan, masks))
        with self._computing():
            begun = self._begin(plan)
        return _HandedOn(partial(self._end_later, begun, masks))

    def _end_later(self, begun: _Begun, masks: TokenMasks | None) -> StepResult:
        with self._computing():
            return self._end(begun, masks)

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        threads = contextlib.nullcontext() if self._threads is None else self._threads.computing()
        with threads, torch.inference_mode(), lean_products(self.dtype, self.device):
            yield

    def execute(self, plan: StepPlan, masks: TokenMasks | None = None) -> StepResult:
        with self._computing():
            begun = self._begin(plan)
            return self._end(begun, masks) if self._samples or begun.batch is None else self._follow(begun)

    def _begin(self, plan: StepPlan) -> _Begun:
        """All but what is made of the last hidden states."""
        decoder, kv = self._decoder, self.kv
        if self._stage is not None and not self._stage.is_first:
            self._buffers.trust(plan)
        self._buffers.apply(plan, kv.blocks, () if self._page_copies is None else self._page_copies.tiers)
        if moved := [copy for copy in plan.copies if copy.before_step]:
            kv.move(moved)
        if self._page_copies is not None:
            self._page_copies.begin(plan)
        arrived = [] if self._adapters is None else self._adapters.follow(plan)
        for start in plan.starts:
            self._sampler.start(start)
            self._embeds[start.slot] = start.embed
        if not plan.rows:
            return _Begun(plan, arrived)
        batch = self._buffers.form(plan, decoder.attention)
        if batch.fresh_pages.shape[0]:
            kv.clear(batch.fresh_pages)
        return _Begun(plan, arrived, batch, decoder.forward(batch, kv))

    def _end(self, begun: _Begun, masks: TokenMasks | None) -> StepResult:
        plan, batch, hidden = begun.plan, begun.batch, begun.hidden
        if batch is None or hidden is None:
            done, failed = self._end_copies(plan)
            return StepResult(step_id=plan.step_id, adapters=begun.arrived, finished_copies=done, failed_copies=failed)
        masked = None if masks is None else masks.rows()
        token_ids, logprobs = self._sample(hidden, batch, masked)
        late = [slot for slot in masks.slots if slot not in masked] if masks is not None and masked is not None else []
        self._buffers.known[late] -= 1  # What was sampled for them is nothing.
        if self._share is not None and self._stage is None:
            self._share.tell_tokens(token_ids, numpy.isin(batch.sampling_slots, late).tolist())
        told = self._score(batch)
        scores = [list(islice(told, row.scored)) for row in plan.rows if row.scored]
        failures = broken_rows(plan.rows, token_ids)
        wanted = self._embeds[batch.sampling_slots]
        if self._stage is not None and wanted.any():
            hidden = self._collect_states(self._stage, len(hidden))
        done, failed = self._end_copies(plan)
        return StepResult(
            step_id=plan.step_id,
            token_ids=[max(token, 0) for token in token_ids],
            logprobs=logprobs,
            prompt_logprobs=tell_of_others(plan.rows, scores, failures) if failures else scores,
            embeddings=vectors(hidden, wanted, self._decoder.weights.classifier) if wanted.any() else [],
            failures=failures,
            late=late,
            adapters=begun.arrived,
            finished_copies=done,
            failed_copies=failed,
        )

    def _follow(self, begun: _Begun) -> StepResult:
        """The rest of a step where another rank samples: what that one needs of this, and what it has sampled."""
        batch, hidden = begun.batch, begun.hidden
        assert batch is not None
        assert hidden is not None
        if self._stage is not None:
            if self._stage.is_last:
                self._show(self._stage, batch, hidden)
            return StepResult(step_id=begun.plan.step_id, adapters=begun.arrived)
        assert self._share is not None
        deque(self._turns(hidden), maxlen=0)
        tokens = self._share.hear_tokens(len(batch.sampling_slots))
        sampled = tokens != NOT_SAMPLED
        self.note_sampled(batch.sampling_slots[sampled], tokens[sampled])
        deque(self._score(batch), maxlen=0)
        return StepResult(step_id=begun.plan.step_id, adapters=begun.arrived)

    def note_sampled(self, slots: numpy.typing.NDArray[numpy.int64], tokens: numpy.typing.NDArray[numpy.int64]) -> None:
        """What the first rank has sampled: rows that come next begin with it."""
        self._buffers.append(slots, tokens)

    def _show(self, stage: PipelineStage, batch: StepBatch, hidden: torch.Tensor) -> None:
        """To the first rank, all that it asks for in `_end`, in that order."""
        deque(self._turns(hidden), maxlen=0)
        deque(self._score(batch), maxlen=0)
        if self._embeds[batch.sampling_slots].any():
            for rows in hidden.split(self._logits_rows):
                stage.show(rows if stage.place == 0 else rows[:, :0])

    def _collect_states(self, stage: PipelineStage, rows: int) -> torch.Tensor:
        """Normed hidden states of the rows that sample: of the last stage, of which every rank has them."""
        states = torch.empty((rows, self.spec.hidden_size), dtype=self.dtype)
        widths = [self.spec.hidden_size, *(0 for _ in range(stage.ranks_each - 1))]
        for part in states.split(self._logits_rows):
            stage.collect(part, widths)
        return states

    def _end_copies(self, plan: StepPlan) -> Over:
        return ([], []) if self._page_copies is None else self._page_copies.end(plan, self.kv)

    def _sample(
        self, hidden: torch.Tensor, batch: StepBatch, masked: Masks | None = None
    ) -> tuple[list[int], list[TokenLogprobs | None]]:
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        for part, logits in self._turns(hidden):
            slots = batch.sampling_slots[part]
            sampled, found = self._sampler.sample(logits.float(), slots, batch.sampling_lengths[part], masked)
            self._buffers.append(slots, numpy.maximum(sampled, 0))
            if found and not logprobs:
                logprobs = [None] * len(token_ids)
            if found or logprobs:
                logprobs += found or [None] * len(sampled)
            token_ids += sampled.tolist()
            self._beat()
        return token_ids, logprobs

    def _turns(self, hidden: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Rows that are sampled at a time, and their logits; computed for several turns at once."""
        rows, most = hidden.shape[0], self._logits_rows
        for first in range(0, rows, most):
            computed = min(most, rows - first)
            self._decoder.logits(hidden[first : first + computed], self._logits[:computed])
            for start in range(0, computed, self._turn_rows):
                end = min(start + self._turn_rows, computed)
                yield slice(first + start, first + end), self._logits[start:end]

    def _score(self, batch: StepBatch) -> Iterator[TokenLogprobs]:
        """Of the batch's scored tokens, in turns of the same few rows of logits."""
        rows = self._turn_rows
        for first in range(0, batch.scored_tokens.shape[0], rows):
            part = slice(first, first + rows)
            hidden = self._decoder.states(batch.scored_tokens[part])
            logits = self._logits[: len(hidden)]
            self._decoder.logits(hidden, logits)
            self._beat()
            if self._samples:
                yield from self._sampler.score(logits.float(), batch.scored_slots[part], batch.scored_targets[part])

    def profile_run(self) -> ProfileRun:
        """Runs the heaviest step the limits allow and says what it needed.

        One layer of each KV group is run, one with experts among them, and the past is short: layers reuse the same
        buffers and a past is read in pieces, so more of either would take time and no more memory. What is computed
        means nothing.
        """
        decoder, kv = self._decoder, self.kv
        plan = heaviest_plan(self.limits, self.layout, scored=self._turn_rows)
        with_experts = [place for place, layer in enumerate(self.spec.layers) if layer.experts is not None]
        layers = 1 + max([*(min(group.layers) for group in self.layout.groups if group.layers), *with_experts[:1]])
        peak = PeakMemory()
        with self._computing():
            with peak:
                decoder.multiply_largest(self.limits.max_num_batched_tokens, len(self._logits))
            scratch = peak.grown_bytes
            with peak:
                self._buffers.apply(plan, kv.blocks)
                for start in plan.starts:
                    self._sampler.start(start)
                if self._adapters is not None:  # All tokens with one, all places taken.
                    self._adapters.profile_run(True)
                    self._buffers.adapter_places[:] = numpy.arange(self.limits.max_num_seqs) % self.limits.max_loras
                kv.pages[1].zero_()
                batch = self._buffers.form(plan, decoder.attention)
                hidden = decoder.forward(batch, kv, layers=layers)
            activations = peak.grown_bytes - scratch
            with peak:
                self._logits.zero_()
                # Rows that follow would use the same memory again.
                if self._samples:
                    self._sample(hidden[: self._turn_rows], batch)
                elif self._shows:
                    deque(self._turns(hidden[: self._turn_rows]), maxlen=0)
                if self._samples or self._shows:
                    deque(self._score(batch), maxlen=0)
            del batch, hidden  # What was only needed for the step is given back like the rest of it.
        self._buffers.known[:] = 0
        self._buffers.adapter_places[:] = -1
        if self._adapters is not None:
            self._adapters.profile_run(False)
        trim_memory()
        return ProfileRun(
            scratch_bytes=scratch,
            activations_bytes=activations,
            logits_bytes=peak.grown_bytes - scratch - activations,
            given_back_bytes=peak.given_back_bytes,
        )

    def close(self) -> None:
        """Gives everything back to the system; the runner cannot be used afterwards."""
        if self._adapters is not None:
            self._adapters.close()
        if self._transformer is not None and (slots := self._transformer.weights.slots) is not None:
            slots.close()
        if self._page_copies is not None:
            self._page_copies.close()
        self._transformer = self._adapters = self._page_copies = None
        self._kv = None
        self._logits = torch.empty(0)
        gc.collect()
        trim_memory()
