"""The doctor's eyes on the output of a program that runs: lines in, whether it serves and what it died of out.

Reads less of what comes over and over, and never lets a fault of the doctor's own reach the program.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from holdfast.doctor import LiveDiagnosis
from holdfast.doctor.findings import Diagnosis

Result = TypeVar("Result")
READ_EACH, READ_EVERY = 100, 100
"""Of lines that are the same but for their digits, the first are all read, then one of so many."""
KEYS_HELD, KEY_CHARS = 20_000, 200
_WITHOUT_DIGITS = str.maketrans("", "", "0123456789abcdef")
"""And letters of hex, as ids have them."""
_ANSWERED = re.compile(r"\"(?:GET|POST) /\S* HTTP/[\d.]+\" 200|done request: (?:GET|POST) /\S* \S+ 200")
"""A request that was answered, as servers log it: who has served one has served."""


class OutputWatcher:
    """The doctor's eyes on the output. A fault of the doctor's own must not end a server that is well."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._times: dict[str, int] = {}
        self._answered = False
        self._watch: LiveDiagnosis | None = None
        self._watch = self._safely(LiveDiagnosis)

    def feed(self, line: str) -> None:
        watch = self._watch
        if self._is_news(line):
            self._answered = self._answered or _ANSWERED.search(line) is not None
            if watch is not None:
                self._safely(lambda: watch.feed(line))

    def _is_news(self, line: str) -> bool:
        """Reading a line takes longer than passing it on: of one that comes over and over, its digits aside, few are
        read, so that a server which logs thousands of requests a second is not held up."""
        key = line[:KEY_CHARS].translate(_WITHOUT_DIGITS)
        times = self._times.get(key, 0) + 1
        if len(self._times) >= KEYS_HELD:
            self._times.clear()
        self._times[key] = times
        return times <= READ_EACH or times % READ_EVERY == 0

    @property
    def ready(self) -> bool:
        return self._answered or (self._watch is not None and self._watch.ready)

    def diagnosis(self) -> Diagnosis:
        found = None if self._watch is None else self._safely(self._watch.diagnosis)
        nothing = Diagnosis(engine=None, engine_version=None, command=None, phase=None, healthy=False, findings=[])
        return found or nothing

    def _safely(self, look: Callable[[], Result]) -> Result | None:
        try:
            return look()
        except Exception as error:
            self._watch = None
            self._say(
                f"the output is no longer analyzed, because of a bug in Holdfast ({type(error).__name__}: {error})"
            )
            return None
