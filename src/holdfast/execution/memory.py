"""How much memory a piece of work needed, as the system saw it. Linux only; elsewhere it reports nothing."""

from __future__ import annotations

import ctypes
from types import TracebackType


class PeakMemory:
    """Around a piece of work: `grown_bytes` is its peak resident memory beyond what was resident before."""

    def __init__(self) -> None:
        self.grown_bytes = 0
        self._before_bytes = 0

    def __enter__(self) -> PeakMemory:
        try:
            with open("/proc/self/clear_refs", "w") as reset:
                reset.write("5")  # 5: the peak starts again from what is resident now
        except OSError:
            pass
        self._before_bytes = _status_bytes("VmRSS")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.grown_bytes = max(0, _status_bytes("VmHWM") - self._before_bytes)

    @staticmethod
    def resident_bytes() -> int:
        """What the process holds now."""
        return _status_bytes("VmRSS")


def _status_bytes(name: str) -> int:
    try:
        with open("/proc/self/status") as status:
            for line in status:
                if line.startswith(name + ":"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def trim_memory() -> None:
    """Hands freed memory back to the system, where the C library keeps it for itself."""
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):
        return
