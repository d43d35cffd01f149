"""Calls as a JSON list behind a mark: Granite 3, Phi-4-mini, Jamba and Hunyuan; xLAM also without one."""

from __future__ import annotations

from holdfast.text.tools.call_format import ARGUMENTS, NAME, ToolCallFormat
from holdfast.text.tools.families.generic import GenericReader
from holdfast.text.tools.parser import NotACall, Region

GRANITE_MARK, GRANITE_WORD = "<|tool_call|>", "<tool_call>"
PHI_WORD, PHI_MARK, PHI_CLOSE = "functools", "<|tool_call|>", "<|/tool_call|>"
JAMBA_OPEN, JAMBA_CLOSE = "<tool_calls>", "</tool_calls>"
XLAM_WORD, XLAM_OPEN, XLAM_CLOSE = "TOOL_CALLS]", "<tool_call>", "</tool_call>"


def _listed(opening: str, closing: str = "") -> ToolCallFormat:
    return ToolCallFormat(
        marks=(opening, closing) if closing else (opening,),
        before=(opening, "["),
        call=('{"name": ', NAME, ', "arguments": ', ARGUMENTS, "}"),
        between=(", ",),
        after=("]", closing) if closing else ("]",),
    )


GRANITE, PHI, JAMBA = _listed(GRANITE_MARK), _listed(PHI_WORD), _listed(JAMBA_OPEN, JAMBA_CLOSE)


class _ListedReader(GenericReader):
    closing: str = ""
    """What may stand behind the list."""

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
            raise NotACall
        if self.closing:
            yield from self._one_of((self.closing,), (yield from self._after_space()))


class GraniteReader(_ListedReader):
    marks = (GRANITE_MARK, GRANITE_WORD)


class PhiReader(_ListedReader):
    marks = (PHI_WORD, PHI_MARK)
    closing = PHI_CLOSE


class JambaReader(_ListedReader):
    marks = (JAMBA_OPEN,)
    closing = JAMBA_CLOSE


class XlamReader(_ListedReader):
    """A bare list is what it is trained for; marks are of the models that it was made from."""

    marks = (XLAM_OPEN,)
    closing = XLAM_CLOSE

    def _json_calls(self, character: str) -> Region:
        if character != "[":
            yield from super()._json_calls(character)
            return
        character = yield from self._after_space()
        if character == XLAM_WORD[0]:  # It begins as a list does.
            yield from self._one_of((XLAM_WORD,), character)
            if (yield from self._after_space()) != "[":
                raise NotACall
            character = yield from self._after_space()
        yield from self._call_list(character)
