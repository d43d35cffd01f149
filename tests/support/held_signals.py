"""Which signals do not reach a process, as the system has it."""

from __future__ import annotations

import signal
from pathlib import Path


def hears_no_interrupt(pid: int) -> bool:
    """From before its first line on: SIGINT is held back, whatever the program does with it later."""
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool(int(status["SigBlk"], 16) & 1 << (signal.SIGINT - 1))
