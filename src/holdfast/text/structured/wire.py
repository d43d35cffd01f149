"""What is said between a grammar worker process and those it works for: msgspec records, each behind its length.

Owns the framing and the marker: a small piece of shared memory in which a worker notes what it is about to do, so that
after its death it is known which grammar it died of.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from typing import NamedTuple

import msgspec

from holdfast.records import Failure
from holdfast.records.structured import StructuredOutputsParams, Vocabulary

MAX_MESSAGE_BYTES = 64 << 20
"""Of one message, which nobody here ever sends: a length beyond it is a broken stream."""
_LENGTH = struct.Struct("<I")


class Setup(msgspec.Struct, frozen=True):
    """The service's own first message."""

    vocabulary: Vocabulary
    eos_ids: list[int]
    vocab_size: int


class WorkerLimits(msgspec.Struct, frozen=True, tag=True):
    """The first message to a worker."""

    memory_bytes: int
    """That it may take beyond what it was born with."""
    cpu_s: int
    """Of one thing it is asked for; the system ends it then."""
    niceness: int


class Check(msgspec.Struct, frozen=True, tag=True):
    """Compiles a grammar and tries it out."""

    params: StructuredOutputsParams


class Accepts(msgspec.Struct, frozen=True, tag=True):
    params: StructuredOutputsParams
    text: str


class Open(msgspec.Struct, frozen=True, tag=True):
    """An answer that follows a grammar, and what it has so far."""

    number: int
    params: StructuredOutputsParams
    token_ids: list[int]


class Advance(msgspec.Struct, frozen=True, tag=True):
    tokens: list[tuple[int, int, bool]]
    """Number of an answer, its next token, and whether a mask of what may follow is wanted."""


class Close(msgspec.Struct, frozen=True, tag=True):
    numbers: list[int]


class Hello(msgspec.Struct, frozen=True, tag=True):
    pid: int


class GrammarCost(msgspec.Struct, frozen=True, tag=True):
    """Of a grammar that was compiled and tried out."""

    cpu_s: float
    slowest_mask_s: float
    held_bytes: int


class GrammarRefused(msgspec.Struct, frozen=True, tag=True):
    failure: Failure


class Accepted(msgspec.Struct, frozen=True, tag=True):
    text_fits: bool


class Opened(msgspec.Struct, frozen=True, tag=True):
    number: int
    length: int
    """Tokens of the answer that it knows: what it says of fewer than there are by now is out of date."""
    held_bytes: int = 0
    complete: bool = False
    failure: Failure | None = None


class Advanced(msgspec.Struct, frozen=True, tag=True):
    complete: list[int]
    """Answers after whose token nothing may follow."""
    failed: dict[int, Failure]
    others: list[int]


class Filled(msgspec.Struct, frozen=True, tag=True):
    number: int
    length: int
    mask: bytes
    cpu_s: float
    grown_bytes: int = 0
    failure: Failure | None = None


ToWorker = WorkerLimits | Check | Accepts | Open | Advance | Close
FromWorker = Hello | GrammarCost | GrammarRefused | Accepted | Opened | Advanced | Filled

_encode = msgspec.msgpack.Encoder().encode
_to_worker = msgspec.msgpack.Decoder(ToWorker)
_from_worker = msgspec.msgpack.Decoder(FromWorker)


def pack(message: ToWorker | FromWorker | Setup) -> bytes:
    body = _encode(message)
    return _LENGTH.pack(len(body)) + body


class Inbox:
    """Bytes as they come, until they are whole messages."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def put(self, received: bytes) -> None:
        self._bytes += received

    def _body(self) -> bytes | None:
        if len(self._bytes) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._bytes)
        if length > MAX_MESSAGE_BYTES:
            raise ValueError("the message is too long")
        end = _LENGTH.size + length
        if len(self._bytes) < end:
            return None
        body = bytes(self._bytes[_LENGTH.size : end])
        del self._bytes[:end]
        return body

    def to_worker(self) -> ToWorker | None:
        body = self._body()
        return None if body is None else _to_worker.decode(body)

    def from_worker(self) -> FromWorker | None:
        body = self._body()
        return None if body is None else _from_worker.decode(body)


class Doing(NamedTuple):
    number: int
    opening: bool
    """It is being compiled."""
    began_s: float
    """time.monotonic(), the same clock in every process."""
    cpu_s: float
    """Of its processor time, then."""


class Marker:
    """What a worker is doing, seen from outside. The worker writes, the other side reads, and neither waits: the count
    is odd while the rest is being written, and another one when it was written meanwhile."""

    _COUNT, _NUMBER, _OPENING = range(3)
    _BEGAN, _CPU = 3, 4
    _IDLE = -1

    def __init__(self, descriptor: int | None = None) -> None:
        """`descriptor`: of the other side's; it stays the caller's to close. Without one, a new marker."""
        self.descriptor = os.memfd_create("holdfast-grammar") if descriptor is None else descriptor
        if descriptor is None:
            os.ftruncate(self.descriptor, mmap.PAGESIZE)
        self._memory = mmap.mmap(self.descriptor, mmap.PAGESIZE)
        # Words of the machine, each of which is written at once.
        self._whole = memoryview(self._memory).cast("q")
        self._real = memoryview(self._memory).cast("d")
        if descriptor is None:
            self.done()

    def begin(self, number: int, *, opening: bool) -> None:
        self._whole[self._COUNT] += 1
        self._real[self._BEGAN], self._real[self._CPU] = time.monotonic(), time.thread_time()
        self._whole[self._OPENING], self._whole[self._NUMBER] = opening, number
        self._whole[self._COUNT] += 1

    def done(self) -> None:
        self._whole[self._COUNT] += 1
        self._whole[self._NUMBER] = self._IDLE
        self._whole[self._COUNT] += 1

    def read(self) -> Doing | None:
        """None where it does nothing, or is just about to do something else."""
        count = self._whole[self._COUNT]
        number, opening = self._whole[self._NUMBER], bool(self._whole[self._OPENING])
        found = Doing(number, opening, self._real[self._BEGAN], self._real[self._CPU])
        if count % 2 or count != self._whole[self._COUNT] or number == self._IDLE:
            return None
        return found

    def last(self) -> int:
        """Of a worker that has died: the number of the answer it was working on, or -1."""
        return self._whole[self._NUMBER]

    def close(self) -> None:
        self._whole.release()
        self._real.release()
        self._memory.close()
