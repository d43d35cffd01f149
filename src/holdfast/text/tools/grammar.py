"""The grammar that holds an answer to calls of given tools, in the form the model's family writes them, as Lark in
llguidance's dialect. Knows no engine; what a schema may contain is for whoever compiles the grammar to say.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from holdfast.errors import RequestError
from holdfast.text.reasoning import State, Thinking
from holdfast.text.tools.events import Tool
from holdfast.text.tools.forms import ARGUMENTS, BARE_NAME, NAME, Form

TokenOf = Callable[[str], int | None]
"""The id of a mark that is a token and no text; None: it is spelled as text."""

MOST_PARALLEL_CALLS = 32
"""Of an answer that must call: a model that would go on for ever comes to an end."""
MAX_SCHEMA_DEPTH = 64

# As json.dumps writes, which models are shown. Where white space is free, small models may write nothing else.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def calls_grammar(
    form: Form,
    tools: Sequence[Tool],
    token_of: TokenOf,
    *,
    parallel: bool,
    thinking: Thinking | None = None,
    state: State = "over",
) -> str:
    """One call, or where `parallel` up to MOST_PARALLEL_CALLS; behind thoughts where the model has some."""
    spell = _Speller(form, token_of)
    rules = ["%llguidance {}", f"start: {_thoughts(thinking, state, token_of)}calls"]
    one = "call"
    several = f"call ({spell.parts(form.between)} call){{0,{MOST_PARALLEL_CALLS - 1}}}" if parallel else one
    enclosed = " ".join(part for part in (spell.parts(form.before), several, spell.parts(form.after)) if part)
    rules.append(f"calls: {one} | {enclosed}" if form.bare_alone else f"calls: {enclosed}")
    rules.append("call: " + " | ".join(f"call_{place}" for place in range(len(tools))))
    for place, tool in enumerate(tools):
        schema = json.dumps({"x-guidance": _SPACING, **closed(tool.parameters)})
        rules.append(f"call_{place}: {spell.parts(form.call, tool.name, f'arguments_{place}')}")
        rules.append(f"arguments_{place}: %json {schema}")
    if thinking is not None and state != "over":
        rules += _thought_rules(thinking.closing, token_of)
    return "\n".join(rules) + "\n"


class _Speller:
    def __init__(self, form: Form, token_of: TokenOf) -> None:
        self._marks = form.marks
        self._token_of = token_of

    def parts(self, parts: Sequence[str], name: str = "", arguments: str = "") -> str:
        spelled = {NAME: quoted(json.dumps(name)), BARE_NAME: quoted(name), ARGUMENTS: arguments}
        return " ".join(
            spelled[part] if part in spelled else mark(part, self._token_of) if part in self._marks else quoted(part)
            for part in parts
        )


def mark(text: str, token_of: TokenOf) -> str:
    """As the token the model was trained to write, where there is one."""
    token_id = token_of(text)
    return quoted(text) if token_id is None else f"<[{token_id}]>"


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _thoughts(thinking: Thinking | None, state: State, token_of: TokenOf) -> str:
    if thinking is None or state == "over":
        return ""
    opening, thought = mark(thinking.opening, token_of), "thought /[ \\n]{0,4}/ "
    if state == "open":
        return thought
    return f"({opening} {thought})? " if state == "undecided" else f"{opening}? {thought}"


def _thought_rules(closing: str, token_of: TokenOf) -> list[str]:
    token_id = token_of(closing)
    if token_id is not None:
        return [f"thought: THOUGHT <[{token_id}]>", r"THOUGHT: /(.|\n)*/"]
    # Lazy: to the first mark, which would otherwise be a part of the thought.
    return [f"thought[lazy]: THOUGHT {quoted(closing)}", r"THOUGHT: /(.|\n)*/"]


def closed(schema: Mapping[str, Any], depth: int = 0) -> dict[str, Any]:
    """The schema with objects that have the properties it names and no others, unless it says so itself."""
    if depth > MAX_SCHEMA_DEPTH:
        raise RequestError(
            f"a tool's parameters are more than {MAX_SCHEMA_DEPTH} deep",
            needed=f"at most {MAX_SCHEMA_DEPTH} schemas inside one another",
            field="tools",
        )
    made = dict(schema)
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
