"""How much memory a piece of work needed, as the system saw it. Linux only; elsewhere it reports nothing."""

from __future__ import annotations

import ctypes
from types import TracebackType

from holdfast.hardware import resident


class PeakMemory:
    """Around pieces of work, one after the other: `grown_bytes` is the peak of resident memory in all of them so far,
    beyond what was resident before the first."""

    def __init__(self) -> None:
        self.grown_bytes = 0
        self._before_bytes: int | None = None

    def __enter__(self) -> PeakMemory:
        try:
            with open("/proc/self/clear_refs", "w") as reset:
                reset.write("5")  # 5: the peak starts again from what is resident now
        except OSError:
            pass
        if self._before_bytes is None:
            self._before_bytes = self.resident_bytes()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        held = resident()
        if held is not None and self._before_bytes is not None:
            self.grown_bytes = max(self.grown_bytes, held.peak_bytes - self._before_bytes)

    @property
    def given_back_bytes(self) -> int:
        """Of what it grew by, what is not resident now."""
        return max(0, self.grown_bytes - (self.resident_bytes() - (self._before_bytes or 0)))

    @staticmethod
    def resident_bytes() -> int:
        """What the process holds now."""
        held = resident()
        return 0 if held is None else held.now_bytes


def trim_memory() -> None:
    """Hands freed memory back to the system, where the C library keeps it for itself."""
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):
        return
