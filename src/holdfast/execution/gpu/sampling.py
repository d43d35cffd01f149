"""Sampling on the GPU: parameters of every slot on the device, tokens chosen and kept there, log-probabilities after.

The order of work is `sampler`'s. Rows with penalties, biases or bans need a lane (a row of logits of their own), which
go to whoever is in the step. Knows logits and parameters, not the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum

import numpy
import torch

from holdfast.errors import EngineError
from holdfast.execution.gpu.memory.pinned_staging import PacketRing
from holdfast.execution.gpu.slots import DeviceSlots
from holdfast.execution.triton_kernels.sampling.adjust import Lanes, adjust_rows
from holdfast.execution.triton_kernels.sampling.launch import Workspace, sample_rows
from holdfast.execution.triton_kernels.sampling.slots import LANE, SlotParams
from holdfast.footprint.gpu import LOGPROB_ROWS
from holdfast.footprint.sampling import mask_words
from holdfast.records import SamplingParams, SequenceStart, TokenLogprobs, TokenMasks
from holdfast.records.sampling import MAX_LOGPROBS


class Work(IntEnum):
    """What a step has to do for its rows: each is a graph of its own."""

    DRAW = 0
    """Greedy rows too: their kernels have little to do."""
    ADJUST = 1
    FORWARD = 2
    """The decoder alone: answers that follow a grammar are among the rows, and their masks are filled meanwhile."""


@dataclass(frozen=True, slots=True)
class _Slot:
    params: SamplingParams
    prompt_length: int
    banned: tuple[int, ...]
    bad_words: list[list[int]]

    @property
    def needs_lane(self) -> bool:
        params = self.params
        penalized = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
        adjusted = params.logit_bias or params.allowed_token_ids or self.bad_words or self.constrained
        return bool(penalized or adjusted or (self.banned and params.min_tokens))

    @property
    def constrained(self) -> bool:
        return self.params.structured_outputs is not None


@dataclass(frozen=True, slots=True)
class FoundLogprobs:
    """On their way to the host; complete when the step's event is."""

    rows: list[int]
    counts: list[int]
    own: torch.Tensor
    ranks: torch.Tensor
    best: torch.Tensor
    best_ids: torch.Tensor
    named: Mapping[int, tuple[list[int], torch.Tensor]]
    """By place in `rows`: tokens that are told instead of the likeliest, and their log-probabilities."""

    def of(self, tokens: list[int]) -> list[TokenLogprobs | None]:
        """One for each token of the step, None for those who did not ask."""
        found: list[TokenLogprobs | None] = [None] * len(tokens)
        for index, (row, count) in enumerate(zip(self.rows, self.counts, strict=True)):
            ids, values = self.best_ids[index, :count].tolist(), self.best[index, :count].tolist()
            if index in self.named:
                ids, values = self.named[index][0], self.named[index][1].tolist()
            found[row] = TokenLogprobs([tokens[row], *ids], [float(self.own[index]), *values], int(self.ranks[index]))
        return found


@dataclass(frozen=True, slots=True)
class FoundScores:
    """What was found of tokens of prompts, row by row in the plan's order; complete when the step's event is."""

    counts: list[int]
    """Of each row: the likeliest that it asked for, and the tokens it scored."""
    lengths: list[int]
    numbers: torch.Tensor
    """[tokens, itself and the likeliest]: log-probabilities."""
    ids: torch.Tensor
    """[tokens, rank and the likeliest]"""
    targets: torch.Tensor

    def told(self) -> list[list[TokenLogprobs]]:
        numbers, ids, targets = self.numbers.tolist(), self.ids.tolist(), self.targets.tolist()
        found, first = [], 0
        for count, length in zip(self.counts, self.lengths, strict=True):
            found.append(
                [
                    TokenLogprobs([targets[at], *ids[at][1 : 1 + count]], numbers[at][: 1 + count], ids[at][0])
                    for at in range(first, first + length)
                ]
            )
            first += length
        return found


