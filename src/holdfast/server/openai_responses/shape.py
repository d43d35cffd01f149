"""How responses look, whole and as a stream of typed events. Puts what is to be stored into the store.

response.created, response.in_progress
for each item: response.output_item.added
    text, thoughts    response.content_part.added, ....delta ..., ....done, response.content_part.done
    a call            response.function_call_arguments.delta ..., .done
    response.output_item.done
response.completed, .incomplete or .failed
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import msgspec

from holdfast.records import AnswerDelta, Logprob
from holdfast.server.openai_responses.read import ResponseOptions
from holdfast.server.openai_responses.schema import CachedDetails, ReasoningDetails, ResponseObject, ResponsesUsage
from holdfast.server.openai_responses.store import ResponseStore, StoredResponse
from holdfast.server.request.parse import GenerationRequest
from holdfast.server.response.logprobs import encode
from holdfast.server.response.pieces import AnswerPieces
from holdfast.server.response.serialize import ResponseChoice, chat_logprob
from holdfast.server.schema.requests import TokenLogprob, Usage
from holdfast.text.tools.events import CallBegun, Content, Event, Reasoning

EventObject = dict[str, Any]
Status = Literal["completed", "incomplete"]

_TEXT_EVENTS = {"message": "response.output_text", "reasoning": "response.reasoning_text"}


class ResponseShape:
    ping = b""

    def __init__(self, ask: GenerationRequest, store: ResponseStore) -> None:
        assert isinstance(ask.options, ResponseOptions)
        self._ask = ask
        self._options = ask.options
        self._store = store
        self._pieces = AnswerPieces(ask.reading)
        self._answer: ResponseChoice | None = None
        self._output: list[dict[str, Any]] = []
        """Items; the last one may be open."""
        self._open = False
        self._written: list[str] = []
        """Of the item that is open: text, thoughts or arguments."""
        self._unshown: list[TokenLogprob] = []
        """In a stream: of tokens that only added to what is held, until an event shows them."""
        self._sequence = 0

    def beginning(self, usage: Usage) -> bytes:
        begun = self._options.response
        return self._encoded({"type": "response.created", "response": begun}) + self._encoded(
            {"type": "response.in_progress", "response": begun}
        )

    def opening(self, answer: ResponseChoice, usage: Usage | None) -> Iterable[bytes]:
        return ()

    def event(self, answer: ResponseChoice, delta: AnswerDelta, usage: Usage | None) -> bytes:
        if delta.logprobs is not None:
            self._unshown += self._shaped(delta.logprobs)
        return b"".join(map(self._encoded, self._take(answer, delta)))

    def keep(self, answer: ResponseChoice, delta: AnswerDelta) -> None:
        if delta.logprobs is not None:
            answer.tokens.add([*self._shaped(delta.logprobs)])
        for _ in self._take(answer, delta):
            pass

    def ending(self, usage: Usage) -> bytes:
        closing = b"".join(map(self._encoded, self._close(self._status)))
        response = self._finished(usage)
        self._put(encode(response), self._options.response.previous_response_id)
        return closing + self._encoded({"type": f"response.{self._status}", "response": response})

    def failure(self, error: dict[str, Any]) -> bytes:
        response = failed(self._options.response, error, self._output)
        self._put(encode(response))
        return self._encoded({"type": "response.failed", "response": response})

    def body(self, answers: list[ResponseChoice], usage: Usage) -> list[bytes]:
        for _ in self._close(self._status):
            pass
        told = next((item for item in self._output if item["type"] == "message"), None)
        if self._ask.logprobs is not None and told is not None:
            told["content"][0]["logprobs"] = msgspec.Raw(b"".join(answers[0].tokens.behind()))
        content = encode(self._finished(usage))
        self._put(content, self._options.response.previous_response_id)
        return [content]

    def _put(self, content: bytes, previous: str | None = None) -> None:
        """`previous`: what it went on from, unless it failed: then that is gone on from again."""
        options = self._options
        if options.response.store:
            kept = StoredResponse(
                owner=options.owner,
                response=content,
                items=options.items,
                background=options.response.background,
                previous=previous,
            )
            self._store.put(options.response.id, kept)

    @property
    def _status(self) -> Status:
        return "incomplete" if self._answer is not None and self._answer.finish_reason == "length" else "completed"

    def _finished(self, usage: Usage) -> ResponseObject:
        status = self._status
        return msgspec.structs.replace(
            self._options.response,
            status=status,
            completed_at=int(time.time()) if status == "completed" else None,
            incomplete_details={"reason": "max_output_tokens"} if status == "incomplete" else None,
            output=self._output,
            usage=ResponsesUsage(
                input_tokens=usage.prompt_tokens,
                input_tokens_details=CachedDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
                output_tokens=usage.completion_tokens,
                output_tokens_details=ReasoningDetails(reasoning_tokens=self._pieces.reasoning_tokens),
                total_tokens=usage.total_tokens,
            ),
        )

    def _take(self, answer: ResponseChoice, delta: AnswerDelta) -> Iterator[EventObject]:
        """Each event must be written before the next is asked for: items change."""
        self._answer = answer
        for event in self._pieces.feed(delta):
            kind = _kind(event)
            if isinstance(event, CallBegun) or not self._open or self._output[-1]["type"] != kind:
                yield from self._close("completed")
                yield from self._begin(event, kind)
            if isinstance(event, CallBegun):
                continue
            self._written.append(event.text)
            at = self._at()
            if kind == "function_call":
                yield {"type": "response.function_call_arguments.delta", **at, "delta": event.text}
                continue
            at["content_index"] = 0
            if kind == "message":
                at["logprobs"], self._unshown = self._unshown, []
            yield {"type": f"{_TEXT_EVENTS[kind]}.delta", **at, "delta": event.text}

    def _begin(self, event: Event, kind: str) -> Iterator[EventObject]:
        self._open, self._written = True, []
        unique = uuid.uuid4().hex
        item: dict[str, Any]
        if isinstance(event, CallBegun):
            called = {"call_id": self._pieces.make_id(), "name": event.name, "arguments": ""}
            item = {"type": kind, "id": f"fc_{unique}", **called, "status": "in_progress"}
        elif kind == "reasoning":
            item = {"type": kind, "id": f"rs_{unique}", "summary": [], "content": [], "status": "in_progress"}
        else:
            item = {"type": kind, "id": f"msg_{unique}", "role": "assistant", "content": [], "status": "in_progress"}
        self._output.append(item)
        yield {"type": "response.output_item.added", "output_index": len(self._output) - 1, "item": item}
        if kind != "function_call":
            yield {"type": "response.content_part.added", **self._at(), "content_index": 0, "part": _part(kind, "")}

    def _close(self, status: Status) -> Iterator[EventObject]:
        if not self._open:
            return
        self._open = False
        item, text, at = self._output[-1], "".join(self._written), self._at()
        kind = item["type"]
        if kind == "function_call":
            item["arguments"] = text
            yield {"type": "response.function_call_arguments.done", **at, "name": item["name"], "arguments": text}
        else:
            item["content"] = [_part(kind, text)]
            at["content_index"] = 0
            no_logprobs: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
            yield {"type": f"{_TEXT_EVENTS[kind]}.done", **at, "text": text, **no_logprobs}
            yield {"type": "response.content_part.done", **at, "part": item["content"][0]}
        item["status"] = status
        yield {"type": "response.output_item.done", "output_index": len(self._output) - 1, "item": item}

    def _at(self) -> dict[str, Any]:
        return {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}

    def _shaped(self, entries: list[dict[int, Logprob]]) -> list[TokenLogprob]:
        count, bytes_of = self._ask.logprobs or 0, self._ask.bytes_of
        return [chat_logprob(entry, count, bytes_of, as_ids=False) for entry in entries]

    def _encoded(self, event: EventObject) -> bytes:
        event["sequence_number"] = self._sequence
        self._sequence += 1
        return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode(event))


def failed(begun: ResponseObject, error: dict[str, Any], output: list[dict[str, Any]]) -> ResponseObject:
    """`error`: OpenAI's error object."""
    told = {"code": "server_error", "message": error["message"]}
    for item in output:
        if item["status"] == "in_progress":
            item["status"] = "incomplete"
    return msgspec.structs.replace(begun, status="failed", error=told, output=output)


def _kind(event: Event) -> str:
    if isinstance(event, Content):
        return "message"
    return "reasoning" if isinstance(event, Reasoning) else "function_call"


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
