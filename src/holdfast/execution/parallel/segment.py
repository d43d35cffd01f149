"""Memory that the ranks of one machine share: an anonymous file, which is gone when the last of them is.

    words     one a cache line: an alarm, where to go on after it, a count for each rank, those of the mailbox
    mailbox   bytes from rank 0 to all others, with several stages as many messages as there are stages
    slots     [rank][2][slot bytes]: what each rank shows the others, in turns
    streams   [stage but the last][stream bytes]: what a stage hands on; answers: what the last one shows rank 0

A word is written by one process and awaited by others (native/rank_words.h). Knows nothing of what is in the slots.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy
import torch

from holdfast.execution.native.loading import kernels
from holdfast.footprint.cpu import MAIL_BYTES, SLOT_PAGE_BYTES

LINE_BYTES = 64
ALIGNED_BYTES = SLOT_PAGE_BYTES
SPIN_NS = 100_000
"""At most: as long as a rank that has a core to itself is behind another. Where ranks share cores it is soon next to
nothing (native/rank_words.c)."""
MAIL_SPIN_NS = 2_000_000
"""The same for the next step's plan: as long as rank 0 takes between two steps of a small model."""
LOOK_NS = 200_000_000
"""Between two looks at whether the others are still there."""
COUNT_BITS = 0xFFFFFFFF
REACHED, LATE, ALARM = range(3)
"""As rank_words.h numbers them."""

