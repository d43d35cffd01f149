"""/openapi.json: the API as a document, made from the very types and tables that check requests. Serves nothing.

An operation is one line of `OPERATIONS`; its body is described by the Struct that reads it, with the fields that
`fields` takes beside those of the Struct.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from holdfast.observability.ledger import Ledger
from holdfast.server.anthropic.schema import (
    HARMLESS_MEMBERS,
    AnthropicError,
    AnthropicMessage,
    CountBody,
    CountedTokens,
    MessagesBody,
)
from holdfast.server.endpoints.llama_cpp import AppliedTemplate
from holdfast.server.endpoints.lora import LoadBody, UnloadBody
from holdfast.server.endpoints.memory import MemoryBody
from holdfast.server.endpoints.tokenize import PROMPT_FIELDS
from holdfast.server.http.paths import UI_STATE
from holdfast.server.openai_responses.schema import (
    PASSED,
    DeletedResponse,
    InputItemList,
    InputTokens,
    ResponseObject,
    ResponsesBody,
)
from holdfast.server.schema.auxiliary import (
    DetokenizeBody,
    DetokenizeResponse,
    TokenizeBody,
    TokenizeResponse,
)
from holdfast.server.schema.fields import HARMLESS, QUIET
from holdfast.server.schema.llama_cpp import NativeBody
from holdfast.server.schema.pooling import (
    ClassifyBody,
    ClassifyResponse,
    EmbeddingBody,
    EmbeddingResponse,
    PoolingBody,
    PoolingResponse,
    RerankBody,
    RerankResponse,
    ScoreBody,
    ScoreResponse,
)
from holdfast.server.schema.requests import ChatBody, CompletionBody, Message, Usage
from holdfast.server.schema.responses import ChatAnswer, CompletionAnswer
from holdfast.server.ui.state import UiState

VERSION = "3.1.0"
_TEXT_ALONE = {"input", "return_token_strs"}
_PARAMETER = re.compile(r"\{(\w+)\}")
REFERENCE = "#/components/schemas/{name}"


class Extra(msgspec.Struct):
    """What helps, in our own words."""

    code: str
    needed: str | None = None
    found: str | None = None
    fix: str | None = None


class ErrorObject(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None
    holdfast: Extra | None = None


class Error(msgspec.Struct):
    """OpenAI's shape."""

    error: ErrorObject


class Health(msgspec.Struct):
    status: Literal["ready", "sleeping", "loading", "restarting", "hung", "draining", "dead"]
    reason: str | None = None
    code: str | None = None
    progress: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    path: str
    method: Literal["get", "post", "delete"]
    summary: str
    body: type[msgspec.Struct] | None = None
    answer: type[msgspec.Struct] | None = None
    """None: told in words, or plain."""
    kind: str = "application/json"
    """Of the answer."""
    listed: bool = False
    """Whether the answer is a list where several are asked for."""
    streams: bool = False
    query: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Names, and the values they take."""
    together: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Names that are given once for each of these values, or not at all."""
    refusals: tuple[int, ...] = ()
    error: type[msgspec.Struct] = Error


