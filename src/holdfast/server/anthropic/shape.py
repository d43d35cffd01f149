"""How answers of /v1/messages look, whole and streamed. Knows nothing of the engine or of HTTP.

message_start, ping
for each block: content_block_start, content_block_delta ..., content_block_stop
message_delta (why it ended, usage), message_stop
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Literal

from holdfast.records import AnswerDelta
from holdfast.server.anthropic.schema import AnthropicMessage, MessageUsage
from holdfast.server.http.errors import anthropic_error
from holdfast.server.request.parse import GenerationRequest
from holdfast.server.response.logprobs import encode
from holdfast.server.response.pieces import AnswerPieces
from holdfast.server.response.serialize import ResponseChoice
from holdfast.server.schema.requests import Usage
from holdfast.text.tools.events import Arguments, CallBegun, Content, Event

SIGNATURE = "unsigned"
"""Of thoughts. Anthropic's are signed and checked when they come back; here they are taken as they are. Clients drop
thoughts that have none."""

Kind = Literal["text", "thinking", "tool_use"]


class MessageShape:
    ping = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, ask: GenerationRequest) -> None:
        self._ask = ask
        self._pieces = AnswerPieces(ask.reading)
        self._answer: ResponseChoice | None = None
        self._blocks: list[dict[str, Any]] = []
        """Of a body: whole. Of a stream: as they have begun."""
        self._open = False
        self._arguments: list[str] = []
        """Of the call that is being read, for a body."""

    def beginning(self, usage: Usage) -> bytes:
        message = AnthropicMessage(
            id=self._ask.answer_id,
            model=self._ask.model,
            content=[],
            stop_reason=None,
            stop_sequence=None,
            usage=_usage(usage),
        )
        return _event("message_start", message=message) + self.ping

    def opening(self, answer: ResponseChoice, usage: Usage | None) -> Iterable[bytes]:
        return ()

    def event(self, answer: ResponseChoice, delta: AnswerDelta, usage: Usage | None) -> bytes:
        self._answer = answer
        return b"".join(piece for event in self._pieces.feed(delta) for piece in self._streamed(event))

    def _streamed(self, event: Event) -> Iterable[bytes]:
        kind, begins = self._kind(event), self._begins(event)
        if begins:
            yield self._stop()
            self._blocks.append(self._begun(event, kind))
            self._open = True
            yield _event("content_block_start", index=len(self._blocks) - 1, content_block=self._blocks[-1])
        if isinstance(event, CallBegun):
            return
        if kind == "tool_use":
            delta = {"type": "input_json_delta", "partial_json": event.text}
        else:
            delta = {"type": f"{kind}_delta", kind: event.text}
        yield _event("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    def _stop(self) -> bytes:
        if not self._open:
            return b""
        self._open = False
        index = len(self._blocks) - 1
        signed = b""
        if self._blocks[-1]["type"] == "thinking":
            delta = {"type": "signature_delta", "signature": SIGNATURE}
            signed = _event("content_block_delta", index=index, delta=delta)
        return signed + _event("content_block_stop", index=index)

    def ending(self, usage: Usage) -> bytes:
        reason, sequence = self._ended()
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return self._stop() + _event("message_delta", delta=delta, usage=_usage(usage)) + _event("message_stop")

    def failure(self, error: dict[str, Any]) -> bytes:
        return b"event: error\ndata: " + encode(anthropic_error(error)) + b"\n\n"

    def keep(self, answer: ResponseChoice, delta: AnswerDelta) -> None:
        self._answer = answer
        for event in self._pieces.feed(delta):
            kind = self._kind(event)
            if self._begins(event):
                self._close_call()
                self._blocks.append(self._begun(event, kind))
                self._open = True
                if kind == "thinking":
                    self._blocks[-1]["signature"] = SIGNATURE
            if isinstance(event, Arguments):
                self._arguments.append(event.text)
            elif not isinstance(event, CallBegun):
                self._blocks[-1][kind] += event.text

    def body(self, answers: list[ResponseChoice], usage: Usage) -> list[bytes]:
        self._close_call()
        reason, sequence = self._ended()
        message = AnthropicMessage(
            id=self._ask.answer_id,
            model=self._ask.model,
            content=self._blocks,
            stop_reason=reason,
            stop_sequence=sequence,
            usage=_usage(usage),
        )
        return [encode(message)]

    def _kind(self, event: Event) -> Kind:
        if isinstance(event, Content):
            return "text"
        return "tool_use" if isinstance(event, CallBegun | Arguments) else "thinking"

    def _begins(self, event: Event) -> bool:
        """Whether it is the first of a block."""
        if isinstance(event, CallBegun) or not self._open:
            return True
        return bool(self._kind(event) != self._blocks[-1]["type"])

    def _begun(self, event: Event, kind: Kind) -> dict[str, Any]:
        if isinstance(event, CallBegun):
            return {"type": kind, "id": self._pieces.make_id(), "name": event.name, "input": {}}
        return {"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})}

    def _close_call(self) -> None:
        """The input of a call is an object; what was cut off or is no JSON cannot be one, and is left out."""
        if self._blocks and self._blocks[-1]["type"] == "tool_use":
            try:
                given = json.loads("".join(self._arguments))
            except (ValueError, RecursionError):
                given = None
            self._blocks[-1]["input"] = given if isinstance(given, dict) else {}
        self._arguments = []

    def _ended(self) -> tuple[Any, str | None]:
        """Why, and by which of the stop sequences."""
        answer = self._answer
        if answer is not None and answer.finish_reason == "length":
            return "max_tokens", None
        if answer is not None and isinstance(answer.stop_reason, str):
            return "stop_sequence", answer.stop_reason
        return "tool_use" if self._pieces.called else "end_turn", None


def _usage(usage: Usage) -> MessageUsage:
    cached = usage.prompt_tokens_details.cached_tokens
    return MessageUsage(
        input_tokens=usage.prompt_tokens - cached,
        cache_read_input_tokens=cached,
        output_tokens=usage.completion_tokens,
    )


def _event(name: str, **members: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), encode({"type": name, **members}))
