"""Calls as Mistral's models write them behind [TOOL_CALLS]: a JSON list, or in newer ones name[ARGS]{...} for each."""

from __future__ import annotations

from holdfast.text.tools.call_format import ARGUMENTS, BARE_NAME, NAME, ToolCallFormat
from holdfast.text.tools.families.generic import GenericReader
from holdfast.text.tools.parser import MAX_NAME_CHARS, NotACall, Region

CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"

LISTED = ToolCallFormat(
    marks=(CALLS,),
    before=(CALLS, "["),
    call=('{"name": ', NAME, ', "arguments": ', ARGUMENTS, "}"),
    between=(", ",),
    after=("]",),
)
NAMED = ToolCallFormat(marks=(CALLS, ARGS), call=(CALLS, BARE_NAME, ARGS, ARGUMENTS))


class MistralReader(GenericReader):
    marks = (CALLS,)
    # A bracket begins the mark.
    first_characters = "{`"

    def _read_calls(self) -> Region:
        if not self._mark:
            yield from super()._read_calls()
            return
        character = yield from self._after_space()
        if character == "[":
            yield from self._call_list()
        elif character == "{":
            yield from self._call_object()
        else:
            yield from self._named_call(character)

    def _named_call(self, character: str) -> Region:
        read = ""
        while character not in "{[":
            if len(read) > MAX_NAME_CHARS or not (character.isalnum() or character in "_-. \n"):
                raise NotACall
            read += character
            character = yield
        name = self._checked(read.strip())
        if character == "[" and (yield from self._one_of((ARGS, CALL_ID), character)) == CALL_ID:
            while (character := (yield)) != "[":
                pass
            yield from self._one_of((ARGS,), character)
        if character == "[":
            character = yield from self._after_space()
        if character != "{":
            raise NotACall
        self._begin_call(name)
        yield from self._shown_object()
        self._end_call()
