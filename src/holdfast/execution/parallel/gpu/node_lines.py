"""One end of a line between ranks on GPUs of different machines (nodes): words and two slots in pinned memory of the
host, where kernels put and take as they do in the memory of another GPU, and a thread that moves what lies there: from
the slot into the socket and from the socket into the slot, without a copy between.

    stage s     kernel ──► slot, SENT ──► thread ──► socket      TAKEN: the system has it, the slot may be filled again
    stage s+1   socket ──► thread ──► slot, SENT ──► kernel      TAKEN: it has been read

Nothing is launched for it beside what lines.py launches, so it is fit for CUDA graphs. The thread looks at what the GPU
writes again and again: the GPU wakes nobody.
"""

from __future__ import annotations

import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy
import torch

from holdfast.errors import EngineDiedError, EngineError
from holdfast.execution.native.loading import kernels
from holdfast.execution.parallel.segment import COUNT_BITS, REACHED
from holdfast.execution.parallel.sockets.stage_lines import LineIn, bytes_of, hang_up, send_block
from holdfast.execution.streaming.pinned_memory import PinnedMemory, as_device_memory
from holdfast.footprint.gpu import LINE_WORDS_BYTES, line_memory_bytes

SENT, TAKEN, FILLED = 0, 32, 64
"""Words of a line as rank_exchange.cu has them; two of the last."""
_NEVER = 96
"""A word that stays 0."""
LOOK_S, QUIET_LOOK_S = 50e-6, 1e-3
QUIET_AFTER_S = 1.0
"""Without anything on the line: then it is looked at less often, and the first step after a pause waits for it."""
ENDED_S = 5.0


class _Closed(Exception):
    pass


class NodeLine(ABC):
    """`memory`: one piece, zeroed, of `line_memory_bytes(slot_bytes)`; it is this line's from now on, and is given back
    with it. `device`: whose kernels use it."""

    def __init__(self, memory: PinnedMemory, device: torch.device, name: str) -> None:
        [whole] = memory.pieces
        self._memory, self._whole, self._kernels = memory, whole, kernels()
        self.place, self.device_place = whole.data_ptr(), as_device_memory(whole, device).data_ptr()
        """Of the words, for the host and for the GPU; the slots are LINE_WORDS_BYTES behind."""
        self._words = whole[:LINE_WORDS_BYTES].numpy().view(numpy.uint32)
        self._slots = whole[LINE_WORDS_BYTES:].view(2, -1)
        self._closed, self._failure, self._on_failure = False, None, None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    _failure: Exception | None
    _on_failure: Callable[[], None] | None

    @property
    def slot_bytes(self) -> int:
        return int(self._slots.shape[1])

    def tell(self, on_failure: Callable[[], None]) -> None:
        """Called when nothing comes or goes any more, by another thread, or now if that is so already."""
        self._on_failure = on_failure
        if self._failure is not None:
            on_failure()

    def check(self) -> None:
        """Raises where nothing comes or goes any more."""
        if (failure := self._failure) is not None and not self._closed:
            raise failure

    def close(self) -> None:
        """No kernel may use it any longer."""
        self._closed = True
        self._hang_up()
        self._thread.join(ENDED_S)
        self._memory.close()

    @abstractmethod
    def _hang_up(self) -> None: ...

    @abstractmethod
    def _move(self, turn: int) -> None:
        """What comes to this turn, or goes with it."""

    def _run(self) -> None:
        turn = 0
        try:
            while True:
                turn = turn + 1 & COUNT_BITS
                self._move(turn)
        except _Closed:
            pass
        except Exception as error:
            self._failure = error
            if self._on_failure is not None and not self._closed:
                self._on_failure()

    def _await(self, word: int, turn: int) -> None:
        began_s = time.monotonic()
        while not self._reached(word, turn):
            self._watch(0.0)
            time.sleep(LOOK_S if time.monotonic() - began_s < QUIET_AFTER_S else QUIET_LOOK_S)

    def _reached(self, word: int, turn: int) -> bool:
        place, never = self.place + 4 * word, self.place + 4 * _NEVER
        return self._kernels.await_word(place, turn & COUNT_BITS, never, 0, 0, 0) == REACHED

    def _post(self, word: int, turn: int) -> None:
        self._kernels.post(self.place + 4 * word, turn)

    def _watch(self, waited_s: float) -> None:
        if self._closed:
            raise _Closed


class NodeLineOut(NodeLine):
    """What this rank hands on. `line`: connected to the rank behind."""

    def __init__(self, memory: PinnedMemory, device: torch.device, line: socket.socket, rank: int) -> None:
        super().__init__(memory, device, f"line-to-{rank}")
        self._line, self._rank, self._sent = line, rank, 0
        self._thread.start()

    def _move(self, turn: int) -> None:
        self._await(SENT, turn)
        filled, self._sent = int(self._words[FILLED + (turn & 1)]), self._sent + 1
        try:
            send_block(self._line, self._sent, bytes_of(self._slots[turn & 1, :filled]))
        except OSError as error:
            raise EngineDiedError(f"the connection to rank {self._rank} is lost: {error}") from error
        self._post(TAKEN, turn)

    def _hang_up(self) -> None:
        hang_up(self._line)


class NodeLineIn(NodeLine):
    """What this rank takes. `line`: connected to the rank before."""

    def __init__(self, memory: PinnedMemory, device: torch.device, line: socket.socket, rank: int) -> None:
        super().__init__(memory, device, f"line-from-{rank}")
        self._line = LineIn(line, f"rank {rank}", self._watch)
        self._thread.start()

    def _move(self, turn: int) -> None:
        self._await(TAKEN, turn - 2)
        self._line.take_some(self._slots[turn & 1])
        self._post(SENT, turn)

    def _hang_up(self) -> None:
        self._line.close()


def pinned_line(slot_bytes: int, device: torch.device) -> PinnedMemory:
    try:
        return PinnedMemory([line_memory_bytes(slot_bytes)], device)
    except EngineError as error:
        raise EngineError(
            "there is no pinned host memory for what stages hand on to one another",
            code=error.code,
            needed=error.needed,
            found=error.found,
            fix="a larger memory limit of the container, or a smaller --max-num-batched-tokens",
        ) from error
