"""One connection between the head and a node: messages with their size before them, and an end that both notice.

Sizes are bounded: what comes before the secret is proven is small, and nothing is read into memory that is larger than
its kind may be. Knows only bytes.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time

from holdfast.execution.parallel.sockets.silence import LOST_S, end_when_silent

SIGN_S = 0.5
"""Between two signs of a node that has nothing else to say."""
GONE = f"for {LOST_S} s the other machine, or the way to it, did not answer, or its process has not read what was sent"
"""The system says the same of all three; of a process that stands still once nothing more fits."""
MOST_BYTES = 256 << 20
"""Of a message; plans of thousands of sequences are far below."""
MOST_BEFORE_PROOF = 64 << 10
LEAST_WAIT_S = 0.001
"""Because none at all would be for ever."""
_SIZE = struct.Struct("<I")


class Wire:
    """Messages may be sent by several threads, and are received by one."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._sending = connection, threading.Lock()
        self._until_s: float | None = None
        # Asked now: of one that the other side has closed neither can be asked any more.
        self.own_host, self.other_host = str(connection.getsockname()[0]), str(connection.getpeername()[0])
        connection.setblocking(True)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end_when_silent(connection, sends=True)

    def wait_at_most(self, seconds: float, *, for_all: bool = False) -> None:
        """For any sign of a message; it raises TimeoutError (an OSError) then. `for_all`: for all messages from now on,
        whole, however slowly they come. 0: for ever."""
        self._until_s = time.monotonic() + seconds if for_all else None
        self._limit_silence(seconds)

    def _limit_silence(self, seconds: float) -> None:
        whole = int(seconds)
        limit = struct.pack("ll", whole, int((seconds - whole) * 1e6))
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)

    def send(self, message: bytes) -> None:
        """Raises OSError where it cannot be sent: the connection is ended then, which whoever receives notices. A part
        may have gone, and what came after it would be read as the rest."""
        with self._sending:
            try:
                self._connection.sendall(_SIZE.pack(len(message)))
                self._connection.sendall(message)
            except OSError as error:
                self._shut_down()
                if isinstance(error, TimeoutError):
                    raise OSError(GONE) from None
                raise

    def receive(self, most_bytes: int = MOST_BYTES) -> bytes:
        """The next. EOFError: the other side has ended; OSError: it is lost, or says what it may not."""
        [size] = _SIZE.unpack(self._read(_SIZE.size))
        if size > most_bytes:
            raise OSError(f"a message of {size:,} bytes, of {most_bytes:,} at most")
        return self._read(size)

    def _read(self, size: int) -> bytes:
        found = bytearray(size)
        place, done = memoryview(found), 0
        while done < size:
            if self._until_s is not None:
                if (left_s := self._until_s - time.monotonic()) <= 0:
                    raise TimeoutError("it took too long to be heard")
                self._limit_silence(max(left_s, LEAST_WAIT_S))
            try:
                got = self._connection.recv_into(place[done:])
            except BlockingIOError:
                raise TimeoutError("nothing was heard in time") from None
            except TimeoutError:
                raise OSError(GONE) from None
            if got == 0:
                raise EOFError
            done += got
        return bytes(found)

    def finish(self) -> None:
        """Nothing more is sent; what was sent is still heard."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._shut_down()
        self._connection.close()

    def _shut_down(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
