"""Structural tags as a Lark grammar: free text in which a trigger begins a part that follows a grammar, and the newer
formats, which are made of each other. Reads vLLM's two ways to write them; knows no tokens but special ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from llguidance import regex_to_lark

from holdfast.errors import GrammarError, UnsupportedOptionError
from holdfast.text.structured.syntax.gbnf import lark_rules
from holdfast.text.structured.syntax.regex_limits import check_repeats
from holdfast.text.structured.syntax.schemas import patterns, rewritten
from holdfast.units import shorten

MAX_PARTS = 512
"""Formats in each other and beside each other, tags among them."""
FIELD = "structural_tag"
EMPTY = '""'

SpecialId = Callable[[str], int | None]


def lark_of_tags(given: dict[str, Any], options: dict[str, Any], special_id: SpecialId) -> str:
    """`options`: of JSON, as llguidance names them."""
    form = given["format"] if "format" in given else _older(given)
    writer = _Writer(options, special_id)
    start = writer.format(form, last=True)
    return "\n".join(["%llguidance {}", f"start: {start}", r"TAG_TEXT: /(.|\n)*/", *writer.rules])


def _older(given: dict[str, Any]) -> dict[str, Any]:
    tags = [
        {
            "begin": tag.get("begin"),
            "end": tag.get("end"),
            "content": {"type": "json_schema", "json_schema": {} if tag.get("schema") is None else tag["schema"]},
        }
        for tag in _list_of(given, "structures", dict)
    ]
    return {"type": "triggered_tags", "tags": tags, "triggers": given.get("triggers")}


class _Writer:
    """Every method returns what stands for a format in the rule that needs it. `last`: nothing comes behind it, so that
    it may be without an end of its own."""

    def __init__(self, options: dict[str, Any], special_id: SpecialId) -> None:
        self.rules: list[str] = []
        self._options, self._special_id = options, special_id
        self._parts = 0
        self._kinds: dict[str, Callable[[dict[str, Any], bool], str]] = {
            "const_string": self._const, "json_schema": self._schema, "regex": self._regex, "grammar": self._grammar,
            "any_text": self._text, "sequence": self._sequence, "or": self._or, "tag": self._tag,
            "triggered_tags": self._triggered, "tags_with_separator": self._separated,
        }  # fmt: skip

    def format(self, given: Any, *, last: bool) -> str:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise _wrong(f"at most {MAX_PARTS} parts", "more")
        kind = given.get("type") if isinstance(given, dict) else None
        write = self._kinds.get(kind) if isinstance(kind, str) else None
        if write is None:
            raise UnsupportedOptionError(
                f"structural_tag: format {shorten(kind)!r} is not supported here",
                needed=", ".join(self._kinds),
                fix="write it as a grammar, with %json for its schemas",
                field=FIELD,
            )
        return write(given, last)

    def _rule(self, body: str, attributes: str = "") -> str:
        name = f"part_{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {body}")
        return name

    def _const(self, given: dict[str, Any], last: bool) -> str:
        return self._literal(_text_of(given, "value")) or EMPTY

    def _schema(self, given: dict[str, Any], last: bool) -> str:
        _refuse(given, {"style": ("json", None), "any_order": (False, None), "max_whitespace_cnt": (None,)})
        schema = given.get("json_schema")
        if not isinstance(schema, dict | bool) or schema is False:
            raise _wrong("a JSON schema", shorten(schema))
        for pattern in patterns(schema):
            check_repeats(pattern, FIELD)
        schema = rewritten(schema)
        plain = {**schema, "x-guidance": self._options} if isinstance(schema, dict) else {"x-guidance": self._options}
        return self._rule("%json " + json.dumps(plain))

    def _regex(self, given: dict[str, Any], last: bool) -> str:
        _refuse(given, {})
        pattern = _text_of(given, "pattern")
        check_repeats(pattern, FIELD)
        return f"/{regex_to_lark(pattern, use_ascii='dws')}/"

    def _grammar(self, given: dict[str, Any], last: bool) -> str:
        root, rules = lark_rules(_text_of(given, "grammar"), f"grammar_{self._parts}_")
        self.rules += rules
        return root

    def _text(self, given: dict[str, Any], last: bool) -> str:
        _refuse(given, {"max_tokens": (None,), "max_chars": (None,)})
        if not last:
            raise _wrong(
                "any_text must be the last in a sequence, or between a tag's begin and end", "something after it"
            )
        return "TAG_TEXT"

    def _sequence(self, given: dict[str, Any], last: bool) -> str:
        elements = _list_of(given, "elements", dict)
        found = [self.format(one, last=last and at == len(elements) - 1) for at, one in enumerate(elements)]
        return f"({' '.join(found) or EMPTY})"

    def _or(self, given: dict[str, Any], last: bool) -> str:
        found = [self.format(one, last=last) for one in _list_of(given, "elements", dict)]
        if not found:
            raise _wrong("or needs elements to choose from", "none")
        return f"({' | '.join(found)})"

    def _tag(self, given: dict[str, Any], last: bool, trigger: str = "") -> str:
        """Without the trigger, which was read before it."""
        begin, ends, content = _text_of(given, "begin"), given.get("end"), given.get("content")
        ends = ends if isinstance(ends, list) else [ends]
        if not ends or not all(isinstance(end, str) for end in ends):
            raise _wrong("every tag needs a begin and an end, as strings", shorten(given.get("end")))
        opening = self._literal(begin[len(trigger) :])
        if not isinstance(content, dict) or content.get("type") != "any_text" or not any(ends):
            written = self.format(content, last=last and not any(ends))
            return f"{opening} {written} {self._one_of(ends)}"
        self._text(content, True)
        # Up to the first end: what is free must not swallow it.
        if any(self._special_id(end) is not None for end in ends):
            return f"{opening} TAG_TEXT {self._one_of(ends)}"
        closing = self._rule(f"TAG_TEXT ({' | '.join(json.dumps(end) for end in ends)})", "[lazy]")
        return f"{opening} {closing}"

    def _tags(self, given: dict[str, Any]) -> list[dict[str, Any]]:
        tags = _list_of(given, "tags", dict)
        if not tags:
            raise _wrong("at least one tag is needed", "none")
        return tags

    def _separated(self, given: dict[str, Any], last: bool) -> str:
        _refuse(given, {})
        tags = self._rule(" | ".join(self._rule(self._tag(tag, False)) for tag in self._tags(given)))
        separator = self._literal(_text_of(given, "separator"))
        some = tags if given.get("stop_after_first") is True else f"{tags} ({separator} {tags})*"
        return f"({some})" + ("" if given.get("at_least_one") is True else "?")

    def _triggered(self, given: dict[str, Any], last: bool) -> str:
        _refuse(given, {})
        stops, some = given.get("stop_after_first") is True, given.get("at_least_one") is True
        if not last and not stops:
            raise _wrong("triggered_tags must be the last in a sequence", "something after it")
        triggers = _list_of(given, "triggers", str)
        names = " | ".join(self._behind_trigger(tag, triggers) for tag in self._tags(given))
        if stops:
            return f"({names})" + ("" if some else "?")
        return f"({names}){'+' if some else '*'} TAG_TEXT"

    def _behind_trigger(self, tag: dict[str, Any], triggers: list[str]) -> str:
        begin = _text_of(tag, "begin")
        trigger = next((one for one in triggers if one and begin.startswith(one)), None)
        if trigger is None:
            raise _wrong(f"no trigger is a prefix of {shorten(begin)!r}", shorten(triggers))
        rest, known = self._tag(tag, False, trigger), self._special_id(trigger)
        if known is not None:
            return self._rule(f"TAG_TEXT <[{known}]> {rest}")
        return self._rule(f"{self._rule(f'TAG_TEXT {json.dumps(trigger)}', '[lazy]')} {rest}")

    def _one_of(self, texts: list[str]) -> str:
        found = [self._literal(text) or EMPTY for text in texts]
        return found[0] if len(found) == 1 else f"({' | '.join(found)})"

    def _literal(self, text: str) -> str:
        known = self._special_id(text) if text else None
        return "" if not text else json.dumps(text) if known is None else f"<[{known}]>"


def _refuse(given: dict[str, Any], allowed: dict[str, tuple[Any, ...]]) -> None:
    """Options that would not be honoured."""
    for name, values in {"excludes": ([], None), **allowed}.items():
        if given.get(name) not in values:
            raise UnsupportedOptionError(
                f"structural_tag: {name} in {given.get('type')} is not supported here", fix="leave it out", field=FIELD
            )


def _text_of(given: dict[str, Any], name: str) -> str:
    value = given.get(name)
    if not isinstance(value, str):
        raise _wrong(f"{given.get('type') or 'every tag'} needs {name}, as a string", shorten(value))
    return value


def _list_of(given: dict[str, Any], name: str, kind: type) -> list[Any]:
    value = given.get(name)
    if not isinstance(value, list) or not all(isinstance(one, kind) for one in value):
        raise _wrong(f"{name} must be a list of {'objects' if kind is dict else 'strings'}", shorten(value))
    return value


def _wrong(needed: str, found: str) -> GrammarError:
    return GrammarError(f"structural_tag: {needed}", code="HF361", needed=needed, found=found, field=FIELD)