class DeviceSampler:
    """`rows`: most that sample in a step; `lanes`: most of them that adjust their logits; `tokens`: most of a step,
    all of which may be scored."""

    def __init__(
        self, slots: DeviceSlots, rows: int, lanes: int, tokens: int, vocab_size: int, device: torch.device
    ) -> None:
        self.lanes = lanes
        self._told_numbers = torch.zeros((tokens, 1 + MAX_LOGPROBS), dtype=torch.float32, device=device)
        self._told_ids = torch.zeros((tokens, 1 + MAX_LOGPROBS), dtype=torch.int32, device=device)
        self.sampled = torch.zeros(rows, dtype=torch.int32, device=device)
        self._known, self._vocab_size = slots.tokens, vocab_size
        self._device = device
        self._params = SlotParams(rows, vocab_size, device, lanes)
        self._workspace = Workspace.allocate(rows, vocab_size, device)
        self._lanes = Lanes.allocate(lanes, vocab_size, device)
        self._scored = PacketRing(rows, device)
        self._everything = numpy.full(mask_words(vocab_size), -1, dtype=numpy.int32)
        self._slots: dict[int, _Slot] = {}

    @property
    def nbytes(self) -> int:
        own = self.sampled.nbytes + self._scored.nbytes + self._told_numbers.nbytes + self._told_ids.nbytes
        return self._workspace.nbytes + self._lanes.nbytes + self._params.nbytes + own

    def start(self, start: SequenceStart) -> None:
        slot = _Slot(start.params, start.prompt_length, start.banned_until_min_tokens, start.bad_word_ids)
        self._slots[start.slot] = slot
        self._params.release(start.slot)
        if not slot.needs_lane:
            self._params.write(start.slot, slot.params, slot.prompt_length)

    def prepare(self, slots: list[int]) -> Work:
        """Before a step of these slots is launched: puts their parameters on the device, and gives lanes."""
        in_need = [slot for slot in slots if self._slots[slot].needs_lane]
        if in_need:
            self._give_lanes(in_need, set(slots))
        self._params.upload()
        if any(self._slots[slot].constrained for slot in in_need):
            return Work.FORWARD
        return Work.ADJUST if in_need else Work.DRAW

    def mask(self, slots: list[int], masks: TokenMasks | None, busy: Callable[[], bool]) -> list[int]:
        """Of the rows of a step that need one, before it is sampled. Returns the slots whose masks are late: what is
        sampled for them means nothing. Nor does it for whoever has none at all: that answer was aborted. `busy`: the
        device still computes the step, and nobody is held up by waiting."""
        wanted = [slot for slot in slots if self._slots[slot].constrained]
        found = {} if masks is None else masks.rows(busy)
        self._params.mask({slot: found.get(slot, self._everything) for slot in wanted})
        return [] if masks is None else [slot for slot in wanted if slot in masks.slots and slot not in found]

    def _give_lanes(self, in_need: list[int], present: set[int]) -> None:
        if len(in_need) > self.lanes:
            raise EngineError(
                "more rows of a step adjust their logits than there are lanes",
                needed=f"at most {self.lanes}",
                found=str(len(in_need)),
            )
        without = [slot for slot in in_need if self._params.host[slot, LANE] < 0]
        free = self._params.free_lanes
        for slot, line in enumerate(self._params.host):
            if free >= len(without):
                break
            if line[LANE] >= 0 and slot not in present:
                self._params.release(slot)  # Written again when its sequence is computed next.
                free += 1
        for index in without:
            wanted = self._slots[index]
            if not self._params.write(index, wanted.params, wanted.prompt_length, wanted.banned, wanted.bad_words):
                raise EngineError("a request bans or biases more tokens than a lane holds")

    def sample(self, logits: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor, work: Work) -> None:
        """One token a row into `sampled` and behind the slot's tokens. Leaves `logits` as they are."""
        adjusted = None
        if work is Work.ADJUST:
            adjusted = self._lanes.adjusted
            adjust_rows(logits, slots, lengths, self._params, self._known, self._lanes)
        sample_rows(
            logits,
            slots,
            lengths,
            self._params,
            self._known,
            self.sampled[: len(logits)],
            self._workspace,
            adjusted=adjusted,
        )

    def logprobs(self, logits: torch.Tensor, slots: list[int]) -> FoundLogprobs | None:
        """Of the raw logits of a step that was launched, for the rows that ask; None: nobody does."""
        asked = [self._slots[slot].params.logprobs for slot in slots]
        rows = [row for row, count in enumerate(asked) if count is not None]
        if not rows:
            return None
        counts = [min(asked[row] or 0, self._vocab_size) for row in rows]
        likeliest = max(1, *counts)
        (at,) = self._scored.send([numpy.array(rows, dtype=numpy.int32)])
        # In turns, so that many rows need no more memory than some.
        found = [
            self._score(logits, at[first : first + LOGPROB_ROWS], likeliest)
            for first in range(0, len(rows), LOGPROB_ROWS)
        ]
        own, ranks, best, best_ids = (self._to_host(torch.cat(parts)) for parts in zip(*found, strict=True))
        asked_ids = [self._slots[slots[row]].params.logprob_token_ids for row in rows]
        named = {
            index: (ids, self._to_host(logits[rows[index]].float().log_softmax(-1)[ids]))
            for index, ids in enumerate(asked_ids)
            if ids
        }
        return FoundLogprobs(rows, counts, own, ranks, best, best_ids, named)

    def _score(self, logits: torch.Tensor, at: torch.Tensor, likeliest: int) -> tuple[torch.Tensor, ...]:
        # A row whose logits are no numbers has no token, and means nothing.
        return _scores(logits.index_select(0, at), self.sampled.index_select(0, at).clamp_min(0), likeliest)

    def score(self, logits: torch.Tensor, targets: torch.Tensor, first: int, slots: list[int]) -> None:
        """Puts what is told of these tokens of prompts behind what is kept of the `first` ones. `slots`: of all rows
        that score."""
        likeliest = max(1, *self._scores_asked(slots))
        for turn in range(0, len(targets), LOGPROB_ROWS):
            part = slice(turn, min(turn + LOGPROB_ROWS, len(targets)))
            own, ranks, best, best_ids = _scores(logits[part], targets[part], likeliest)
            numbers = self._told_numbers[first + part.start : first + part.stop]
            ids = self._told_ids[first + part.start : first + part.stop]
            numbers[:, 0], numbers[:, 1 : 1 + likeliest] = own, best
            ids[:, 0], ids[:, 1 : 1 + likeliest] = ranks, best_ids

    def scores(self, slots: list[int], lengths: list[int], targets: torch.Tensor) -> FoundScores:
        """What `score` has kept, on its way to the host."""
        count = len(targets)
        return FoundScores(
            self._scores_asked(slots),
            lengths,
            self._to_host(self._told_numbers[:count]),
            self._to_host(self._told_ids[:count]),
            self._to_host(targets),
        )

    def _scores_asked(self, slots: list[int]) -> list[int]:
        return [min(self._slots[slot].params.prompt_logprobs or 0, self._vocab_size) for slot in slots]

    def _to_host(self, found: torch.Tensor) -> torch.Tensor:
        if self._device.type != "cuda":
            return found.clone()
        return torch.empty(found.shape, dtype=found.dtype, device="cpu", pin_memory=True).copy_(
            found, non_blocking=True
        )


def _scores(logits: torch.Tensor, tokens: torch.Tensor, likeliest: int) -> tuple[torch.Tensor, ...]:
    """Log-probability and rank of one token of each row, and those of the likeliest with their ids."""
    scores = logits.float().log_softmax(-1)
    own = scores.gather(1, tokens.long()[:, None])
    best = scores.topk(likeliest)
    return own[:, 0], (scores >= own).sum(-1), best.values, best.indices