Watch = Callable[[float], None]
"""Called with the seconds waited so far, again and again while something is awaited, and at an alarm; raises where
waiting has no sense any more."""


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    size: int
    """Ranks."""
    slot_bytes: int
    """A multiple of a page, as is what follows."""
    stages: int = 1
    stream_bytes: int = 0
    """That a stage hands on at a time: all of a step."""
    answer_bytes: int = 0
    """That one rank of the last stage shows the first rank at a time."""

    @property
    def tensor_parallel(self) -> int:
        """Ranks of one stage, which follow one another."""
        return self.size // self.stages

    @property
    def mails(self) -> int:
        """Messages on their way: a stage may be as many steps behind the first one as there are stages."""
        return self.stages

    @property
    def words_bytes(self) -> int:
        lines = 3 + self.mails + (2 if self.stages == 1 else 5) * self.size
        return -(-lines * LINE_BYTES // ALIGNED_BYTES) * ALIGNED_BYTES

    @property
    def slots_at(self) -> int:
        return self.words_bytes + self.mails * MAIL_BYTES

    @property
    def streams_at(self) -> int:
        return self.slots_at + 2 * self.size * self.slot_bytes

    @property
    def answers_at(self) -> int:
        return self.streams_at + (self.stages - 1) * self.stream_bytes

    @property
    def nbytes(self) -> int:
        return self.answers_at + (self.tensor_parallel * self.answer_bytes if self.stages > 1 else 0)


class SharedWord:
    """One count, at its address."""

    def __init__(self, segment: Segment, line: int) -> None:
        self._segment, self._kernels, self._place = segment, kernels(), line * LINE_BYTES // 4
        self._address = segment.address + line * LINE_BYTES

    @property
    def address(self) -> int:
        return self._address

    @property
    def value(self) -> int:
        return int(self._segment.numbers[self._place])

    def post(self, value: int) -> None:
        self._kernels.post(self._address, value & COUNT_BITS)

    def wait(self, value: int, watch: Watch) -> None:
        """Until it has counted up to `value`."""
        segment, waited_s = self._segment, 0.0
        while True:
            outcome = self._kernels.await_word(
                self._address, value & COUNT_BITS, segment.alarm.address, segment.calm, SPIN_NS, LOOK_NS
            )
            if outcome == REACHED:
                return
            waited_s += LOOK_NS / 1e9 if outcome == LATE else 0.0
            watch(waited_s)

    def wait_between_steps(self, value: int, watch: Watch) -> None:
        """The same, of what comes soon while there is work, and not for hours while there is none."""
        segment, waited_s = self._segment, 0.0
        while True:
            outcome = self._kernels.await_mail(
                self._address,
                value & COUNT_BITS,
                segment.alarm.address,
                segment.calm,
                MAIL_SPIN_NS,
                LOOK_NS,
                segment.waited_address,
            )
            if outcome == REACHED:
                return
            waited_s += LOOK_NS / 1e9 if outcome == LATE else 0.0
            watch(waited_s)


class Segment:
    """`descriptor`: of the file as another process handed it over; None: a new one."""

    def __init__(self, layout: SegmentLayout, descriptor: int | None = None) -> None:
        self.layout = layout
        self.descriptor = os.memfd_create("holdfast-ranks") if descriptor is None else descriptor
        if descriptor is None:
            os.ftruncate(self.descriptor, layout.nbytes)
        # By its path, because Python's own mmap would keep a descriptor of the file as well.
        mapped = torch.from_file(f"/proc/self/fd/{self.descriptor}", True, layout.nbytes, dtype=torch.uint8)
        self.address, held = mapped.data_ptr(), mapped.numpy()
        self.numbers = held[: layout.words_bytes].view(numpy.uint32)
        self.alarm, self.resume = SharedWord(self, 0), SharedWord(self, 1)
        self._waited = numpy.zeros(1, dtype=numpy.int64)
        self._calm = numpy.array([self.alarm.value], dtype=numpy.uint32)
        size, lines = layout.size, itertools.count(2)

        def words(count: int) -> list[SharedWord]:
            return [SharedWord(self, next(lines)) for _ in range(count)]

        [self.mail] = words(1)
        self.mail_lengths, self.counts, self.read = words(layout.mails), words(size), words(size)
        several = size if layout.stages > 1 else 0
        self.sent, self.taken, self.alive = words(several), words(several), words(several)
        """Of a pipeline, for each rank: what it has handed on or shown, what it has taken, and that it is at work."""
        mails, slots, streams, answers = layout.words_bytes, layout.slots_at, layout.streams_at, layout.answers_at
        self.mailbox = held[mails:slots].reshape(layout.mails, MAIL_BYTES)
        self._slots = mapped[slots:streams].view(size, 2, layout.slot_bytes)
        self._streams = mapped[streams:answers].view(layout.stages - 1, layout.stream_bytes)
        self._answers = mapped[answers:].view(-1, layout.answer_bytes) if layout.stages > 1 else mapped[:0]

    def stream(self, stage: int) -> torch.Tensor:
        """uint8 [stream bytes]: what this stage hands on."""
        return self._streams[stage]

    def answer(self, place: int) -> torch.Tensor:
        """uint8 [answer bytes]: of this rank of the last stage."""
        return self._answers[place]

    @property
    def calm(self) -> int:
        """The alarm's value while nothing is wrong, for this rank."""
        return int(self._calm[0])

    @calm.setter
    def calm(self, value: int) -> None:
        self._calm[0] = value & COUNT_BITS

    @property
    def calm_address(self) -> int:
        return int(self._calm.ctypes.data)

    def slot(self, rank: int, turn: int) -> torch.Tensor:
        """uint8 [slot bytes]"""
        return self._slots[rank, turn % 2]

    @property
    def waited_address(self) -> int:
        """Of how long this rank waited for its last message."""
        return int(self._waited.ctypes.data)

    @property
    def slots_address(self) -> int:
        return self.address + self.layout.slots_at

    def close(self) -> None:
        """The memory goes when nobody maps it any more. Nobody may wait for a word of it meanwhile, or afterwards."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
        self.numbers, self.mailbox, self._slots = self.numbers.copy(), self.mailbox[:0].copy(), self._slots[:0].clone()
        self._streams, self._answers = self._streams[:0].clone(), self._answers[:0].clone()


class StageSegment:
    """The part of a segment that the ranks of one stage have for their collectives."""

    def __init__(self, segment: Segment, stage: int) -> None:
        size = segment.layout.tensor_parallel
        self.layout = SegmentLayout(size, segment.layout.slot_bytes)
        self.counts, self.alarm = segment.counts[stage * size : (stage + 1) * size], segment.alarm
        self._segment, self._first = segment, stage * size

    @property
    def calm_address(self) -> int:
        return self._segment.calm_address

    @property
    def slots_address(self) -> int:
        return self._segment.slots_address + 2 * self._first * self.layout.slot_bytes

    def slot(self, rank: int, turn: int) -> torch.Tensor:
        return self._segment.slot(self._first + rank, turn)

    def close(self) -> None:
        self._segment.close()
