"""The grammar that holds an answer to calls of given tools, in the format of the model's family, as Lark in
llguidance's dialect. Knows no engine; what a schema may contain is for whoever compiles the grammar to say.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.errors import RequestError
from holdfast.text.output.reasoning import ReasoningFormat, State
from holdfast.text.structured.syntax.regex_limits import check_repeats
from holdfast.text.structured.syntax.schemas import patterns, rewritten
from holdfast.text.tools.call_format import ARGUMENTS, BARE_NAME, NAME, ToolCallFormat
from holdfast.text.tools.events import Tool

TokenOf = Callable[[str], int | None]
"""The id of a mark that is a token and no text; None: it is spelled as text."""

MOST_PARALLEL_CALLS = 32
"""Of an answer that must call: a model that would go on for ever comes to an end."""
MAX_SCHEMA_DEPTH = 64

# As json.dumps writes, which models are shown. Where white space is free, small models may write nothing else.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_DESCRIPTIONS = frozenset({"title", "description", "examples", "default", "deprecated", "readOnly", "$comment"})
_ANY_TEXT = r"TEXT: /(.|\n)*/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Freedom:
    """What an answer may be that calls nothing."""

    words: bool = False
    """Any text; also before and between calls that have a mark. Arguments are then free too, but for strict tools."""
    schema: Mapping[str, Any] | None = None
    """JSON of this schema. In formats without a mark a call is told from it by the name of a tool."""


def calls_grammar(
    call_format: ToolCallFormat,
    tools: Sequence[Tool],
    token_of: TokenOf,
    *,
    parallel: bool,
    thinking: ReasoningFormat | None = None,
    state: State = "over",
    freedom: Freedom | None = None,
) -> str:
    """One call, or where `parallel` up to MOST_PARALLEL_CALLS; behind thoughts where the model has some. Without
    `freedom` the answer must call."""
    freedom = freedom or Freedom()
    made = _Grammar(call_format, token_of, MOST_PARALLEL_CALLS if parallel else 1)
    thoughts = made.thoughts(thinking, state)
    if freedom.words and made.opening is not None:
        start = made.between_words()
    else:
        start = made.calls()
        if freedom.schema is not None:
            start += " | content"
            made.rules.append(f"content: {_json(freedom.schema)}")
        elif freedom.words:
            start += " | WORDS?"
            made.rules.append(r"WORDS: /[^\s\[{`](.|\n)*/")
    made.rules.append("call: " + " | ".join(f"call_{place}" for place in range(len(tools))))
    for place, tool in enumerate(tools):
        free = freedom.words and not tool.strict
        for pattern in () if free else patterns(tool.parameters):
            check_repeats(pattern, "tools")
        made.rules.append(f"call_{place}: {made.parts(made.call, tool.name, f'arguments_{place}')}")
        made.rules.append(f"arguments_{place}: {_json({'type': 'object'} if free else closed(tool.parameters))}")
    return "\n".join(["%llguidance {}", f"start: {thoughts}({start})", *made.rules]) + "\n"


def thoughtful_json(
    schema: Mapping[str, Any], thinking: ReasoningFormat, state: State, token_of: TokenOf, spacing: Mapping[str, Any]
) -> str:
    """JSON of a schema, behind thoughts. `spacing`: llguidance's options for white space."""
    made = _Grammar(ToolCallFormat(call=("",)), token_of, 1)
    start = made.thoughts(thinking, state)
    content = f"content: {_json(schema, spacing)}"
    return "\n".join(["%llguidance {}", f"start: {start}content", *made.rules, content]) + "\n"


