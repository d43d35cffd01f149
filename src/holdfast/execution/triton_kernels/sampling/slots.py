"""The sampling parameters of every slot, on the host and on the device. Knows no logits.

A slot is one line of int32 words on the device (floats by their bits), so that one small copy brings all that changed.
A slot with penalties, biases or bans takes a lane as well: a line of (id, what is added) pairs, and room for logits
of its own in `Lanes`. Who is given one is said by the caller.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy
import numpy.typing
import torch

from holdfast.footprint.sampling import BAD_SPELLING_WORDS, BAD_SPELLINGS, LANE_ENTRIES, SLOT_WORDS, mask_words
from holdfast.records import SamplingParams

ACTIVE, DRAWN, FILTERED, PENALIZED, MASKED = 1, 2, 4, 8, 16
"""Flags: the slot is in use; not greedy; has top_k or top_p; has penalties; may sample some tokens only."""

FLAGS, TOP_K, TEMPERATURE, TOP_P, REACH, PRESENCE, FREQUENCY, REPETITION = range(8)
SEED, PROMPT_LENGTH, LANE, BANS, ENTRIES, MIN_TOKENS, SPELLINGS = 8, 10, 11, 12, 13, 14, 15
"""Words of a slot. SEED takes two. REACH is how far under the best score min_p lets a score be."""

_STAGES = 4
_LANE_STAGES = 16
"""Copies under way at once; one more waits for the first."""

Words = numpy.typing.NDArray[numpy.int32]


class _Staging:
    """Pinned buffers, each written again only when its last copy to the device is done."""

    def __init__(self, depth: int, words: int, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._buffers = torch.zeros((depth, words), dtype=torch.int32, device="cpu", pin_memory=self._cuda)
        self._done: list[torch.cuda.Event | None] = [None] * depth
        self._next = 0

    def copy(self, words: Words, target: torch.Tensor) -> None:
        """`words` to the contiguous `target`, in the order of the current stream; `words` may change afterwards."""
        with self._one() as whole:
            buffer = whole[: words.size]
            buffer.numpy()[:] = words.reshape(-1)
            target.view(-1).copy_(buffer, non_blocking=True)

    def copy_lines(self, lines: Sequence[tuple[int, Words]], target: torch.Tensor) -> None:
        """Each to its own line of the contiguous `target` [lines, words], and nothing else; sorted by line. Neighbours
        go in one copy."""
        with self._one() as whole:
            buffer = whole[: len(lines) * target.shape[1]].view(len(lines), -1)
            filled, first = buffer.numpy(), 0
            for index, (line, words) in enumerate(lines):
                filled[index] = words
                if index + 1 == len(lines) or lines[index + 1][0] != line + 1:
                    target[line - index + first : line + 1].copy_(buffer[first : index + 1], non_blocking=True)
                    first = index + 1

    @contextmanager
    def _one(self) -> Iterator[torch.Tensor]:
        """A buffer to copy from."""
        index, self._next = self._next, (self._next + 1) % len(self._done)
        done = self._done[index]
        if done is not None:
            done.synchronize()
        yield self._buffers[index]
        if self._cuda:
            if done is None:
                done = self._done[index] = torch.cuda.Event()
            done.record()


class SlotParams:
    """`write` and `release` change the host's side; `upload` brings it to the device, before a step is launched."""

    def __init__(self, slots: int, vocab_size: int, device: torch.device, lanes: int) -> None:
        self._vocab_size = vocab_size
        self.host: Words = numpy.zeros((slots, SLOT_WORDS), dtype=numpy.int32)
        self.host[:, LANE] = -1
        self._floats = self.host.view(numpy.float32)
        self._seeds = self.host.view(numpy.int64)
        self.table = torch.from_numpy(self.host.copy()).to(device)
        self.entries = torch.zeros((max(lanes, 1), LANE_ENTRIES, 2), dtype=torch.int32, device=device)
        """[lane, entry, id | bits of what is added]: bans first, then biases."""
        self.masks = torch.zeros((max(lanes, 1), mask_words(vocab_size)), dtype=torch.int32, device=device)
        """[lane, token // 32]: a bit for each token that may be sampled."""
        spellings = (max(lanes, 1), BAD_SPELLINGS, BAD_SPELLING_WORDS)
        self.spellings = torch.zeros(spellings, dtype=torch.int32, device=device)
        """[lane, spelling, length | tokens] of bad words."""
        self._free = list(range(lanes))[::-1]
        self._changed: set[int] = set()
        self._pending: dict[int, list[tuple[Words, torch.Tensor]]] = {}
        """By lane: what is still to be copied, and where to."""
        self._staging = _Staging(_STAGES, self.host.size, device)
        largest = max(2 * LANE_ENTRIES, self.masks.shape[1], BAD_SPELLINGS * BAD_SPELLING_WORDS)
        self._lane_staging = _Staging(_LANE_STAGES, largest, device)
        self._mask_staging: _Staging | None = None
        self._device = device

    @property
    def free_lanes(self) -> int:
        return len(self._free)

    @property
    def nbytes(self) -> int:
        """On the device."""
        return self.table.nbytes + self.entries.nbytes + self.masks.nbytes + self.spellings.nbytes

    def write(
        self,
        slot: int,
        params: SamplingParams,
        prompt_length: int,
        banned: Sequence[int] = (),
        bad_words: Sequence[Sequence[int]] = (),
    ) -> bool:
        """A sequence takes the slot. False: no lane is free or too much is banned; its rows then sample nothing."""
        self.release(slot)
        bans = [token for token in banned if 0 <= token < self._vocab_size] if params.min_tokens else []
        biases = {token: bias for token, bias in (params.logit_bias or {}).items() if 0 <= token < self._vocab_size}
        penalized = bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0)
        entries, constrained = len(bans) + len(biases), params.structured_outputs is not None
        masked = constrained or params.allowed_token_ids is not None
        lane = -1
        if entries or penalized or masked or bad_words:
            if not self._free or entries > LANE_ENTRIES or len(bad_words) > BAD_SPELLINGS:
                return False
            lane = self._free.pop()
            self._pending[lane] = self._of_lane(lane, params, bans, biases, bad_words)
        line, floats = self.host[slot], self._floats[slot]
        filtered = 0 < params.top_k < self._vocab_size or params.top_p < 1
        flags = ACTIVE | (0 if params.greedy else DRAWN | (FILTERED if filtered else 0))
        line[FLAGS] = flags | (PENALIZED if penalized else 0) | (MASKED if masked else 0)
        line[TOP_K] = params.top_k if params.top_k < self._vocab_size else 0
        floats[TEMPERATURE], floats[TOP_P] = params.temperature, params.top_p
        floats[REACH] = max(0.0, -math.log(params.min_p)) if params.min_p else math.inf
        floats[PRESENCE], floats[FREQUENCY] = params.presence_penalty, params.frequency_penalty
        floats[REPETITION] = params.repetition_penalty
        self._seeds[slot, SEED // 2] = params.seed or 0
        line[PROMPT_LENGTH], line[LANE], line[BANS], line[ENTRIES] = prompt_length, lane, len(bans), entries
        line[MIN_TOKENS], line[SPELLINGS] = min(params.min_tokens, 2**31 - 1), len(bad_words)
        return True

    def _of_lane(
        self,
        lane: int,
        params: SamplingParams,
        bans: list[int],
        biases: dict[int, float],
        bad_words: Sequence[Sequence[int]],
    ) -> list[tuple[Words, torch.Tensor]]:
        """What its tables shall hold, and where."""
        due: list[tuple[Words, torch.Tensor]] = []
        if bans or biases:
            added = numpy.array([-math.inf] * len(bans) + list(biases.values()), dtype=numpy.float32)
            ids = numpy.array([*bans, *biases], dtype=numpy.int32)
            due.append((numpy.stack([ids, added.view(numpy.int32)], axis=-1), self.entries[lane, : len(ids)]))
        if params.allowed_token_ids is not None:
            bits = numpy.zeros(self.masks.shape[1] * 32, dtype=bool)
            bits[[token for token in params.allowed_token_ids if 0 <= token < self._vocab_size]] = True
            due.append((numpy.packbits(bits, bitorder="little").view(numpy.int32), self.masks[lane]))
        if bad_words:
            spelled = numpy.zeros((len(bad_words), BAD_SPELLING_WORDS), dtype=numpy.int32)
            for line, word in zip(spelled, bad_words, strict=True):
                line[0], line[1 : 1 + len(word)] = len(word), word
            due.append((spelled, self.spellings[lane, : len(bad_words)]))
        return due

    def mask(self, words: Mapping[int, Words]) -> None:
        """What these slots may sample in the step that is launched next; each has a lane."""
        if not words:
            return
        if self._mask_staging is None:
            self._mask_staging = _Staging(_STAGES, self.masks.numel(), self._device)
        lanes = {int(self.host[slot, LANE]): line for slot, line in words.items()}
        self._mask_staging.copy_lines(sorted(lanes.items(), key=lambda one: one[0]), self.masks)

    def release(self, slot: int) -> None:
        """Nothing is sampled for the slot any more; a lane it had is free for others."""
        lane = int(self.host[slot, LANE])
        if lane >= 0:
            self._pending.pop(lane, None)
            self._free.append(lane)
        self.host[slot] = 0
        self.host[slot, LANE] = -1
        self._changed.add(slot)

    def upload(self) -> None:
        """What was written since the last time, in the order of the current stream and without waiting for it."""
        if self._changed:
            first, end = min(self._changed), max(self._changed) + 1
            self._staging.copy(self.host[first:end], self.table[first:end])
            self._changed.clear()
        for due in self._pending.values():
            for words, target in due:
                self._lane_staging.copy(words, target)
        self._pending.clear()
