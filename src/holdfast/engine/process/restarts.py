"""When an engine process that ended is started again: after what pause, and when it is given up. Starts nothing."""

from __future__ import annotations

from holdfast.errors import EngineDiedError, HoldfastError, NoResourcesError

MAX_FRUITLESS_STARTS = 4
"""The engine is given up when this many processes in a row ended before a request was handed to them: no request can
be the cause then."""
RETRY_DELAY_S = 0.5
"""Before the start after a fruitless one; doubled each time. What was short for a moment may be there again."""
MAX_RETRY_DELAY_S = 5.0
"""Between tries while the system has no file, process or memory for a start. They are never given up: the lack is not
the engine's, nobody knows how long it lasts, and a try harms nobody."""


class RestartBackoff:
    def __init__(self) -> None:
        self.fruitless = 0
        self._shortages = 0
        self._last, self._cause = "it crashed while idle", None
        """What was said last, and by which error."""

    _cause: HoldfastError | None

    def died(self, *, with_requests: bool) -> None:
        """A process that had been ready has ended."""
        self.fruitless = 0 if with_requests else self.fruitless + 1
        self._shortages, self._last, self._cause = 0, "it crashed while idle", None

    def failed(self, error: HoldfastError) -> None:
        """A process did not become ready, or there was none."""
        if isinstance(error, NoResourcesError):
            self._shortages += 1
        else:
            self._shortages, self.fruitless, self._last = 0, self.fruitless + 1, error.message
            self._cause = error

    @property
    def delay_s(self) -> float:
        """Before the next start."""
        if self._shortages:
            return min(RETRY_DELAY_S * float(2 ** min(self._shortages - 1, 16)), MAX_RETRY_DELAY_S)
        return RETRY_DELAY_S * float(2 ** (self.fruitless - 1)) if self.fruitless else 0.0

    def check(self) -> None:
        """Raises EngineDiedError when it is time to give up."""
        if self.fruitless < MAX_FRUITLESS_STARTS:
            return
        story = (
            f"the engine process crashed or failed to start {self.fruitless} times in a row, each time before it"
            f" received a request (last: {self._last})"
        )
        if self._cause is not None and self._cause.fix is not None:  # It knows better what to do.
            raise EngineDiedError(
                story,
                code=self._cause.code,
                needed=self._cause.needed,
                found=self._cause.found,
                fix=self._cause.fix,
            )
        raise EngineDiedError(story, fix="see the engine's last log lines above; restart with smaller limits")