OPERATIONS = (
    Operation(path="/v1/chat/completions", method="post", summary="Create a chat completion", body=ChatBody,
              answer=ChatAnswer, streams=True, refusals=(400, 404, 408, 413, 415, 429, 503)),
    Operation(path="/v1/completions", method="post", summary="Create a completion", body=CompletionBody,
              answer=CompletionAnswer, streams=True, refusals=(400, 404, 408, 413, 415, 429, 503)),
    Operation(path="/v1/responses", method="post", summary="Create a response (OpenAI's Responses API)",
              body=ResponsesBody, answer=ResponseObject, streams=True, refusals=(400, 404, 408, 413, 415, 429, 503)),
    Operation(path="/v1/responses/input_tokens", method="post", summary="Count a response's input tokens",
              body=ResponsesBody, answer=InputTokens, refusals=(400, 404, 408, 413, 415, 503)),
    Operation(path="/v1/responses/{response_id}", method="get", summary="A stored response", answer=ResponseObject,
              query=(("stream", ("false",)),), refusals=(400, 404, 503)),
    Operation(path="/v1/responses/{response_id}", method="delete", summary="Delete a stored response",
              answer=DeletedResponse, refusals=(404, 503)),
    Operation(path="/v1/responses/{response_id}/cancel", method="post", summary="Cancel a response in the background",
              answer=ResponseObject, refusals=(400, 404, 503)),
    Operation(path="/v1/responses/{response_id}/input_items", method="get", summary="What a response was made of",
              answer=InputItemList, query=(("order", ("asc", "desc")),), refusals=(400, 404, 503)),
    Operation(path="/v1/messages", method="post", summary="Create a message (Anthropic's API)", body=MessagesBody,
              answer=AnthropicMessage, streams=True, refusals=(400, 404, 408, 413, 415, 429, 503),
              error=AnthropicError),
    Operation(path="/v1/messages/count_tokens", method="post", summary="Count a message's input tokens (Anthropic)",
              body=CountBody, answer=CountedTokens, refusals=(400, 404, 408, 413, 415, 503), error=AnthropicError),
    Operation(path="/v1/embeddings", method="post", summary="Create embeddings", body=EmbeddingBody,
              answer=EmbeddingResponse, refusals=(400, 404, 408, 413, 415, 429, 503)),
    Operation(path="/pooling", method="post", summary="Embeddings or chances as numbers", body=PoolingBody,
              answer=PoolingResponse, refusals=(400, 404, 408, 413, 415, 429, 503)),
    Operation(path="/v1/score", method="post", summary="Score pairs of texts", body=ScoreBody,
              answer=ScoreResponse, refusals=(400, 404, 408, 413, 415, 429, 503)),
    Operation(path="/v1/rerank", method="post", summary="Order documents by a query", body=RerankBody,
              answer=RerankResponse, refusals=(400, 404, 408, 413, 415, 429, 503)),
    Operation(path="/classify", method="post", summary="Classify texts", body=ClassifyBody,
              answer=ClassifyResponse, refusals=(400, 404, 408, 413, 415, 429, 503)),
    Operation(path="/invocations", method="post", summary="Any of these by its fields (SageMaker)", body=ChatBody,
              streams=True, refusals=(400, 404, 408, 413, 415, 429, 503)),
    Operation(path="/v1/models", method="get", summary="List the served models", refusals=(503,)),
    Operation(path="/v1/models/{name}", method="get", summary="Describe one served model", refusals=(404, 503)),
    Operation(path="/tokenize", method="post", summary="Tokenize text or chat messages", body=TokenizeBody,
              answer=TokenizeResponse, refusals=(400, 404, 408, 413, 415, 503)),
    Operation(path="/detokenize", method="post", summary="Convert token ids to text", body=DetokenizeBody,
              answer=DetokenizeResponse, refusals=(400, 404, 408, 413, 415, 503)),
    Operation(path="/completion", method="post", summary="llama.cpp's own completion", body=NativeBody, streams=True,
              listed=True, refusals=(400, 404, 408, 413, 415, 429, 503)),
    Operation(path="/v1/chat/completions/input_tokens", method="post", body=ChatBody, answer=InputTokens,
              summary="Count a chat's input tokens (llama.cpp)", refusals=(400, 404, 408, 413, 415, 503)),
    Operation(path="/apply-template", method="post", summary="Render chat messages to a prompt (llama.cpp)",
              answer=AppliedTemplate, refusals=(400, 404, 408, 413, 415, 503)),
    Operation(path="/props", method="get", summary="Properties of the server (llama.cpp)", refusals=(503,)),
    Operation(path="/health", method="get", summary="Health check (no API key)", answer=Health, refusals=(503,)),
    Operation(path="/ping", method="get", summary="Health check", answer=Health, refusals=(503,)),
    Operation(path="/ping", method="post", summary="Health check", answer=Health, refusals=(503,)),
    Operation(path="/version", method="get", summary="Version of Holdfast"),
    Operation(path="/load", method="get", summary="Number of unfinished requests"),
    Operation(path="/metrics", method="get", summary="Prometheus metrics", kind="text/plain"),
    Operation(path="/memory", method="get", summary="Planned and measured memory", answer=Ledger, refusals=(503,)),
    Operation(path="/memory", method="post", summary="Change the memory budget", body=MemoryBody, answer=Ledger,
              refusals=(400, 403, 408, 413, 415, 500, 503)),
    Operation(path="/reset_prefix_cache", method="post", summary="Reset the prefix cache", refusals=(400,),
              query=(("reset_running_requests", ("false",)), ("reset_external", ("false",)))),
    Operation(path="/sleep", method="post", summary="Release the engine's memory (--enable-sleep-mode)",
              query=(("level", ("1", "2")), ("mode", ("abort", "wait"))), refusals=(400, 403, 500, 503)),
    Operation(path="/wake_up", method="post", summary="Wake the engine up", refusals=(400, 403, 500, 503),
              together=(("tags", ("weights", "kv_cache")),)),
    Operation(path="/is_sleeping", method="get", summary="Whether the engine is sleeping", refusals=(400, 403)),
)  # fmt: skip

LORA_OPERATIONS = (
    Operation(path="/v1/load_lora_adapter", method="post", summary="Load a LoRA adapter", body=LoadBody,
              kind="text/plain", refusals=(400, 404, 408, 413, 415, 503)),
    Operation(path="/v1/unload_lora_adapter", method="post", summary="Unload a LoRA adapter", body=UnloadBody,
              kind="text/plain", refusals=(400, 404, 408, 413, 415, 503)),
)  # fmt: skip


UI_OPERATIONS = (
    Operation(path=UI_STATE, method="get", summary="What the page at / shows: memory, requests, the last hour",
              answer=UiState, refusals=(400,)),
)  # fmt: skip


