"""How answers look: OpenAI's bodies and events for chats and completions. Knows nothing of the engine or of HTTP.

Events are the hot path: everything that is the same for a whole stream is encoded once, and a token costs one
small JSON string.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from holdfast.records import AnswerDelta, Logprob
from holdfast.server.asking import Ask, BytesOf
from holdfast.server.protocol import (
    AssistantMessage,
    ChatAnswer,
    ChatChoice,
    ChatLogprobs,
    CompletionAnswer,
    CompletionChoice,
    CompletionLogprobs,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
    Usage,
)

encode = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"
LOWEST_LOGPROB = -9999.0
"""JSON has no minus infinity; OpenAI and vLLM write this number."""


@dataclass(slots=True)
class Answer:
    """One choice as it grows."""

    index: int
    text: str = ""
    begun: bool = False
    shown_chars: int = 0
    """Length of the text of the tokens whose logprobs were reported: where the next one starts."""
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs = field(default_factory=list)
    """Shared by all answers to a prompt."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Shape(Protocol):
    """A chat or a completion."""

    def opening(self, answer: Answer) -> bytes:
        """Events before the first token of an answer; may be empty."""

    def event(self, answer: Answer, delta: AnswerDelta, usage: Usage | None) -> bytes: ...

    def usage_event(self, usage: Usage) -> bytes: ...

    def body(self, answers: list[Answer], usage: Usage) -> bytes: ...


def error_event(error: dict[str, Any]) -> bytes:
    return b"data: " + encode({"error": error}) + b"\n\n"


class _Stream:
    """The parts of an event that never change."""

    def __init__(self, ask: Ask, kind: str) -> None:
        self._ask = ask
        head = {"id": ask.answer_id, "object": kind, "created": ask.created, "model": ask.model}
        self._head = b"data: " + encode(head)[:-1] + b',"choices":['

    def close(self, usage: Usage | None) -> bytes:
        if usage is not None:
            return b'],"usage":' + encode(usage) + b"}\n\n"
        # With include_usage OpenAI's chunks carry an explicit null.
        return b'],"usage":null}\n\n' if self._ask.include_usage else b"]}\n\n"

    def usage_event(self, usage: Usage) -> bytes:
        return self._head + self.close(usage)


class ChatShape(_Stream):
    def __init__(self, ask: Ask) -> None:
        super().__init__(ask, "chat.completion.chunk")

    def opening(self, answer: Answer) -> bytes:
        return b"%b%b%b" % (
            self._head,
            b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
            % answer.index,
            self.close(None),
        )

    def event(self, answer: Answer, delta: AnswerDelta, usage: Usage | None) -> bytes:
        logprobs = b"null" if delta.logprobs is None else encode(self._logprobs(delta.logprobs))
        choice = b'{"index":%d,"delta":{"content":%b},"logprobs":%b,' % (answer.index, encode(delta.text), logprobs)
        return self._head + choice + _ending(delta) + self.close(usage)

    def _logprobs(self, entries: list[dict[int, Logprob]]) -> ChatLogprobs:
        count, bytes_of = self._ask.logprobs or 0, self._ask.bytes_of
        return ChatLogprobs([_chat_logprob(entry, count, bytes_of) for entry in entries])

    def body(self, answers: list[Answer], usage: Usage) -> bytes:
        choices = [
            ChatChoice(
                answer.index,
                AssistantMessage(content=answer.text),
                None if self._ask.logprobs is None else self._logprobs(answer.logprobs),
                answer.finish_reason or "stop",
                answer.stop_reason,
            )
            for answer in answers
        ]
        ask = self._ask
        told = None if ask.params.prompt_logprobs is None else _writable(answers[0].prompt_logprobs)
        answer = ChatAnswer(
            id=ask.answer_id, created=ask.created, model=ask.model, choices=choices, usage=usage, prompt_logprobs=told
        )
        return encode(answer)


