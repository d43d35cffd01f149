"""Calls read out of an answer while it grows. Owns the reading of JSON and what becomes of text that is no call; how a
family of models marks its calls is in the file of that family.

    answer = content | region | content | region ...      a region begins at a mark, or at the answer's first character
    region = held ... name and "{" of the arguments ... | arguments, shown as they come | held: what closes the call

What is held is content if it turns out not to be a call: nothing is lost. From the brace of its arguments on a call is
a call, and its arguments are the text up to the brace that closes it, whether that is valid JSON or not. Each character
is looked at once, so that neither time nor events depend on how the text was cut.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Generator, Mapping
from typing import Any

from holdfast.text.output.partial_match import overlap
from holdfast.text.tools.events import Arguments, CallBegun, Content, Event

Step = Generator[None, str, str]
"""Takes character by character and gives back the one behind what it has read."""
Region = Generator[None, str, None]

_SPACE = frozenset(" \t\r\n")
_OPENING, _CLOSING = frozenset("{["), frozenset("}]")
_LITERAL_ENDS = _SPACE | frozenset(",}]")
MAX_NAME_CHARS = 256
MOST_LOOKED_AT = 16
"""Calls of an answer, whether they fit: nothing else goes on meanwhile."""
_AT_A_TIME_CHARS = 4096
"""What is left of a text is copied where a region begins or ends: of so much at most."""


class NotACall(Exception):
    """At this character it is clear that what is held is content."""


class CallReader:
    """One answer's; not thread-safe. A family's reader says where regions begin and how they are read."""

    marks: tuple[str, ...] = ()
    """Behind each a region begins."""
    first_characters: str = ""
    """Of an answer: each begins a region too, and is its first character. There nothing but its form tells a call from
    other JSON, so that only the names of known tools are taken."""

    def __init__(
        self,
        names: Collection[str] = (),
        most_calls: int | None = None,
        *,
        fits: Callable[[str, str], bool] | None = None,
        forced: bool = False,
        parameters: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """`fits`: whether arguments are such as the tool of this name takes; for answers of which a grammar holds the
        marked calls alone: what no mark opens is content where it does not fit. `forced`: the answer is a call by its
        grammar, so that a beginning is no content. `parameters`: the tools' schemas by name, for formats that do not
        write of which type a value is."""
        self._names = names
        self._parameters = parameters or {}
        self._most_calls = most_calls
        self._forced = forced
        self._fits = fits if self.marks else None
        self._events: list[Event] = []
        self._pieces: list[str] = []
        """Of the event that is being put together: content, or arguments of the last call."""
        self._arguing = False
        self._region: Region | None = None
        self._held: list[str] = []
        self._mark = ""
        """What the region began with."""
        self._closing = False
        """Whether what is held stands behind a call that is complete."""
        self._pending = ""
        """The end of the text so far, which may begin a mark."""
        self._blank: list[str] = []
        """White space before any content, or behind a call: shown when content follows."""
        self._fresh = True
        """Nothing but white space has come since the answer or the last region began."""
        self._first = True
        self.calls = 0
        self.complete = True
        """Nothing is missing of the last call: its arguments were closed."""

    def feed(self, text: str) -> list[Event]:
        for start in range(0, len(text), _AT_A_TIME_CHARS):
            left = text[start : start + _AT_A_TIME_CHARS]
            while left:
                left = self._read_region(left) if self._region is not None else self._read_content(left)
        return self._taken()

    def finish(self) -> list[Event]:
        """At the end of the answer: everything that waited."""
        if self._region is not None and not self._closing and not self._forced:
            self._say("".join(self._held))
        if not self._forced:
            self._say(self._pending)
        if not self.calls:
            self._add("".join(self._blank), arguing=False)
        self._region, self._pending = None, ""
        self._blank.clear()
        return self._taken()

    def _read_calls(self) -> Region:
        """A region, character by character. Returns with its last one; raises NotACall at one that is none of it."""
        raise NotImplementedError

    # ---- events

    def _add(self, text: str, *, arguing: bool) -> None:
        if arguing is not self._arguing:
            self._close_event()
            self._arguing = arguing
        self._pieces.append(text)

    def _close_event(self) -> None:
        text = "".join(self._pieces)
        self._pieces.clear()
        if text:
            self._events.append(Arguments(self.calls - 1, text) if self._arguing else Content(text))

    def _taken(self) -> list[Event]:
        self._close_event()
        events, self._events = self._events, []
        return events

    # ---- content

    def _read_content(self, text: str) -> str:
        """The rest of the text, which belongs to a region."""
        text, self._pending = self._pending + text, ""
        if self._fresh:
            stripped = text.lstrip()
            self._blank.append(text[: len(text) - len(stripped)])
            if not stripped:
                return ""
            text = stripped
            if self._first and text[0] in self.first_characters:
                self._begin_region("")
                return text
        found = [(place, mark) for mark in self.marks if (place := text.find(mark)) >= 0]
        if found:
            place, mark = min(found)
            self._say(text[:place])
            self._begin_region(mark)
            return text[place + len(mark) :]
        waiting = max((overlap(text, mark) for mark in self.marks), default=0)
        shown = len(text) - waiting
        self._pending = text[shown:]
        self._say(text[:shown])
        return ""

    def _say(self, text: str) -> None:
        if not text:
            return
        self._fresh = self._first = False
        self._add("".join([*self._blank, text]), arguing=False)
        self._blank.clear()

    # ---- regions

    def _begin_region(self, mark: str) -> None:
        self._first = self._closing = False
        self._mark, self._held = mark, [mark]
        self._region = self._read_calls()
        next(self._region)

    def _read_region(self, text: str) -> str:
        assert self._region is not None
        for place, character in enumerate(text):
            self._held.append(character)
            try:
                self._region.send(character)
            except StopIteration:
                self._end_region()
                return text[place + 1 :]
            except NotACall:
                self._held.pop()
                held = "".join(self._held)
                self._end_region()
                if held.strip():
                    self._say(held)
                else:
                    self._blank.append(held)
                # At the answer's start this character was held before: it is content now, not another beginning.
                return text[place:]
        return ""

    def _end_region(self) -> None:
        self._region, self._held, self._fresh, self._first = None, [], True, False

    def _begin_call(self, name: str) -> None:
        """From here on it is a call. Those beyond the most that are wanted are read and dropped."""
        self._close_event()
        self._held.clear()
        self.calls += 1
        self.complete = False
        self._blank.clear()
        if not self._muted:
            self._events.append(CallBegun(self.calls - 1, name))

    @property
    def _muted(self) -> bool:
        return self._most_calls is not None and self.calls > self._most_calls

    def _argue(self, text: str) -> None:
        self._held.clear()
        if not self._muted:
            self._add(text, arguing=True)

    def _end_call(self) -> None:
        self._held.clear()
        self._closing = self.complete = True

    # ---- the parts a region is made of

    def _after_space(self) -> Step:
        while (character := (yield)) in _SPACE:
            pass
        return character

    def _one_of(self, marks: tuple[str, ...], character: str) -> Generator[None, str, str]:
        """Reads one of some marks, whose first character is there already, and says which. None may begin another."""
        read = character
        while True:
            if read in marks:
                return read
            if not any(mark.startswith(read) for mark in marks):
                raise NotACall
            read += yield

    def _call_object(self) -> Step:
        """Behind its brace: {"name": ..., "arguments": {...}} with its members in any order. Gives back nothing, or the
        first character that is none of it, where a model has forgotten to close the brace behind the arguments."""
        name: str | None = None
        early: str | None = None
        begun = self._closing = False
        character = yield from self._after_space()
        while True:
            if character != '"':
                raise NotACall
            key = yield from self._string()
            if (yield from self._after_space()) != ":":
                raise NotACall
            character = yield from self._after_space()
            if key == "name" and name is None and character == '"':
                written = yield from self._string()
                name = self._checked(written)
                if early is not None:
                    begun = True
                    self._whole_call(name, early)
                character = yield from self._after_space()
            elif key in ("arguments", "parameters") and not begun and early is None:
                if name is not None and character == "{" and (self._mark or self._fits is None):
                    begun = True
                    self._begin_call(name)
                    yield from self._shown_object()
                    self._end_call()
                elif (early := (yield from self._arguments_whole(character))) and name is not None:
                    begun = True
                    self._whole_call(name, early)
                character = yield from self._after_space()
            else:
                character = yield from self._passed_over(character)
            if character == "}":
                break
            if character != "," and begun:
                return character
            if character != ",":
                raise NotACall
            character = yield from self._after_space()
            if begun and character != '"':
                return character
        if name is None:
            raise NotACall
        if not begun:
            self._whole_call(name, "{}")
        self._end_call()
        return ""

    def _whole_call(self, name: str, arguments: str) -> None:
        fits = None if self._mark else self._fits
        if fits is not None and (self.calls >= MOST_LOOKED_AT or not fits(name, arguments)):
            raise NotACall
        self._begin_call(name)
        self._argue(arguments)
        self._end_call()

    def _checked(self, name: str) -> str:
        if not 0 < len(name) <= MAX_NAME_CHARS or (not self._mark and name not in self._names):
            raise NotACall
        return name

    def _shown_object(self) -> Region:
        """Behind the brace of a call's arguments, to the one that closes it."""
        self._argue("{")
        depth = 1
        quoted = escaped = False
        while depth:
            character = yield
            self._argue(character)
            if quoted:
                quoted = escaped or character != '"'
                escaped = character == "\\" and not escaped
            elif character == '"':
                quoted = True
            elif character in _OPENING:
                depth += 1
            elif character in _CLOSING:
                depth -= 1

    def _arguments_whole(self, character: str) -> Generator[None, str, str]:
        """Arguments that cannot be shown as they come: before the name, or written as a text that holds JSON."""
        if character == "{":
            return "{" + (yield from self._nested())
        if character == '"':
            text = yield from self._string()
            try:
                if isinstance(json.loads(text), dict):
                    return text
            except (ValueError, RecursionError):
                pass
            raise NotACall
        if character == "n":
            yield from self._one_of(("null",), character)
            return "{}"
        raise NotACall

    def _nested(self) -> Generator[None, str, str]:
        """The rest of an object or list whose bracket is there already."""
        read: list[str] = []
        depth = 1
        while depth:
            character = yield
            read.append(character)
            if character == '"':
                read.append((yield from self._quoted()))
            elif character in _OPENING:
                depth += 1
            elif character in _CLOSING:
                depth -= 1
        return "".join(read)

    def _quoted(self) -> Generator[None, str, str]:
        """The rest of a string as it is written, with its closing quote."""
        read: list[str] = []
        escaped = False
        while True:
            character = yield
            read.append(character)
            if character == '"' and not escaped:
                return "".join(read)
            escaped = character == "\\" and not escaped

    def _string(self) -> Generator[None, str, str]:
        written = yield from self._quoted()
        try:
            return str(json.loads('"' + written, strict=False))
        except ValueError:
            raise NotACall from None

    def _passed_over(self, character: str) -> Step:
        """A member that says nothing to us, such as an id."""
        if character == '"':
            yield from self._quoted()
        elif character in _OPENING:
            yield from self._nested()
        else:
            while character not in _LITERAL_ENDS:
                character = yield
            return character if character not in _SPACE else (yield from self._after_space())
        return (yield from self._after_space())
