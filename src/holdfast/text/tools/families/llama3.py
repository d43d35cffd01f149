"""Calls as Llama 3 and 4 write them: JSON with "parameters", as the whole answer or behind <|python_tag|>."""

from __future__ import annotations

from holdfast.text.tools.call_format import ARGUMENTS, NAME, ToolCallFormat
from holdfast.text.tools.families.generic import GenericReader
from holdfast.text.tools.parser import Region

PYTHON_TAG = "<|python_tag|>"

FORMAT = ToolCallFormat(
    marks=(PYTHON_TAG,),
    call=('{"name": ', NAME, ', "parameters": ', ARGUMENTS, "}"),
    between=("; ",),
)


class Llama3Reader(GenericReader):
    marks = (PYTHON_TAG,)
    first_characters = "{"

    def _read_calls(self) -> Region:
        character = yield from self._after_space()
        while True:
            character = yield from self._objects(character)
            yield from self._one_of(self.marks, character)
            character = yield from self._after_space()
