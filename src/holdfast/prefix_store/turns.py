"""When a disk is asked for pages, where it is asked for other things too: somebody else decides that."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Literal, Protocol


class Turns(Protocol):
    @property
    def piece_bytes(self) -> int:
        """The most that is to be read or written in one piece, but for a page that is larger."""

    def pages(self, use: Literal["read", "write"], nbytes: int, since_s: float) -> AbstractContextManager[None]:
        """Entered when it is the turn of so many bytes, which somebody has waited for since then, by the clock of
        `time.monotonic`; they are read or written within."""


class AtOnce:
    """Of a disk that is asked for nothing else."""

    piece_bytes = 1 << 62

    def pages(self, use: Literal["read", "write"], nbytes: int, since_s: float) -> AbstractContextManager[None]:
        return nullcontext()
