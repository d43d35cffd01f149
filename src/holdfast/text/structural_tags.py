"""Structural tags as a Lark grammar: free text, in which a trigger begins a part that must have a form. Reads vLLM's
two ways to write them; knows no tokens but special ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from llguidance import regex_to_lark

from holdfast.errors import GrammarError, UnsupportedOptionError
from holdfast.units import shorten

MAX_TAGS = 256
FIELD = "structural_tag"

SpecialId = Callable[[str], int | None]


def lark_of_tags(given: dict[str, Any], options: dict[str, Any], special_id: SpecialId) -> str:
    """`options`: of JSON, as llguidance names them."""
    if "format" in given:
        tags, triggers, bounds = _newer(given["format"])
    else:
        tags, triggers = _list_of(given, "structures", dict), _list_of(given, "triggers", str)
        tags = [{"begin": tag.get("begin"), "end": tag.get("end"), "schema": tag.get("schema")} for tag in tags]
        bounds = (False, False)
    if not tags or len(tags) > MAX_TAGS:
        raise _wrong(f"from 1 to {MAX_TAGS} tags", f"{len(tags)}")
    rules = [_tag(number, tag, triggers, options, special_id) for number, tag in enumerate(tags)]
    names = " | ".join(f"tag_{number}" for number in range(len(tags)))
    at_least_one, stop_after_first = bounds
    some = f"({names})" + ("" if stop_after_first else "+" if at_least_one else "*")
    if stop_after_first and not at_least_one:
        some = f"({names})?"
    start = f"start: {some}" + ("" if stop_after_first else " tag_end")
    return "\n".join(["%llguidance {}", start, "tag_end: TAG_TEXT", r"TAG_TEXT: /(.|\n)*/", *rules])


def _newer(form: Any) -> tuple[list[dict[str, Any]], list[str], tuple[bool, bool]]:
    kind = form.get("type") if isinstance(form, dict) else None
    if kind != "triggered_tags":
        raise UnsupportedOptionError(
            f"structural_tag: format {shorten(kind)!r} is not supported here",
            needed='"triggered_tags", or structures and triggers',
            fix="the same as a grammar, with %json for its schemas",
            field=FIELD,
        )
    tags = []
    for tag in _list_of(form, "tags", dict):
        content = tag.get("content")
        if not isinstance(content, dict) or content.get("type") not in ("json_schema", "regex", "any_text"):
            raise UnsupportedOptionError(
                "structural_tag: the content of a tag is a json_schema, a regex or any_text here",
                found=shorten(content.get("type") if isinstance(content, dict) else content),
                field=FIELD,
            )
        if content["type"] == "any_text":
            content = {"pattern": "(.|\\n)*"}
        elif content["type"] == "regex":
            content = {"pattern": content.get("pattern")}
        else:
            content = {"schema": content.get("json_schema")}
        tags.append({"begin": tag.get("begin"), "end": tag.get("end"), **content})
    bounds = (form.get("at_least_one") is True, form.get("stop_after_first") is True)
    return tags, _list_of(form, "triggers", str), bounds


def _tag(number: int, tag: dict[str, Any], triggers: list[str], options: dict[str, Any], special_id: SpecialId) -> str:
    begin, end = tag["begin"], tag["end"]
    if not isinstance(begin, str) or not isinstance(end, str):
        raise _wrong("a begin and an end, as texts, of every tag", f"tag {number}")
    trigger = next((one for one in triggers if one and begin.startswith(one)), None)
    if trigger is None:
        raise _wrong(f"a trigger that {shorten(begin)!r} begins with", shorten(triggers))
    if "pattern" in tag:
        if not isinstance(tag["pattern"], str):
            raise _wrong("a pattern, as text", f"tag {number}")
        body = f"/{regex_to_lark(tag['pattern'])}/"
    else:
        schema = tag["schema"] if tag["schema"] is not None else {}
        if not isinstance(schema, dict | bool):
            raise _wrong("a JSON schema", f"tag {number}")
        body = "%json " + json.dumps({**schema, "x-guidance": options} if isinstance(schema, dict) else {})
    rest = f"{_literal(begin[len(trigger) :], special_id)} {body} {_literal(end, special_id)}"
    known = special_id(trigger)
    if known is not None:
        return f"tag_{number}: TAG_TEXT <[{known}]> {rest}"
    return f"tag_{number}_trigger[lazy]: TAG_TEXT {json.dumps(trigger)}\ntag_{number}: tag_{number}_trigger {rest}"


def _literal(text: str, special_id: SpecialId) -> str:
    if not text:
        return ""
    known = special_id(text)
    return json.dumps(text) if known is None else f"<[{known}]>"


def _list_of(given: dict[str, Any], name: str, kind: type) -> list[Any]:
    value = given.get(name)
    if not isinstance(value, list) or not all(isinstance(one, kind) for one in value):
        raise _wrong(f"{name}, a list of {'objects' if kind is dict else 'texts'}", shorten(value))
    return value


def _wrong(needed: str, found: str) -> GrammarError:
    return GrammarError(f"structural_tag: {needed}", code="HF361", needed=needed, found=found, field=FIELD)
