"""Calls as plain JSON: an object with a name and arguments, a list of such objects, or either in a ``` fence.

The format that models without one of their own are asked for. Nothing marks a call but that it is the whole answer and
names a tool that was given: any other JSON is content.
"""

from __future__ import annotations

from holdfast.text.tools.call_format import ARGUMENTS, NAME, ToolCallFormat
from holdfast.text.tools.parser import CallReader, NotACall, Region, Step

FENCE = "```"

FORMAT = ToolCallFormat(
    call=('{"name": ', NAME, ', "arguments": ', ARGUMENTS, "}"),
    between=(", ",),
    before=("[",),
    after=("]",),
    bare_alone=True,
)


class GenericReader(CallReader):
    """Other families' readers read this format too, where no mark of theirs opens a call: small models forget it."""

    first_characters = "{[`"

    def _read_calls(self) -> Region:
        yield from self._json_calls((yield from self._after_space()))

    def _json_calls(self, character: str) -> Region:
        if character == "`":
            character = yield from self._behind_fence(character)
        if character == "[":
            yield from self._call_list()
            character = yield from self._after_space()
        else:
            character = yield from self._objects(character)
        yield from self._one_of((FENCE,), character)

    def _behind_fence(self, character: str) -> Step:
        """Its language is passed over."""
        yield from self._one_of((FENCE,), character)
        while (character := (yield)).isalnum():
            pass
        return character if character in "{[" else (yield from self._after_space())

    def _objects(self, character: str) -> Step:
        """One behind the other; gives back the character that is none of it."""
        while character == "{":
            character = (yield from self._call_object()) or (yield from self._after_space())
            while character in (",", ";"):
                character = yield from self._after_space()
        if not self._closing:
            raise NotACall
        return character

    def _call_list(self, character: str = "") -> Region:
        """Behind its bracket, or behind the first character of what it holds."""
        character = character or (yield from self._after_space())
        while True:
            if character != "{":
                raise NotACall
            character = (yield from self._call_object()) or (yield from self._after_space())
            if character == "]":
                return
            if character == ",":
                character = yield from self._after_space()
