"""The runner of a GPU that has one stage of several: launches its layers of a step, between the streams of the stages
before and behind.

    submit      the layers of this stage, of the last one the logits, and what is handed on; the host waits for nothing
    result      of rank 0 alone: takes the logits that the last stage shows, samples, and waits for the tokens

So rank 0 has launched later steps, of other sequences, before it samples an earlier one. Graphs are of the layers, with
what is taken and handed on; sampling is launched kernel by kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch

from holdfast.execution.gpu.batch_sizes import padded_sizes
from holdfast.execution.gpu.launched_step import GpuStep, Launched, Sampled, Told, in_order
from holdfast.execution.gpu.runner import GpuRunner
from holdfast.execution.gpu.sampling import FoundScores, Work
from holdfast.execution.gpu.step import DeviceStep, is_decode
from holdfast.execution.layers.pooling import vectors
from holdfast.execution.parallel.gpu.stage import GpuStage
from holdfast.records import AdapterArrival, Row, StepPlan, StepResult, TokenMasks


@dataclass(frozen=True, slots=True)
class _Begun:
    """A step whose layers this rank has launched."""

    step: DeviceStep
    rows: Sequence[Row]
    slots: list[int]
    """That sample, in the order of the batch."""
    shown: int
    """Rows of logits that the last stage shows of them, padded."""
    sampling_slots: torch.Tensor
    sampling_lengths: torch.Tensor
    """Copies: what the step has them in is the next one's."""
    targets: torch.Tensor | None
    """Tokens of prompts that are scored."""
    embeds: bool


