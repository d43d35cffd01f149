"""Messages from rank 0 to all other ranks of the machine, in order, through the shared segment. Knows only bytes.

One message lies there at a time, a long one in pieces: the next is written when all have taken this one, which they do
as soon as they are done with the step before. Of a pipeline several lie there, because its stages are that far apart.

    length word   bit 31: more pieces follow · bits 0-30: bytes of this piece
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy

from holdfast.execution.parallel.segment import Segment, Watch
from holdfast.footprint.cpu import MAIL_BYTES

_MORE = 1 << 31


class Sender:
    """`readers`: the ranks that share this memory, but for the sender's own; None: all but the first."""

    def __init__(self, segment: Segment, watch: Watch, readers: Sequence[int] | None = None) -> None:
        self._segment, self._watch, self._count = segment, watch, 0
        self._read = segment.read[1:] if readers is None else [segment.read[rank] for rank in readers]

    @property
    def count(self) -> int:
        return self._count

    def go_on(self) -> None:
        """After an alarm that all readers have followed: what was not shown whole is nobody's."""
        self._count = self._segment.mail.value

    def send(self, message: bytes) -> None:
        for first in range(0, len(message), MAIL_BYTES):
            piece = message[first : first + MAIL_BYTES]
            self._await_readers()
            place = self._count % self._segment.layout.mails
            self._segment.mailbox[place, : len(piece)] = numpy.frombuffer(piece, dtype=numpy.uint8)
            more = _MORE if first + MAIL_BYTES < len(message) else 0
            self._segment.mail_lengths[place].post(len(piece) | more)
            self._count += 1
            self._segment.mail.post(self._count)

    def _await_readers(self) -> None:
        """Until all have taken what lies where the next message goes."""
        taken = self._count + 1 - self._segment.layout.mails
        for word in self._read:
            word.wait(taken, self._watch)


class Receiver:
    def __init__(self, segment: Segment, rank: int, watch: Watch) -> None:
        self._segment, self._rank, self._watch, self._count = segment, rank, watch, 0

    def receive(self) -> bytes:
        """The next message, however long that takes."""
        pieces = list[bytes]()
        while True:
            self._segment.mail.wait_between_steps(self._count + 1, self._watch)
            place = self._count % self._segment.layout.mails
            length = self._segment.mail_lengths[place].value
            pieces.append(self._segment.mailbox[place, : length & ~_MORE].tobytes())
            self.skip_to(self._count + 1)
            if not length & _MORE:
                return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def skip_to(self, count: int) -> None:
        """Messages up to this one are not read any more."""
        self._count = count
        self._segment.read[self._rank].post(count)
