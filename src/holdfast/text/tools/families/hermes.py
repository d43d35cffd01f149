"""Calls as Hermes, Qwen 2.5 and 3, and many others write them: JSON between <tool_call> and </tool_call>."""

from __future__ import annotations

from holdfast.text.tools.call_format import ARGUMENTS, NAME, ToolCallFormat
from holdfast.text.tools.families.generic import GenericReader
from holdfast.text.tools.parser import NotACall, Region

OPEN, CLOSE = "<tool_call>", "</tool_call>"

FORMAT = ToolCallFormat(
    marks=(OPEN, CLOSE),
    call=(OPEN, '\n{"name": ', NAME, ', "arguments": ', ARGUMENTS, "}\n", CLOSE),
    between=("\n",),
)


class HermesReader(GenericReader):
    opening, closing = OPEN, CLOSE
    marks: tuple[str, ...] = (OPEN,)

    def _read_calls(self) -> Region:
        if not self._mark:
            yield from super()._read_calls()
            return
        yield from self._marked_json((yield from self._after_space()))

    def _marked_json(self, character: str) -> Region:
        while True:
            if character == "[":
                yield from self._call_list()
                character = yield from self._after_space()
            elif character == "{":
                character = (yield from self._call_object()) or (yield from self._after_space())
            else:
                raise NotACall
            # Small models close a brace too many, or begin the next call without closing this one.
            while character in ("}", ","):
                character = yield from self._after_space()
            if character == "{":
                continue
            if (yield from self._one_of((self.opening, self.closing), character)) == self.closing:
                return
            character = yield from self._after_space()
