"""One answer read as it grows: thoughts first, then content and calls, which are looked for only there."""

from __future__ import annotations

from holdfast.text.output.reasoning import ReasoningReader
from holdfast.text.tools.events import Content, Event, Reasoning
from holdfast.text.tools.parser import CallReader


class AnswerReader:
    """Not thread-safe. Events that follow each other are the same, put together, however the text was cut."""

    def __init__(self, thoughts: ReasoningReader | None, calls: CallReader | None) -> None:
        self._thoughts = thoughts
        self._calls = calls

    @property
    def called(self) -> bool:
        """Some were, and the last one whole."""
        return self._calls is not None and self._calls.calls > 0 and self._calls.complete

    def feed(self, text: str) -> list[Event]:
        if self._thoughts is None:
            return self._answered(text)
        thought, answer = self._thoughts.feed(text)
        return [*_thought(thought), *self._answered(answer)]

    def finish(self) -> list[Event]:
        """At the end of the answer: everything that waited."""
        thought, answer = self._thoughts.finish() if self._thoughts is not None else ("", "")
        events = [*_thought(thought), *self._answered(answer)]
        return events if self._calls is None else [*events, *self._calls.finish()]

    def _answered(self, text: str) -> list[Event]:
        if not text:
            return []
        return [Content(text)] if self._calls is None else self._calls.feed(text)


def _thought(text: str) -> list[Event]:
    return [Reasoning(text)] if text else []