class _Grammar:
    """The rules of one grammar as they are put together."""

    def __init__(self, call_format: ToolCallFormat, token_of: TokenOf, most: int) -> None:
        self.rules: list[str] = []
        self.call, self._before = call_format.call, call_format.before
        self._format, self._token_of, self._most = call_format, token_of, most
        self.opening = (*call_format.before, *call_format.call)[0] if call_format.opens_with_mark else None

    def calls(self) -> str:
        several = f"call ({self.parts(self._format.between)} call){{0,{self._most - 1}}}" if self._most > 1 else "call"
        enclosed = _joined(self.parts(self._before), several, self.parts(self._format.after))
        return f"call | {enclosed}" if self._format.bare_alone else enclosed

    def between_words(self) -> str:
        """Calls that a mark opens, with any text around them."""
        assert self.opening is not None
        self.rules.append(_ANY_TEXT)
        opening = self._token_of(self.opening)
        if opening is None:
            # Lazy: to the first mark, behind which there is a call and nothing else. It is the text's own end.
            self.rules.append(f"opening[lazy]: TEXT {quoted(self.opening)}")
            if self._before:
                self._before = self._before[1:]
            else:
                self.call = self.call[1:]
        one, most = (self.calls(), 1) if self._format.before else ("call", self._most)
        if opening is None:
            earlier = f"(opening {one}){{0,{most - 1}}} " if most > 1 else ""
            return f"{earlier}(TEXT | opening {one})"
        return f"TEXT ({one} TEXT){{0,{most}}}"

    def thoughts(self, thinking: ReasoningFormat | None, state: State) -> str:
        if thinking is None or state == "over":
            return ""
        opening, closing = self.mark(thinking.opening), self.mark(thinking.closing)
        lazy = "[lazy]" if closing.startswith('"') else ""
        self.rules += [f"thought{lazy}: THOUGHT {closing}", r"THOUGHT: /(.|\n)*/"]
        thought = "thought /[ \\n]{0,4}/ "
        if state == "open":
            return thought
        return f"({opening} {thought})? " if state == "undecided" else f"{opening}? {thought}"

    def parts(self, parts: Sequence[str], name: str = "", arguments: str = "") -> str:
        spelled = {NAME: quoted(json.dumps(name)), BARE_NAME: quoted(name), ARGUMENTS: arguments}
        marks = self._format.marks
        return _joined(*(spelled.get(part) or (self.mark(part) if part in marks else quoted(part)) for part in parts))

    def mark(self, text: str) -> str:
        """As the token the model was trained to write, where it is no text."""
        token_id = self._token_of(text)
        return quoted(text) if token_id is None else f"<[{token_id}]>"


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _joined(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def _json(schema: Mapping[str, Any], spacing: Mapping[str, Any] = _SPACING) -> str:
    return f"%json {json.dumps({'x-guidance': spacing, **rewritten(schema)}, separators=(',', ':'))}"


def closed(schema: Mapping[str, Any], depth: int = 0) -> dict[str, Any]:
    """The schema with objects that have the properties it names and no others, unless it says so itself; without what
    only describes, which is long and constrains nothing."""
    if depth > MAX_SCHEMA_DEPTH:
        raise RequestError(
            f"a tool's parameters are nested more than {MAX_SCHEMA_DEPTH} deep",
            needed=f"at most {MAX_SCHEMA_DEPTH} nested schemas",
            field="tools",
        )
    made = {key: value for key, value in schema.items() if key not in _DESCRIPTIONS}
    for key in ("properties", "$defs", "definitions"):
        if isinstance(made.get(key), Mapping):
            made[key] = {name: _closed_inside(each, depth) for name, each in made[key].items()}
    for key in ("items", "not"):
        made.update({key: _closed_inside(made[key], depth)} if key in made else {})
    for key in ("anyOf", "oneOf"):
        if isinstance(made.get(key), list):
            made[key] = [_closed_inside(each, depth) for each in made[key]]
    # A property may come from a schema beside this one: these say together what there is.
    composed = any(key in made for key in ("allOf", "anyOf", "oneOf", "$ref", "patternProperties", "if"))
    if isinstance(made.get("properties"), Mapping) and not composed:
        made.setdefault("additionalProperties", False)
    return made


def _closed_inside(schema: Any, depth: int) -> Any:
    return closed(schema, depth + 1) if isinstance(schema, Mapping) else schema
