"""What an answer must look like, as clients write it: OpenAI's response_format, vLLM's structured_outputs and guided_*,
llama.cpp's grammar and json_schema.

Owns how these become one StructuredOutputsParams. What they mean is `text`'s, and whether they can be is the engine's
to find out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from holdfast.errors import RequestError
from holdfast.records.structured import KINDS, OPTIONS, StructuredOutputsParams, is_backend
from holdfast.server.schema.fields import unsupported
from holdfast.server.schema.requests import Common
from holdfast.units import shorten

GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "grammar": "grammar",
    "json_schema": "json",
}
"""Older names of vLLM and those of llama.cpp, and vLLM's newer ones."""


def form_of(body: Common, switches: Mapping[str, bool] | None = None) -> StructuredOutputsParams | None:
    """None: the answer is free. `switches`: of the server, where the request does not say otherwise."""
    wanted = _requested(body)
    if wanted is None or wanted.kind not in ("json", "json_object", "structural_tag"):
        return wanted
    said = {*(body.structured_outputs or {})}
    changes = {name: on for name, on in (switches or {}).items() if on and name not in said}
    if wanted.whitespace_pattern is not None:
        changes.pop("disable_any_whitespace", None)
    return msgspec.structs.replace(wanted, **changes) if changes else wanted


def _requested(body: Common) -> StructuredOutputsParams | None:
    names = [name for name in ("response_format", "structured_outputs", *GUIDED) if getattr(body, name) is not None]
    if body.grammar == "":  # llama.cpp's clients send it so where there is none.
        names.remove("grammar")
    if body.response_format is not None and body.response_format.get("type") == "text":
        names.remove("response_format")
    if body.guided_decoding_backend is not None and not is_backend(body.guided_decoding_backend):
        raise unsupported("guided_decoding_backend", "there is only one structured output backend; leave it out")
    if len(names) > 1:
        raise RequestError(
            f"{' and '.join(names)} are given; only one can be used",
            needed="one of them",
            field=names[1],
        )
    if not names:
        if body.guided_whitespace_pattern is not None:
            raise RequestError("guided_whitespace_pattern needs guided_json", field="guided_whitespace_pattern")
        return None
    if names[0] == "response_format":
        assert body.response_format is not None
        given = _of_response_format(body.response_format)
        return _made(
            "response_format", "response_format.schema" if _has_schema(body.response_format) else None, **given
        )
    if names[0] == "structured_outputs":
        assert body.structured_outputs is not None
        if "asked_as" in body.structured_outputs:
            raise RequestError("structured_outputs: unknown field 'asked_as'", field="structured_outputs.asked_as")
        return _made("structured_outputs", **body.structured_outputs)
    given = {GUIDED[names[0]]: getattr(body, names[0])}
    if body.guided_whitespace_pattern is not None:
        given["whitespace_pattern"] = body.guided_whitespace_pattern
    return _made(names[0], **given)


def _made(field: str, place: str | None = None, **given: Any) -> StructuredOutputsParams:
    """`place`: where a client wrote what is wanted, if it is not where `_place` says."""
    asked_as = place or _place(field, next((name for name in KINDS if name in given), None))
    try:
        return StructuredOutputsParams(**given, asked_as=asked_as)
    except RequestError as error:
        if place is not None:
            error.field = place
            raise
        error.field = field if error.field in (None, "structured_outputs") else _place(field, error.field)
        raise
    except TypeError as error:
        raise RequestError(f"{field}: {shorten(str(error), 200)}", field=field) from None


def _place(field: str, kind: str | None) -> str:
    """Where a client wrote what is called `kind` here."""
    if field in GUIDED:
        return "guided_whitespace_pattern" if kind == "whitespace_pattern" else field
    if field == "response_format":
        return "response_format.json_schema.schema" if kind == "json" else field
    return field if kind is None or kind not in (*KINDS, *OPTIONS) else f"{field}.{kind}"


def _has_schema(given: dict[str, Any]) -> bool:
    """llama.cpp's way to write one: beside the type, of either kind of JSON."""
    return given.get("type") in ("json_object", "json_schema") and given.get("schema") is not None


def _of_response_format(given: dict[str, Any]) -> dict[str, Any]:
    kind = given.get("type")
    if _has_schema(given):
        return {"json": given["schema"]}
    if kind == "json_object":
        return {"json_object": True}
    if kind == "structural_tag":
        return {"structural_tag": given}
    if kind != "json_schema":
        raise RequestError(
            f"response_format.type is {shorten(repr(kind))}",
            needed="text, json_object, json_schema or structural_tag",
            field="response_format.type",
        )
    named = given.get("json_schema")
    schema = named.get("schema") if isinstance(named, dict) else None
    if schema is None:
        raise RequestError(
            "response_format.json_schema.schema is missing",
            needed='{"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}',
            field="response_format.json_schema.schema",
        )
    # `strict: false` lets OpenAI's models stray from the schema; here every answer has it.
    return {"json": schema}
