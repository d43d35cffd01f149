"""One answer of a chat cut into thoughts, text and calls as it grows, for APIs that show these as objects of their own.

Owns what of an answer is text to a reader: white space that only parts thoughts from text, or text from calls, is not.
Knows no API's shapes.
"""

from __future__ import annotations

from holdfast.records import AnswerDelta
from holdfast.server.request.output_parser import OutputParserConfig
from holdfast.text.tools.answers import AnswerReader
from holdfast.text.tools.events import CallBegun, Content, Event, Reasoning


class AnswerPieces:
    """`feed` each delta in order; the last of them, which has a finish reason, gives what was held back."""

    def __init__(self, reading: OutputParserConfig | None) -> None:
        self._reading = reading
        self._reader: AnswerReader | None = reading.reader() if reading is not None else None
        self._thinking = reading is not None and reading.thinking is not None and reading.state != "over"
        self._thought = False
        """Whether the last that came were thoughts."""
        self._blank = ""
        """White space at the beginning of a text, until it is known whether more comes of it."""
        self._begun = False
        """Whether the present text has begun."""
        self._shown = False
        self.called = False
        self.reasoning_tokens = 0
        """Until text or a call was seen: marks and white space between are among them."""

    def make_id(self) -> str:
        """Of a call, as the family of the model writes it."""
        assert self._reading is not None
        return self._reading.make_id()

    def feed(self, delta: AnswerDelta) -> list[Event]:
        events: list[Event] = []
        if self._reader is not None:
            events = self._reader.feed(delta.text)
            if delta.finish_reason is not None:
                events += self._reader.finish()
        elif delta.text:
            events = [Content(delta.text)]
        if self._thinking:
            self._thinking = all(isinstance(event, Reasoning) for event in events)
            self.reasoning_tokens += len(delta.token_ids) if self._thinking else 0
        shown = [one for event in events for one in self._cleaned(event)]
        if delta.finish_reason is not None and self._blank and not self._shown:
            shown.append(Content(self._blank))
        return shown

    def _cleaned(self, event: Event) -> list[Event]:
        if isinstance(event, Content):
            return self._text(event.text)
        self._begun, self._blank = False, ""
        if isinstance(event, Reasoning):
            self._thought = True
            if self._reading is not None and not self._reading.shows_thoughts:
                return []
        elif isinstance(event, CallBegun):
            self._thought, self.called = False, True
        self._shown = True
        return [event]

    def _text(self, text: str) -> list[Event]:
        if not self._begun:
            text = self._blank + text
            self._blank = text
            if not text.strip():
                return []
            if self._thought:
                text = text.lstrip("\r\n")
            self._begun, self._thought, self._shown, self._blank = True, False, True, ""
        return [Content(text)]