def document(version: str, *, with_key: bool, lora: bool, ui: bool = True, strict: bool = False) -> dict[str, Any]:
    operations = OPERATIONS + (LORA_OPERATIONS if lora else ()) + (UI_OPERATIONS if ui else ())
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation, with_key)
    found: dict[str, Any] = {
        "openapi": VERSION,
        "info": {"title": "Holdfast", "version": version},
        "paths": paths,
        "components": {"schemas": _schemas(operations, strict=strict)},
    }
    if with_key:
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"key": []}]
    return found


def _described(operation: Operation, with_key: bool) -> dict[str, Any]:
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "query", "schema": {"type": "string", "enum": list(values)}}
        for name, values in operation.query
    ]
    for name, values in operation.together:
        several = {"type": "array", "items": {"type": "string", "enum": list(values)}, "uniqueItems": True}
        parameters.append({"name": name, "in": "query", "schema": {**several, "minItems": len(values)}})
    for name in _PARAMETER.findall(operation.path):
        parameters.append({"name": name, "in": "path", "required": True, "schema": {"type": "string"}})
    content: dict[str, Any] = {operation.kind: {"schema": _schema_of(operation)}}
    if operation.streams:
        # Whoever reads events by their fields has objects.
        content["text/event-stream"] = {"schema": {"type": ["string", "object"]}}
    answers: dict[str, Any] = {"200": {"description": "success", "content": content}}
    for status in (*operation.refusals, *((401,) if with_key else ())):
        kind = Health if operation.answer is Health else operation.error
        schema = {"$ref": REFERENCE.format(name=kind.__name__)}
        answers[str(status)] = {"description": "error", "content": {"application/json": {"schema": schema}}}
    found: dict[str, Any] = {"summary": operation.summary, "parameters": parameters, "responses": answers}
    if operation.body is not None:
        body = {"schema": {"$ref": REFERENCE.format(name=operation.body.__name__)}}
        found["requestBody"] = {"required": True, "content": {"application/json": body}}
    return found


def _schema_of(operation: Operation) -> dict[str, Any]:
    if operation.answer is not None:
        return {"$ref": REFERENCE.format(name=operation.answer.__name__)}
    if operation.listed:
        return {"type": ["object", "array"]}
    return {"type": "object"} if operation.kind == "application/json" else {"type": "string"}


def _schemas(operations: Iterable[Operation], *, strict: bool) -> dict[str, Any]:
    kinds: dict[type[msgspec.Struct], None] = dict.fromkeys([Message, Usage, Error, AnthropicError])
    kinds |= dict.fromkeys(kind for each in operations for kind in (each.body, each.answer) if kind is not None)
    _, found = msgspec.json.schema_components([*kinds], ref_template=REFERENCE)
    # What the Struct does not have, and is taken all the same. What is unknown is ignored, unless it is `strict`.
    beside: dict[str, Any] = {field: {} for field in HARMLESS}
    beside |= {field: {"enum": [*values, None]} for field, values in QUIET.items()}
    for name in {each.body.__name__ for each in operations if each.body is not None}:
        found[name]["properties"] = beside | found[name]["properties"]
        found[name]["additionalProperties"] = not strict
    # Messages are read one by one, each by its own Struct, so that an error can name the place.
    messages = {"type": "array", "minItems": 1, "items": {"$ref": REFERENCE.format(name="Message")}}
    found["ChatBody"]["properties"]["messages"] = messages
    chat = found["ChatBody"]["properties"]
    found["ResponsesBody"]["properties"] |= {name: chat[name] for name in sorted(PASSED)}
    for name in ("CountBody", "MessagesBody"):
        found[name]["properties"] |= {field: {} for field in HARMLESS_MEMBERS}
    _tell_tokenize(found, beside, strict=strict)
    return dict(_portable(found))


def _tell_tokenize(found: dict[str, Any], beside: dict[str, Any], *, strict: bool) -> None:
    """A text, or messages: two bodies on one path, and so it is with embeddings."""
    text = found["TokenizeBody"]
    text["properties"]["return_token_strs"] = {"type": "boolean", "default": False}
    chat = beside | {name: found["ChatBody"]["properties"][name] for name in sorted(PROMPT_FIELDS)}
    chat["return_token_strs"] = text["properties"]["return_token_strs"]
    messages = {"type": "object", "properties": chat, "required": ["messages"], "additionalProperties": not strict}
    found["TokenizeBody"] = {"title": "TokenizeBody", "anyOf": [text, messages]}
    for body in ("EmbeddingBody", "PoolingBody", "ClassifyBody"):
        inputs = found[body]
        kinds = {**chat, **inputs["properties"]}
        conversation = {**messages, "properties": {name: kinds[name] for name in kinds.keys() - _TEXT_ALONE}}
        found[body] = {"title": body, "anyOf": [inputs, conversation]}


def _portable(schema: Any) -> Any:
    """Python's end of a text in a pattern is spelled as everybody else spells it."""
    if isinstance(schema, dict):
        return {
            name: value.replace(r"\Z", "$") if name == "pattern" and isinstance(value, str) else _portable(value)
            for name, value in schema.items()
        }
    return [_portable(value) for value in schema] if isinstance(schema, list) else schema
