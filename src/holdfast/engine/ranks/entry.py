"""The first lines of a rank that is not the first, before anything large is imported. The rest is in `follower`."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
from typing import NoReturn

from holdfast.engine.startup.preload_torch import preload_torch
from holdfast.leave import leave

_SET_DEATH_SIGNAL = 1
"""prctl's PR_SET_PDEATHSIG."""


def main() -> NoReturn:
    parent, segment, connection = map(int, sys.argv[1:])
    # However rank 0 ends, the system ends this process then: even one that is stopped, and hears of nothing itself.
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(3)
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # They may reach the whole group; rank 0 decides.
        signal.signal(one, signal.SIG_IGN)
    preload_torch()
    gc.disable()
    from holdfast.engine.ranks.follower import run

    leave(run(segment, connection))


if __name__ == "__main__":
    main()
