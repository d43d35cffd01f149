"""Whether an engine process still answers: how long nothing was heard of it, and what follows at which limit.

    heard ──── silent ────► late (not ready) ──── silent ────► hung (killed, started again)
                            a quarter of the limit             the limit

Only time in which this process was awake itself counts: when a tick comes late, because the machine slept or this
process was stopped, the engine is not blamed for it. Knows nothing of requests.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from holdfast.config import EngineConfig
from holdfast.errors import EngineHungError
from holdfast.observability.decisions import Decision
from holdfast.records import EngineInfo
from holdfast.units import format_duration

log = logging.getLogger("holdfast")

TICK_S = 0.25
LATE_SHARE = 0.25
"""Of the limit: from here on the server is not ready, and the process may still come back."""
LEAST_LIMIT_S = 60.0
"""Where no limit is set. The process is heard each second, on a CPU also between the layers of a long step. On a GPU it
is silent while a kernel is compiled at its first use: for seconds, or some tens of them on a busy machine."""
SLOWER_THAN_PROFILED = 10
"""How much longer the longest silence may be than the profiled part of a step: at the end of a long context a layer
takes several times what it takes at the beginning."""
LOADING_FACTOR = 10
"""While it loads, the limit is so much longer: a large tensor may come over a slow network."""


def hang_limit(config: EngineConfig, info: EngineInfo) -> tuple[float, Decision]:
    """After how many seconds of silence an engine that is ready is taken to hang; 0: never."""
    profile_run_s = info.profile_run_s or 0.0
    limit_s, source = LEAST_LIMIT_S, "default"
    reason = "the longest interval between two heartbeats in the profile run took " + format_duration(profile_run_s)
    if config.engine_hang_timeout is not None:
        limit_s, source = config.engine_hang_timeout, "set"
        reason = "set by the user" if limit_s else "hang detection is off"
    elif info.profile_run_s is None:
        reason = "a step on a GPU takes far less, even when a kernel is compiled on first use"
    elif SLOWER_THAN_PROFILED * profile_run_s > LEAST_LIMIT_S:
        limit_s, source = round(SLOWER_THAN_PROFILED * profile_run_s), "measured"
        reason = f"{SLOWER_THAN_PROFILED} times the measured interval: {reason}"
    return limit_s, Decision("engine_hang_timeout", f"{limit_s:g} s", reason, source)


def loading_limit_s(config: EngineConfig) -> float:
    """The same for one that loads, without a sign of progress."""
    set_s = config.engine_hang_timeout
    return LOADING_FACTOR * (LEAST_LIMIT_S if set_s is None else set_s)


class HeartbeatMonitor:
    """Of one process. `limit_s`: 0: never; `kill` is called once, when it hangs."""

    def __init__(
        self,
        limit_s: float,
        kill: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        named: str = "the engine process",
    ) -> None:
        self._named = named
        self._limit_s = limit_s
        self._kill = kill
        self._clock = clock
        self._ticked_s = clock()
        self._warned = False
        self.silent_s = 0.0
        self.hung = False

    @property
    def late(self) -> bool:
        return 0 < self._limit_s * LATE_SHARE <= self.silent_s

    @property
    def story(self) -> str:
        return (
            f"{self._named} has not responded for {format_duration(self.silent_s)}; "
            f"after {format_duration(self._limit_s)} it is killed and restarted"
        )

    def expect(self, limit_s: float) -> None:
        """From now on within another limit."""
        self._limit_s = limit_s
        self.heard()

    def heard(self) -> None:
        if self._warned:
            log.warning("%s is responding again after %s", self._named, format_duration(self.silent_s))
            self._warned = False
        self.silent_s = 0.0

    def tick(self) -> None:
        now_s = self._clock()
        elapsed_s, self._ticked_s = now_s - self._ticked_s, now_s
        self.silent_s += min(elapsed_s, 2 * TICK_S)
        if self.late and not self._warned:
            self._warned = True
            log.error("%s [%s]", self.story, EngineHungError.code)
        if 0 < self._limit_s <= self.silent_s and not self.hung:
            self.hung = True
            log.error(
                "%s has not responded for %s and is killed [%s]",
                self._named,
                format_duration(self.silent_s),
                EngineHungError.code,
            )
            self._kill()

    async def run(self) -> None:
        """Until cancelled, or it was killed."""
        while not self.hung:
            await asyncio.sleep(TICK_S)
            self.tick()