class CompletionShape(_Stream):
    def __init__(self, ask: Ask) -> None:
        super().__init__(ask, "text_completion")

    def opening(self, answer: Answer) -> bytes:
        echo = self._echo(answer)
        if not echo:
            return b""
        logprobs = b"null" if self._ask.first_tokens is None else encode(self._logprobs([], answer))
        choice = b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":null}' % (answer.index, encode(echo), logprobs)
        return self._head + choice + self.close(None)

    def event(self, answer: Answer, delta: AnswerDelta, usage: Usage | None) -> bytes:
        logprobs = b"null"
        if delta.logprobs is not None:
            logprobs = encode(_completion_logprobs(delta.logprobs, answer, CompletionLogprobs([], [], [], [])))
        choice = b'{"index":%d,"text":%b,"logprobs":%b,' % (answer.index, encode(delta.text), logprobs)
        return self._head + choice + _ending(delta) + self.close(usage)

    def _logprobs(self, entries: list[dict[int, Logprob]], answer: Answer) -> CompletionLogprobs:
        """Of the prompt, where it is echoed, and of these."""
        shaped = CompletionLogprobs([], [], [], [])
        if self._ask.first_tokens is not None:
            first = self._ask.first_tokens[answer.index // self._ask.params.n]
            shaped = CompletionLogprobs([first], [None], [None], [0])
            answer.shown_chars += len(first)
            entries = [*(entry for entry in answer.prompt_logprobs if entry is not None), *entries]
        return _completion_logprobs(entries, answer, shaped)

    def _echo(self, answer: Answer) -> str:
        return self._ask.echoes[answer.index // self._ask.params.n] if self._ask.echoes else ""

    def body(self, answers: list[Answer], usage: Usage) -> bytes:
        choices = [
            CompletionChoice(
                answer.index,
                self._echo(answer) + answer.text,
                None if self._ask.logprobs is None else self._logprobs(answer.logprobs, answer),
                answer.finish_reason or "stop",
                answer.stop_reason,
                None if self._ask.params.prompt_logprobs is None else _writable(answer.prompt_logprobs),
            )
            for answer in answers
        ]
        ask = self._ask
        return encode(
            CompletionAnswer(id=ask.answer_id, created=ask.created, model=ask.model, choices=choices, usage=usage)
        )


def _ending(delta: AnswerDelta) -> bytes:
    if delta.finish_reason is None:
        return b'"finish_reason":null}'
    return b'"finish_reason":"%b","stop_reason":%b}' % (delta.finish_reason.value.encode(), encode(delta.stop_reason))


def _split(entry: dict[int, Logprob]) -> tuple[Logprob, list[Logprob]]:
    """The chosen token, and all of them from the likeliest down."""
    chosen = next(iter(entry.values()))
    return chosen, sorted(entry.values(), key=lambda candidate: -candidate.logprob)


def _chat_logprob(entry: dict[int, Logprob], count: int, bytes_of: BytesOf | None) -> TokenLogprob:
    def shown(token_id: int, candidate: Logprob) -> tuple[str, float, list[int]]:
        text = candidate.decoded_token or ""
        # A token may be half a character: its text is then U+FFFD, and only its bytes tell what it is.
        spelled = bytes_of(token_id) if bytes_of is not None else None
        return text, max(candidate.logprob, LOWEST_LOGPROB), list(text.encode() if spelled is None else spelled)

    chosen = next(iter(entry.items()))
    likeliest = sorted(entry.items(), key=lambda item: -item[1].logprob)
    return TokenLogprob(*shown(*chosen), [TopLogprob(*shown(*top)) for top in likeliest[:count]])


def _writable(told: PromptLogprobs) -> PromptLogprobs:
    def finite(candidate: Logprob) -> Logprob:
        if candidate.logprob >= LOWEST_LOGPROB:
            return candidate
        return msgspec.structs.replace(candidate, logprob=LOWEST_LOGPROB)

    return [entry and {token: finite(candidate) for token, candidate in entry.items()} for entry in told]


def _completion_logprobs(
    entries: list[dict[int, Logprob]], answer: Answer, shaped: CompletionLogprobs
) -> CompletionLogprobs:
    """Behind what stands in `shaped`."""
    for entry in entries:
        chosen, likeliest = _split(entry)
        token = chosen.decoded_token or ""
        shaped.tokens.append(token)
        shaped.token_logprobs.append(max(chosen.logprob, LOWEST_LOGPROB))
        tops: dict[str, float] = {}
        for top in likeliest:
            # Two ids may decode to the same text: the likelier one speaks for it.
            tops.setdefault(top.decoded_token or "", max(top.logprob, LOWEST_LOGPROB))
        shaped.top_logprobs.append(tops)
        shaped.text_offset.append(answer.shown_chars)
        answer.shown_chars += len(token)
    return shaped
