"""Which open requests are in the engine process, and which may be dispatched next. Names only: no process, no answers.

The process crashes, and one of the requests in it may be the cause:

    1st crash       all are dispatched again; a request that gets a token is above suspicion again
    2nd in a row    those that were running both times and got nothing are suspects: one at a time is dispatched, and
                    the next when the first has got a token. All others wait
    3rd in a row    the suspect on trial is the cause and is ended; the others go on

A request that was running at six crashes in all is ended too, tokens or not: it may crash the engine at its thousandth
token, again and again.
"""

from __future__ import annotations

from collections.abc import Iterable

CRASHES_TO_SUSPECT = 2
CRASHES_IN_ALL = 6


class CrashQuarantine:
    def __init__(self) -> None:
        self._waiting: dict[str, None] = {}
        self._running: dict[str, None] = {}
        self._crashes: dict[str, int] = {}
        """Of requests that have got nothing since: how many engines crashed while they ran."""
        self._crashes_in_all: dict[str, int] = {}

    @property
    def suspects(self) -> list[str]:
        return [name for name, crashes in self._crashes.items() if crashes >= CRASHES_TO_SUSPECT]

    def enter(self, names: Iterable[str]) -> None:
        """New requests; they wait."""
        self._waiting.update(dict.fromkeys(names))

    def leave(self, names: Iterable[str]) -> None:
        """Ended or aborted."""
        for name in names:
            self._waiting.pop(name, None)
            self._running.pop(name, None)
            self._crashes.pop(name, None)
            self._crashes_in_all.pop(name, None)

    def clear(self, name: str) -> None:
        """It got something from the engine."""
        self._crashes.pop(name, None)

    def dispatch(self) -> list[str]:
        """Those to hand over now; they are running from here on. To be called again whenever anything has changed."""
        suspects = self.suspects
        if not suspects:
            chosen = list(self._waiting)
        elif any(name in self._running for name in suspects):
            chosen = []
        else:
            chosen = suspects[:1]
        for name in chosen:
            del self._waiting[name]
            self._running[name] = None
        return chosen

    def on_crash(self) -> list[str]:
        """Returns those that are the cause beyond doubt; the caller ends them."""
        guilty = [name for name in self.suspects if name in self._running]
        for name in self._running:
            self._crashes[name] = self._crashes.get(name, 0) + 1
            self._crashes_in_all[name] = self._crashes_in_all.get(name, 0) + 1
            if self._crashes_in_all[name] >= CRASHES_IN_ALL and name not in guilty:
                guilty.append(name)
        # In the order in which they came: those that ran came before those that wait.
        self._waiting = {**self._running, **self._waiting}
        self._running = {}
        self.leave(guilty)
        return guilty
