"""From a body of /v1/responses to a chat, and what of it the response repeats.

Owns what becomes of each field; items are `items`', a chat's own rules are `request.parse`'s.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from holdfast.engine.interface import Engine
from holdfast.engine.requests.structured_output import TENANT
from holdfast.errors import RequestError
from holdfast.server.http.errors import BAD_REQUEST, HttpFailure
from holdfast.server.openai_responses.items import to_messages
from holdfast.server.openai_responses.schema import (
    PASSED,
    ReasoningOptions,
    ResponseObject,
    ResponsesBody,
    TextOptions,
)
from holdfast.server.openai_responses.store import ResponseStore, StoredResponse
from holdfast.server.request.json_body import decode_object
from holdfast.server.request.parse import GenerationRequest, chat_request
from holdfast.server.request.translated import check_counts, not_here, told_as
from holdfast.server.request.workers.template_workers import TemplateWorkers
from holdfast.server.request.workers.tokenize_pool import TokenizePool
from holdfast.server.schema.fields import check_fields, convert, honoured_fields, unsupported
from holdfast.server.schema.ignored import IGNORED
from holdfast.server.settings import ServerSettings, body_limit
from holdfast.text.messages import plain

_FIELDS = honoured_fields(ResponsesBody) | PASSED
_NAMES = {
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "response_format.type": "text.format.type",
    "response_format.json_schema.schema": "text.format.schema",
}
LOGPROBS = "message.output_text.logprobs"
"""Of `include`; the others are of hosted tools, or ask for what is given anyway."""
_NO_HOST = "hosted and custom tools do not exist on this server"
_PREFIXES = {"function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseOptions:
    response: ResponseObject
    """As it begins: what the request has said, and no output."""
    items: bytes
    """The conversation before it."""
    owner: str


def owner_of(settings: ServerSettings, tenant: str) -> str:
    """Who finds a response again: whoever has the key it was made with; without keys, everybody."""
    return tenant if settings.api_key or settings.api_key_file else ""


async def read_response_request(
    raw: bytes,
    engine: Engine,
    settings: ServerSettings,
    *,
    workers: TemplateWorkers,
    pool: TokenizePool,
    store: ResponseStore,
    request_id: str | None = None,
) -> GenerationRequest:
    # Much of it is repeated in the response, and so must not be deeper than whoever writes it can go.
    fields = plain(check_fields(decode_object(raw), _FIELDS), "input")
    passed = {name: fields.pop(name) for name in PASSED & fields.keys()}
    body: ResponsesBody = convert(fields, ResponsesBody)
    _check(body)
    owner = owner_of(settings, TENANT.get())
    previous = _previous(body.previous_response_id, store, owner)
    referred = _referred(_references(body.input), store, owner)
    size_bytes = len(raw) + (previous.conversation_bytes if previous is not None else 0)
    size_bytes += sum(stored.output_bytes[name] for name, stored in referred.items())
    _check_size(size_bytes, body_limit(settings, engine.info.max_model_len), body)
    history = previous.conversation() if previous is not None else []
    given = _items(body.input, _read_outputs(referred))
    messages = to_messages(body.instructions, history, given)
    tools, choice = _tools(body)
    with_logprobs = LOGPROBS in (body.include or ()) or body.top_logprobs is not None
    chat = {
        **passed,
        "model": body.model,
        "messages": messages.messages,
        "stream": body.stream,
        "stream_options": fields.get("stream_options"),
        "max_completion_tokens": _most(body.max_output_tokens, engine),
        "temperature": body.temperature,
        "top_p": body.top_p,
        "logprobs": with_logprobs,
        "top_logprobs": body.top_logprobs,
        "tools": [{"type": "function", "function": _function(tool)} for tool in tools] or None,
        "tool_choice": choice,
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning_effort": body.reasoning.effort if body.reasoning is not None else None,
        "response_format": _response_format(body.text),
    }
    with told_as(messages, _NAMES):
        ask = await chat_request(chat, size_bytes, engine, settings, workers=workers, pool=pool, prefix="resp")
    if with_logprobs and ask.reading is not None:
        raise unsupported("include", f"{LOGPROBS} cannot be combined with tools or reasoning")
    response = _begun(body, ask, tools)
    items = msgspec.json.encode([*history, *given]) if body.store else b"[]"
    return replace(
        ask,
        answer_id=response.id,
        prompt_field="input",
        options=ResponseOptions(response=response, items=items, owner=owner),
    )


def _most(wanted: int | None, engine: Engine) -> int | None:
    """More than the context has is the most that is wanted."""
    return None if wanted is None else min(wanted, engine.info.max_model_len)


def _check(body: ResponsesBody) -> None:
    if body.conversation is not None:
        raise unsupported("conversation", "only single responses are stored", "send previous_response_id")
    if body.prompt is not None:
        raise unsupported("prompt", "prompts are not stored here", "send instructions and input")
    if body.background and body.stream:
        raise unsupported(
            "background", "a response in the background is not streamed", "leave stream out, and GET /v1/responses/ID"
        )
    if body.background and not body.store:
        raise RequestError("background needs store: true", fix="leave store out", field="background")
    if body.truncation == "auto":
        IGNORED.get().add("truncation", why="no item is dropped from a conversation; one that is too long is refused")


def _previous(previous: str | None, store: ResponseStore, owner: str) -> StoredResponse | None:
    if previous is None:
        return None
    stored = store.get(previous, owner)
    if stored is None:
        raise HttpFailure(
            BAD_REQUEST,
            f"the previous response {previous[:100]!r} is not stored; send the whole conversation as input",
            kind="invalid_request_error",
            code="previous_response_not_found",
            param="previous_response_id",
        )
    if stored.task is not None:
        raise RequestError("the previous response is still in progress", field="previous_response_id")
    return stored


def _kind(item: dict[str, Any]) -> Any:
    return item.get("type") or ("item_reference" if item.keys() == {"id"} else "message")


def _references(given: str | list[dict[str, Any]]) -> dict[str, int]:
    """Ids of items that are referred to, and where. One twice would make a long conversation of few bytes."""
    if isinstance(given, str):
        return {}
    check_counts(given, "input")
    places: dict[str, int] = {}
    for position, item in enumerate(given):
        if _kind(item) != "item_reference":
            continue
        name = str(item.get("id"))
        if name in places:
            raise RequestError(
                f"input[{position}] refers to {name[:100]!r} again, as input[{places[name]}] does",
                needed="one reference to an item",
                fix=f"leave input[{position}] out",
                field=f"input[{position}].id",
            )
        places[name] = position
    return places


def _referred(places: dict[str, int], store: ResponseStore, owner: str) -> dict[str, StoredResponse]:
    found = store.find_items(places, owner)
    for name, position in places.items():
        if name not in found:
            raise RequestError(
                f"input[{position}] refers to {name[:100]!r}, which is not stored",
                fix="send the item itself",
                field=f"input[{position}].id",
            )
    return found


def _read_outputs(referred: dict[str, StoredResponse]) -> dict[str, dict[str, Any]]:
    """Each response is read once, however many of its items are referred to."""
    found: dict[str, dict[str, Any]] = {}
    for stored in {id(stored): stored for stored in referred.values()}.values():
        found |= stored.output_items(referred.keys())
    return found


def _check_size(size_bytes: int, limit_bytes: int, body: ResponsesBody) -> None:
    if size_bytes > limit_bytes:
        raise RequestError(
            "the request and what is stored of its conversation are too large",
            needed=f"at most {limit_bytes} bytes of JSON",
            found=f"{size_bytes} bytes",
            fix="begin a new conversation, or start the server with a larger --max-body-size",
            field="input" if body.previous_response_id is None else "previous_response_id",
        )


def _items(given: str | list[dict[str, Any]], referred: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Each with an id; references replaced by what they refer to."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    found: list[dict[str, Any]] = []
    for item in given:
        kind = _kind(item)
        if kind == "item_reference":
            found.append(referred[str(item.get("id"))])
            continue
        made = f"{_PREFIXES.get(str(kind), 'msg')}_{uuid.uuid4().hex}"
        whole = {**item, "id": item.get("id") or made, "type": kind}
        if kind == "message" and isinstance(item.get("content"), str):
            part = "output_text" if item.get("role") == "assistant" else "input_text"
            extra: dict[str, Any] = {"annotations": []} if part == "output_text" else {}
            whole["content"] = [{"type": part, "text": item["content"], **extra}]
        found.append(whole)
    return found


def _tools(body: ResponsesBody) -> tuple[list[dict[str, Any]], Any]:
    """Those that the model is shown, and the choice among them, as a chat has it."""
    tools = body.tools or []
    for position, tool in enumerate(tools):
        if tool.get("type") != "function":
            place = f"tools[{position}]"
            raise not_here(place, tool.get("type"), _NO_HOST, f"leave {place} out, or send a tool of type function")
        if not isinstance(tool.get("name"), str):
            raise RequestError(
                f"tools[{position}].name is missing", needed="the function's name", field=f"tools[{position}].name"
            )
    choice = body.tool_choice
    if not isinstance(choice, dict):
        return tools, choice
    if choice.get("type") == "function":
        return tools, {"type": "function", "function": {"name": str(choice.get("name"))}}
    if choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
        names = [tool.get("name") for tool in choice["tools"] if isinstance(tool, dict)]
        return [tool for tool in tools if tool["name"] in names], choice.get("mode", "auto")
    raise not_here("tool_choice", choice.get("type"), _NO_HOST, "leave tool_choice out, or name a function")


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    return {name: tool.get(name) for name in ("name", "description", "parameters", "strict")}


def _response_format(text: TextOptions | None) -> dict[str, Any] | None:
    """Its schema is not in an object of its own."""
    form = text.format if text is not None else None
    if form is None or form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {"name": form.get("name"), "schema": form.get("schema")}}


def _begun(body: ResponsesBody, ask: GenerationRequest, tools: list[dict[str, Any]]) -> ResponseObject:
    return ResponseObject(
        id=ask.engine_id.replace("-", "_", 1),
        created_at=ask.created,
        status="in_progress",
        background=body.background,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        metadata=body.metadata or {},
        model=ask.model,
        output=[],
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        reasoning=body.reasoning or ReasoningOptions(),
        store=body.store,
        temperature=ask.params.temperature,
        text=TextOptions(
            format=(body.text and body.text.format) or {"type": "text"},
            verbosity=body.text.verbosity if body.text is not None else None,
        ),
        tool_choice=body.tool_choice if body.tool_choice is not None else "auto",
        tools=[{"type": "function", **_function(tool)} for tool in tools],
        top_logprobs=body.top_logprobs or 0,
        top_p=ask.params.top_p,
    )
