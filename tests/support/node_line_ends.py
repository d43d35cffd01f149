"""What kernels do at the ends of a line between nodes (gpu/cuda/rank_exchange.cu, put_on_line and take_off_line), on a
machine without a GPU: by the same words, in the same order."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from holdfast.execution.native.loading import kernels
from holdfast.execution.parallel.gpu.node_lines import FILLED, SENT, TAKEN, NodeLine
from holdfast.execution.parallel.segment import REACHED
from holdfast.footprint.gpu import LINE_WORDS_BYTES


class LineEnd:
    """`look`: called with the seconds waited so far, and raises where waiting is in vain."""

    def __init__(self, line: NodeLine, look: Callable[[float], None]) -> None:
        self._line, self._look, self._turn = line, look, 0
        whole = line._whole
        self._words = whole[:LINE_WORDS_BYTES].view(torch.int32)
        self._slots = whole[LINE_WORDS_BYTES:].view(2, -1)

    def put(self, numbers: torch.Tensor) -> None:
        self._turn += 1
        self._await(TAKEN, self._turn - 2)
        self._slots[self._turn & 1, : numbers.nbytes].copy_(numbers.view(-1).view(torch.uint8))
        self._words[FILLED + (self._turn & 1)] = numbers.nbytes
        kernels().post(self._line.place + 4 * SENT, self._turn)

    def take(self, out: torch.Tensor) -> None:
        self._turn += 1
        self._await(SENT, self._turn)
        out.view(-1).view(torch.uint8).copy_(self._slots[self._turn & 1, : out.nbytes])
        kernels().post(self._line.place + 4 * TAKEN, self._turn)

    def _await(self, word: int, turn: int) -> None:
        began_s = time.monotonic()
        never = self._line.place + 4 * 96
        while kernels().await_word(self._line.place + 4 * word, turn & 0xFFFFFFFF, never, 0, 0, 0) != REACHED:
            self._look(time.monotonic() - began_s)
            time.sleep(0.0002)
