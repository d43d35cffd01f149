"""Who of the open requests is in the engine process, and who may go there next. Names only: no process, no answers.

The process dies, and one of those aboard may be the cause:

    1st death       all are handed over again; whoever gets a token is above suspicion again
    2nd in a row    those who were aboard both times and got nothing are suspects: one at a time is handed over, and
                    the next when the first has got a token. All others wait ashore
    3rd in a row    the suspect on trial is the cause and is ended; the others go on

Whoever was aboard at six deaths in all is ended too, tokens or not: a request may kill the engine at its thousandth
token, again and again.
"""

from __future__ import annotations

from collections.abc import Iterable

DEATHS_TO_SUSPECT = 2
DEATHS_IN_ALL = 6


class CrashQuarantine:
    def __init__(self) -> None:
        self._ashore: dict[str, None] = {}
        self._aboard: dict[str, None] = {}
        self._deaths: dict[str, int] = {}
        """Of requests that have got nothing since: how many engines died with them aboard."""
        self._deaths_in_all: dict[str, int] = {}

    @property
    def suspects(self) -> list[str]:
        return [name for name, deaths in self._deaths.items() if deaths >= DEATHS_TO_SUSPECT]

    def enter(self, names: Iterable[str]) -> None:
        """New requests; they wait ashore."""
        self._ashore.update(dict.fromkeys(names))

    def leave(self, names: Iterable[str]) -> None:
        """Ended or aborted."""
        for name in names:
            self._ashore.pop(name, None)
            self._aboard.pop(name, None)
            self._deaths.pop(name, None)
            self._deaths_in_all.pop(name, None)

    def clear(self, name: str) -> None:
        """It got something from the engine."""
        self._deaths.pop(name, None)

    def board(self) -> list[str]:
        """Those to hand over now; they are aboard from here on. To be asked again whenever anything has changed."""
        suspects = self.suspects
        if not suspects:
            boarding = list(self._ashore)
        elif any(name in self._aboard for name in suspects):
            boarding = []
        else:
            boarding = suspects[:1]
        for name in boarding:
            del self._ashore[name]
            self._aboard[name] = None
        return boarding

    def disembark(self) -> list[str]:
        """The engine has died. Returns those who are the cause beyond doubt; the caller ends them."""
        guilty = [name for name in self.suspects if name in self._aboard]
        for name in self._aboard:
            self._deaths[name] = self._deaths.get(name, 0) + 1
            self._deaths_in_all[name] = self._deaths_in_all.get(name, 0) + 1
            if self._deaths_in_all[name] >= DEATHS_IN_ALL and name not in guilty:
                guilty.append(name)
        # In the order in which they came: those aboard came before those who wait.
        self._ashore = {**self._aboard, **self._ashore}
        self._aboard = {}
        self.leave(guilty)
        return guilty
