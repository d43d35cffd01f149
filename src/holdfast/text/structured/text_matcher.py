"""Whether a text that is there follows a grammar: asked while an answer is read, so answered at once or not at all.

One worker process, kept; a grammar is made ready before it is needed. Blocking, for at most ANSWER_S.
"""

from __future__ import annotations

import select
import time

import msgspec

from holdfast.errors import HoldfastError
from holdfast.records.structured import StructuredOutputsParams
from holdfast.text.structured import wire
from holdfast.text.structured.client import GrammarService, WorkerConnection
from holdfast.units import MIB

LIMITS = wire.Limits(memory_bytes=16 * MIB, cpu_s=1, niceness=0)
MAX_BYTES = 4 << 10
"""Of a grammar, as it is written."""
ANSWER_S = 0.1


class TextMatcher:
    """For grammars that were checked before, as a part of another, and are small: no text follows another one."""

    def __init__(self, service: GrammarService) -> None:
        self._service = service
        self._worker: WorkerConnection | None = None

    def prepare(self, params: StructuredOutputsParams) -> None:
        """Returns at once."""
        if len(msgspec.json.encode(params)) <= MAX_BYTES:
            self._send(wire.Accepts(params, None))

    def accepts(self, text: str, params: StructuredOutputsParams) -> bool:
        """Members of objects in the order of the schema."""
        if len(msgspec.json.encode(params)) > MAX_BYTES or not self._send(wire.Accepts(params, text)):
            return False
        assert self._worker is not None
        end_s = time.monotonic() + ANSWER_S
        while (left_s := end_s - time.monotonic()) > 0:
            if not select.select([self._worker.socket], [], [], left_s)[0]:
                break
            received = self._worker.receive()
            if received is None:
                break
            for answer in received:
                if isinstance(answer, wire.Accepted):
                    return answer.text_fits
        # Too slow, or dead: what it would say later would be taken for the answer to another question.
        self.close()
        return False

    def _send(self, message: wire.Accepts) -> bool:
        for _ in range(2):
            try:
                if self._worker is None:
                    self._service.start()
                    self._worker = WorkerConnection(self._service.address, LIMITS)
                    self._worker.socket.settimeout(ANSWER_S)
                self._worker.send(message)
                return True
            except (OSError, HoldfastError):
                self.close()  # The next one is new: a worker that died of another grammar is not the end of it.
        return False

    def close(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker = None