class StagedGpuRunner(GpuRunner):
    @property
    def stage(self) -> GpuStage:
        assert self._stage is not None
        return self._stage

    def submit(self, plan: StepPlan, masks: TokenMasks | None = None) -> GpuStep | StagedStep:  # type: ignore[override]
        with self._here():
            arrived = self._enter(plan)
            self._slots.apply(plan)
            begun = self._begin(plan.rows) if plan.rows else None
        if begun is not None and self._samples:
            return StagedStep(self, plan, begun, masks, arrived)
        step = GpuStep(self.read, plan)
        step.adapters = arrived
        return step

    def finish(self, plan: StepPlan, begun: _Begun, masks: TokenMasks | None) -> StepResult:
        """Of rank 0."""
        with self._here():
            launched = self._end(begun, self._place(), masks)
            step = GpuStep(self.read, plan, launched=launched, embeddings=in_order(plan.rows, launched.embeddings))
            found = step.result()
        for row in plan.rows:
            if row.samples and row.slot not in launched.late:
                self._books.known[row.slot] += 1
        return found

    def note_sampled(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        """What rank 0 has sampled: rows that come next begin with it."""
        with self._here():
            self._slots.put_tokens(slots, [int(self._books.known[slot]) for slot in slots], tokens)

    def _place(self) -> int:
        place, self._next = self._next, (self._next + 1) % len(self._sampled)
        return place

    def _begin(self, rows: Sequence[Row]) -> _Begun:
        embeds = any(row.samples and self._embeds[row.slot] for row in rows)
        targets = None
        if self._graphs is not None and is_decode(rows) and len(rows) <= self._most_captured and not embeds:
            shown = self._graphs.padded(len(rows))
            step, slots = self._forms.decode(rows, shown), [row.slot for row in rows]
            adapters, places = self._adapters, self._books.adapter_places
            self._graphs.replay(shown, Work.FORWARD, adapters is not None and adapters.send_decode(rows, places, shown))
        else:
            step = self._forms.mixed(rows)
            if self._adapters is not None:
                self._adapters.use_mixed(rows, self._books.adapter_places)
            sampling = [row.slot for row in rows if row.samples]
            slots = [sampling[index] for index in step.order]
            shown = len(slots)
            stream = self._run(step, shown, Work.FORWARD)
            if self.stage.is_last:
                self._show_more(step, stream, shown, embeds=embeds)
            if self._samples and step.scored is not None:
                targets = self._targets(step, step.scored)
        kept = (step.sampling_slots, step.sampling_lengths)
        if self._samples:
            kept = (kept[0].clone(), kept[1].clone())
        return _Begun(step, rows, slots, shown, *kept, targets, embeds)

    def _run(self, step: DeviceStep, sampling: int, work: Work) -> torch.Tensor:
        stream = self.decoder.forward(step.rows, self.kv.pages)
        if sampling and self.stage.is_last:
            self._show_logits(stream, step.sampling, sampling)
        return stream

    def _show_logits(self, stream: torch.Tensor, at: torch.Tensor | None, count: int) -> None:
        logits = self._logits[:count]
        self.decoder.logits(stream, at, logits if at is None else self._logits)
        self.stage.show(logits)

    def _show_more(self, step: DeviceStep, stream: torch.Tensor, count: int, *, embeds: bool) -> None:
        """All else that rank 0 asks for in `_end`, in that order."""
        for part in () if step.scored is None else step.scored.split(len(self._logits)):
            self._show_logits(stream, part, len(part))
        if embeds:
            self.stage.show(self.decoder.states(stream, step.sampling, count))

    def _targets(self, step: DeviceStep, at: torch.Tensor) -> torch.Tensor:
        width = self._slots.tokens.shape[1]
        behind = step.rows.slots.index_select(0, at).long() * width + step.rows.positions.index_select(0, at) + 1
        return self._slots.tokens.take(behind)

    def _end(self, begun: _Begun, place: int, masks: TokenMasks | None) -> Launched:
        """Of rank 0: from the logits that the last stage shows to tokens that are on their way to the host."""
        slots, late, found, scores = begun.slots, list[int](), None, None
        if slots:
            logits = self._logits[: begun.shown]
            self.stage.collect(logits)
            work = self._sampler.prepare(slots)
            if work is Work.FORWARD:
                late, work = self._sampler.mask(slots, masks, self._busy()), Work.ADJUST
            self._sampler.sample(logits, begun.sampling_slots, begun.sampling_lengths, work)
            found = self._sampler.logprobs(self._logits, slots)
            self._sampled[place][: len(slots)].copy_(self._sampler.sampled[: len(slots)], non_blocking=True)
        if begun.targets is not None:
            scores = self._collect_scores(begun.targets, [row for row in begun.rows if row.scored])
        embeddings = self._collect_embeddings(slots) if begun.embeds else {}
        arrived = self._arrived[place]
        if arrived is not None:
            arrived.record()
        return Launched(begun.step, place, found, scores, embeddings, late)

    def _collect_scores(self, targets: torch.Tensor, rows: Sequence[Row]) -> FoundScores | None:
        slots, most = [row.slot for row in rows], len(self._logits)
        for first in range(0, len(targets), most):
            part = targets[first : first + most]
            self.stage.collect(self._logits[: len(part)])
            self._sampler.score(self._logits[: len(part)], part, first, slots)
        return self._sampler.scores(slots, [row.scored for row in rows], targets)

    def _collect_embeddings(self, slots: list[int]) -> dict[int, bytes]:
        states = torch.empty((len(slots), self.spec.hidden_size), dtype=self._dtype, device=self.device)
        self.stage.collect(states)
        found = vectors(states, self._embeds[slots], self.decoder.classifier)
        return {slot: vector for slot, vector in zip(slots, found, strict=True) if vector}

    def _launch(self, rows: Sequence[Row], place: int, masks: TokenMasks | None = None) -> Launched:
        """Of the profile run: a step from its beginning to its end."""
        begun = self._begin(rows)
        return self._end(begun, place, masks) if self._samples else Launched(begun.step, place, None)

    def read(self, launched: Launched) -> tuple[Sampled, Told]:
        found = super().read(launched)
        self.stage.lines.check()
        return found

    def check(self) -> None:
        super().check()
        self.stage.lines.check()

    def _load_kernels(self) -> None:
        self.decoder.load_products(self._logits)
        for size in padded_sizes(self.limits.max_num_seqs):
            step = self._forms.decode([], size)
            self._run_decode(size, Work.FORWARD)
            if self._samples:
                logits = self._logits[:size]
                self.stage.collect(logits)
                for work in (Work.DRAW, Work.ADJUST):
                    self._sampler.sample(logits, step.sampling_slots, step.sampling_lengths, work)
            if self._adapters is not None:
                self._adapters.profile_decode(size)
                self._run_decode(size, Work.FORWARD, True)
                if self._samples:
                    self.stage.collect(self._logits[:size])

    def capture(self) -> None:
        """The graphs that are needed first; each launched once more, as a step of all ranks."""
        if self._graphs is None:
            return
        for rows in (self._most_captured, 1) if self._most_captured else ():
            size = self._graphs.padded(rows)
            with self._here():
                self._forms.decode([], size)
                for _ in range(2):
                    self._graphs.replay(size, Work.FORWARD)
                    if self._samples:
                        self.stage.collect(self._logits[:size])


class StagedStep:
    """A step of rank 0 that other stages go on with: what they show is taken when it is asked for."""

    late: Sequence[int] = ()
    """No row of the next step goes on from this one's."""

    def __init__(
        self,
        runner: StagedGpuRunner,
        plan: StepPlan,
        begun: _Begun,
        masks: TokenMasks | None,
        adapters: list[AdapterArrival],
    ) -> None:
        self._runner, self._plan, self._begun, self._masks = runner, plan, begun, masks
        self.adapters = adapters
        """That this rank has since the plan before."""

    _result: StepResult | None = None

    def result(self) -> StepResult:
        if self._result is None:
            found = self._runner.finish(self._plan, self._begun, self._masks)
            self._result = msgspec.structs.replace(found, adapters=self.adapters)
        return self._result
