"""Whether a text that is there follows a grammar: asked while an answer is read, so answered at once or not at all.

A fresh worker process each time, which takes milliseconds and remembers nothing of another request. Blocking, for at
most ANSWER_S, and only for grammars that were checked before and found to be cheap.
"""

from __future__ import annotations

import time

import msgspec

from holdfast.errors import HoldfastError
from holdfast.records.structured import StructuredOutputsParams
from holdfast.text.structured import wire
from holdfast.text.structured.checker import GrammarChecker, readable
from holdfast.text.structured.client import GrammarService, WorkerConnection
from holdfast.units import MIB

LIMITS = wire.WorkerLimits(memory_bytes=12 * MIB, cpu_s=1, niceness=0)
MAX_BYTES = 4 << 10
"""Of a grammar, as it is written."""
MAX_CPU_S = 0.03
"""That its check took."""
ANSWER_S = 0.1


class TextMatcher:
    def __init__(self, service: GrammarService, checker: GrammarChecker) -> None:
        self._service, self._checker = service, checker

    def accepts(self, text: str, params: StructuredOutputsParams) -> bool:
        """Members of objects in the order of the schema. False also where it is not known."""
        try:
            cost = self._checker.known(params)
        except HoldfastError:
            return False
        if cost is None or cost.cpu_s > MAX_CPU_S or len(msgspec.json.encode(params)) > MAX_BYTES:
            return False
        try:
            worker = WorkerConnection(self._service.address, LIMITS)
        except OSError:
            return False
        try:
            return self._answer(worker, wire.Accepts(params, text))
        except OSError:
            return False
        finally:
            worker.kill()

    def _answer(self, worker: WorkerConnection, asked: wire.Accepts) -> bool:
        worker.send(asked)
        end_s = time.monotonic() + ANSWER_S
        while (left_s := end_s - time.monotonic()) > 0 and readable(worker, left_s):
            received = worker.receive()
            if received is None:
                break
            for answer in received:
                if isinstance(answer, wire.Accepted):
                    return answer.text_fits
        return False
