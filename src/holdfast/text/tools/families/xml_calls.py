"""Calls as Qwen3-Coder, Qwen3.5, Nemotron 3 and Seed-OSS write them: a tag for the function and one for each parameter.

    <tool_call>
    <function=weather>
    <parameter=city>
    Oslo
    </parameter>
    </function>
    </tool_call>

Values are bare text: of which type they are is said by the tool's schema. A parameter is shown when it is complete.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Generator, Mapping
from typing import Any

from holdfast.text.tools.call_format import ARGUMENTS, NAME, ToolCallFormat
from holdfast.text.tools.events import Event
from holdfast.text.tools.families import hermes
from holdfast.text.tools.parser import MAX_NAME_CHARS, MOST_LOOKED_AT, NotACall, Region

FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
SEED_OPEN, SEED_CLOSE = "<seed:tool_call>", "</seed:tool_call>"

SEED = ToolCallFormat(
    marks=(SEED_OPEN, SEED_CLOSE),
    call=(SEED_OPEN, '\n{"name": ', NAME, ', "arguments": ', ARGUMENTS, "}\n", SEED_CLOSE),
    between=("\n",),
)
"""What must be a call is constrained to JSON between the same tags, which the readers take too: values that are bare
text could not be held to a schema."""

MAX_LITERAL_CHARS = 64 << 10
_NUMBERS: Mapping[str, Any] = {"integer": int, "number": float}


class XmlReader(hermes.HermesReader):
    """Small models leave the outer tag out, so that the inner one opens a call too, of a tool that is known."""

    marks = (hermes.OPEN, FUNCTION)

    def finish(self) -> list[Event]:
        if not self.complete:
            self._held.clear()  # A parameter that was cut off is no content.
        return super().finish()

    def _read_calls(self) -> Region:
        if not self._mark:
            yield from super()._read_calls()
            return
        if self._mark != FUNCTION:
            character = yield from self._after_space()
            if character in ("{", "["):
                yield from self._marked_json(character)
                return
            yield from self._one_of((FUNCTION,), character)
        while True:
            yield from self._function()
            character = yield from self._after_space()
            tag = yield from self._one_of((self.closing, self.opening, FUNCTION), character)
            if tag == self.closing:
                return
            if tag == self.opening:  # Again, without having been closed.
                yield from self._one_of((FUNCTION,), (yield from self._after_space()))

    def _function(self) -> Region:
        """Behind `<function=`."""
        self._closing = False
        name = self._checked((yield from self._tag_name()))
        bare = self._mark == FUNCTION
        if bare and name not in self._names:
            raise NotACall
        # No grammar holds what the outer tag does not open: a strict tool's arguments are looked at first.
        fits = self._fits if bare else None
        properties = self._parameters.get(name, {}).get("properties")
        found: dict[str, str] = {}
        if fits is None:
            self._begin_call(name)
            self._argue("{")
        _, tag = yield from self._until((PARAMETER, END_FUNCTION, self.closing))
        while tag == PARAMETER:
            key = yield from self._tag_name()
            text, tag = yield from self._until((END_PARAMETER, PARAMETER, END_FUNCTION))
            schema = properties.get(key) if isinstance(properties, Mapping) else None
            value = typed_value(text.removeprefix("\n").removesuffix("\n"), schema)
            if fits is None and key not in found:
                self._argue(f"{', ' if found else ''}{json.dumps(key, ensure_ascii=False)}: {value}")
            found.setdefault(key, value)
            if tag == END_PARAMETER:
                _, tag = yield from self._until((PARAMETER, END_FUNCTION, self.closing))
        if fits is None:
            self._argue("}")
            self._end_call()
            return
        members = ", ".join(f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in found.items())
        if self.calls >= MOST_LOOKED_AT or not fits(name, f"{{{members}}}"):
            raise NotACall
        self._whole_call(name, f"{{{members}}}")

    def _tag_name(self) -> Generator[None, str, str]:
        read = ""
        while (character := (yield)) != ">":
            if len(read) > MAX_NAME_CHARS or character == "\n":
                raise NotACall
            read += character
        return read.strip(" \"'")

    def _until(self, marks: tuple[str, ...]) -> Generator[None, str, tuple[str, str]]:
        """The text up to the first of some marks, and that mark."""
        read: list[str] = []
        while True:
            character = yield
            read.append(character)
            for mark in marks:
                if character == mark[-1] and "".join(read[-len(mark) :]) == mark:
                    return "".join(read[: -len(mark)]), mark


class SeedReader(XmlReader):
    opening, closing = SEED_OPEN, SEED_CLOSE
    marks = (SEED_OPEN, FUNCTION)


def typed_value(text: str, schema: Any) -> str:
    """A parameter's text as JSON: of the type that its schema wants where it can be, a string otherwise."""
    kinds = _kinds(schema)
    if "string" in kinds and text.strip() != "null":
        return json.dumps(text, ensure_ascii=False)
    if text.strip() == "null" and (not kinds or "null" in kinds or "string" not in kinds):
        return "null"
    for kind in kinds:
        if kind in _NUMBERS:
            try:
                return json.dumps(_NUMBERS[kind](text), allow_nan=False)
            except ValueError:
                continue
        if kind == "boolean" and text.strip().lower() in ("true", "false"):
            return text.strip().lower()
    if not kinds or {"object", "array"} & kinds.keys():
        found = _structured(text)
        if found is not None:
            return found
    return json.dumps(text, ensure_ascii=False)


def _structured(text: str) -> str | None:
    """JSON, or Python's literals, which some models write in its place."""
    if len(text) > MAX_LITERAL_CHARS:
        return None
    for read in (json.loads, ast.literal_eval):
        try:
            return json.dumps(read(text), ensure_ascii=False, allow_nan=False)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
    return None


def _kinds(schema: Any) -> dict[str, None]:
    """The types that a schema names, also one of several; none: anything."""
    if not isinstance(schema, Mapping):
        return {}
    found: dict[str, None] = {}
    kind = schema.get("type")
    for one in kind if isinstance(kind, list) else [kind]:
        if isinstance(one, str):
            found[one] = None
    for key in ("anyOf", "oneOf"):
        for one in schema.get(key) or ():
            found |= _kinds(one)
    if not found and isinstance(schema.get("enum"), list) and all(isinstance(one, str) for one in schema["enum"]):
        found["string"] = None
    return found
