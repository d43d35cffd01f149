"""How answers look: OpenAI's bodies and events for chats and completions. Knows nothing of the engine or of HTTP.

Events are the hot path: everything that is the same for a whole stream is encoded once, and a token costs one
small JSON string.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from holdfast import __version__
from holdfast.records import AnswerDelta, Logprob, RequestTiming
from holdfast.server.request.output_parser import OutputParserConfig
from holdfast.server.request.parse import BytesOf, GenerationRequest, token_name
from holdfast.server.response.logprobs import (
    LOWEST_LOGPROB,
    CompletionLogprobsWriter,
    JsonArrayWriter,
    PromptLogprobs,
    encode,
)
from holdfast.server.schema.requests import (
    AnsweredCall,
    AnsweredFunction,
    AssistantMessage,
    ChatLogprobs,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from holdfast.text.tools.answers import AnswerReader
from holdfast.text.tools.events import Arguments, CallBegun, Content, Event, Reasoning

DONE = b"data: [DONE]\n\n"
_CHOICES = b',"choices":['
_NO_IDS = b'"token_ids":null,'
_NO_PROMPT_IDS = b'"prompt_token_ids":null,' + _NO_IDS
SYSTEM_FINGERPRINT = f"holdfast-{__version__}"
_FINGERPRINT = f',"system_fingerprint":"{SYSTEM_FINGERPRINT}"'.encode()
# And what vLLM's answers have and these never do: clients in typed languages expect the members all the same.
_SERVICE = (
    f',"service_tier":null,"system_fingerprint":"{SYSTEM_FINGERPRINT}","kv_transfer_params":null'
    ',"ec_transfer_params":null,"metrics":null}'
).encode()


@dataclass(slots=True)
class ResponseChoice:
    """One choice as it grows."""

    index: int
    of_prompt: PromptLogprobs
    """Of the prompt; shared by all answers to it."""
    text: str = ""
    begun: bool = False
    shown_chars: int = 0
    """In a stream: length of the text of the tokens whose logprobs were reported, where the next one starts."""
    tokens: JsonArrayWriter = field(default_factory=JsonArrayWriter)
    """Log-probabilities of a chat that is not streamed."""
    columns: CompletionLogprobsWriter = field(default_factory=CompletionLogprobsWriter)
    """The same of a completion."""
    token_ids: list[int] = field(default_factory=list)
    """Kept only where they are shown."""
    ids_shown: bool = False
    """In a stream: whether those of the prompt have gone out."""
    unshown_ids: list[int] = field(default_factory=list)
    """In a stream: of tokens that only added to what is held, until an event shows them."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cached_tokens: int = 0
    """Of its prompt."""
    timing: RequestTiming | None = None
    """Once it has ended."""


class ResponseFormatter(Protocol):
    """A chat or a completion."""

    ping: bytes
    """Of a stream: what is sent now and then while there is nothing to say; empty: nothing."""

    def beginning(self, usage: Usage) -> bytes:
        """Of a stream, before anything was generated; may be empty."""

    def opening(self, answer: ResponseChoice, usage: Usage | None) -> Iterable[bytes]:
        """Events before the first token of an answer; may be empty."""

    def event(self, answer: ResponseChoice, delta: AnswerDelta, usage: Usage | None) -> bytes: ...

    def ending(self, usage: Usage) -> bytes:
        """Of a stream, behind the last event of its answers."""

    def failure(self, error: dict[str, Any]) -> bytes:
        """Of a stream that ends with an error, OpenAI's error object: the last that is sent."""

    def keep(self, answer: ResponseChoice, delta: AnswerDelta) -> None:
        """What a body needs of further tokens beside their text, which is kept in any case."""

    def body(self, answers: list[ResponseChoice], usage: Usage) -> list[bytes]:
        """In pieces; those that are the same in several answers are there once."""


def error_event(error: dict[str, Any]) -> bytes:
    return b"data: " + encode({"error": error}) + b"\n\n"


class _Stream:
    """The parts of an event that never change."""

    ping = b""

    def __init__(self, ask: GenerationRequest, kind: str) -> None:
        self._ask = ask
        self._head = b"data: " + _head(ask, kind)

    def close(self, usage: Usage | None, *, ended: bool = False) -> bytes:
        """`ended`: an answer ends with it. As in vLLM it bears the fingerprint, unless a chunk of the usage follows."""
        end = _FINGERPRINT + b"}\n\n" if ended and not self._ask.include_usage else b"}\n\n"
        if usage is not None:
            return b'],"usage":' + encode(usage) + end
        # With include_usage OpenAI's chunks carry an explicit null.
        return (b'],"usage":null' if self._ask.include_usage else b"]") + end

    def beginning(self, usage: Usage) -> bytes:
        return b""

    def ending(self, usage: Usage) -> bytes:
        if not self._ask.include_usage:
            return DONE
        return self._head + b'],"usage":%b%b}\n\n' % (encode(usage), _FINGERPRINT) + DONE

    def failure(self, error: dict[str, Any]) -> bytes:
        """With the [DONE] that readers wait for."""
        return error_event(error) + DONE


class ChatShape(_Stream):
    def __init__(self, ask: GenerationRequest) -> None:
        super().__init__(ask, "chat.completion.chunk")
        self._echo = ask.echoes[0] if ask.echoes else ""

    def opening(self, answer: ResponseChoice, usage: Usage | None) -> Iterable[bytes]:
        choice = b'{"index":%d,"delta":%b,"logprobs":null,"finish_reason":null}'
        deltas = [b'{"role":"assistant","content":""}']
        if self._echo:
            deltas.append(b'{"content":%b}' % encode(self._echo))
        for delta in deltas:
            yield self._opening_head(answer) + choice % (answer.index, delta) + self.close(usage)

    def _opening_head(self, answer: ResponseChoice) -> bytes:
        """The first chunk of all shows the prompt's ids, where ids are shown."""
        first = not answer.index and not answer.ids_shown
        answer.ids_shown = True
        return self._head.removesuffix(_CHOICES) + self._prompt_members(shown=first) + _CHOICES

    def _prompt_members(self, *, shown: bool = True) -> bytes:
        ids = encode(self._ask.prompts[0] if shown and self._ask.with_token_ids else None)
        return b',"prompt_token_ids":%b,"prompt_text":%b' % (ids, encode(self._ask.prompt_text if shown else None))

    def event(self, answer: ResponseChoice, delta: AnswerDelta, usage: Usage | None) -> bytes:
        logprobs = b"null" if delta.logprobs is None else encode(self._logprobs(delta.logprobs))
        choice = b'{"index":%d,"delta":{"content":%b},"logprobs":%b,' % (answer.index, encode(delta.text), logprobs)
        ended = delta.finish_reason is not None
        return self._head + choice + self._ids(delta.token_ids) + _ending(delta) + self.close(usage, ended=ended)

    def _ids(self, token_ids: list[int]) -> bytes:
        """As a member of a choice: null unless they are asked for."""
        return b'"token_ids":%b,' % encode(token_ids) if self._ask.with_token_ids else _NO_IDS

    def _logprobs(self, entries: list[dict[int, Logprob]]) -> ChatLogprobs:
        return ChatLogprobs(self._shaped(entries))

    def _shaped(self, entries: list[dict[int, Logprob]]) -> list[TokenLogprob]:
        count, bytes_of = self._ask.logprobs or 0, self._ask.bytes_of
        return [chat_logprob(entry, count, bytes_of, as_ids=self._ask.tokens_as_ids) for entry in entries]

    def keep(self, answer: ResponseChoice, delta: AnswerDelta) -> None:
        if delta.logprobs is not None:
            answer.tokens.add([*self._shaped(delta.logprobs)])

    def _message(self, answer: ResponseChoice) -> AssistantMessage:
        return AssistantMessage(content=self._echo + answer.text)

    def body(self, answers: list[ResponseChoice], usage: Usage) -> list[bytes]:
        pieces = [_head(self._ask, "chat.completion")]
        for place, answer in enumerate(answers):
            message = encode(self._message(answer))
            pieces.append(b'%b{"index":%d,"message":%b,"logprobs":' % (_comma(place), answer.index, message))
            if self._ask.logprobs is None:
                pieces.append(b"null")
            else:
                pieces += [b'{"content":', *answer.tokens.behind(), b',"refusal":null}']
            pieces.append(b'%b,%b"routed_experts":null}' % (_ended(answer), self._ids(answer.token_ids)))
        pieces.append(b'],"usage":%b%b,"prompt_logprobs":' % (encode(usage), self._prompt_members()))
        return [*pieces, *_listed(self._ask, answers[0]), _SERVICE]


class ReadChatShape(ChatShape):
    """A chat whose answers are read for calls and thoughts: an event for each piece of one of them, none for a token
    that only adds to what is held."""

    def __init__(self, ask: GenerationRequest, reading: OutputParserConfig) -> None:
        super().__init__(ask)
        self._reading = reading
        self._readers: dict[int, AnswerReader] = {}

    def event(self, answer: ResponseChoice, delta: AnswerDelta, usage: Usage | None) -> bytes:
        reader = self._readers.get(answer.index)
        if reader is None:
            reader = self._readers[answer.index] = self._reading.reader()
        events = reader.feed(delta.text)
        token_ids = answer.unshown_ids = answer.unshown_ids + delta.token_ids if self._ask.with_token_ids else []
        ended = delta.finish_reason is not None
        if ended:
            events += reader.finish()
            answer.finish_reason = self._reading.ended(answer.finish_reason, reader)
        shown = [self._delta(event) for event in events if self._shows(event)]
        if not shown and not ended and delta.logprobs is None:
            return b""
        logprobs = b"null" if delta.logprobs is None else encode(self._logprobs(delta.logprobs))
        pieces: list[bytes] = []
        for place, written in enumerate(shown or [b"{}"], 1):
            last = ended and place >= len(shown)
            ending = _ended(answer)[1:] + b"}" if last else b'"finish_reason":null}'
            pieces += [self._head, b'{"index":%d,"delta":%b,"logprobs":%b,' % (answer.index, written, logprobs)]
            pieces += [self._ids(token_ids), ending, self.close(usage, ended=last)]
            logprobs, token_ids = b"null", []
        answer.unshown_ids = []
        return b"".join(pieces)

    def _shows(self, event: Event) -> bool:
        return self._reading.shows_thoughts or not isinstance(event, Reasoning)

    def _delta(self, event: Event) -> bytes:
        if isinstance(event, Content):
            return b'{"content":%b}' % encode(event.text)
        if isinstance(event, Reasoning):
            text = encode(event.text)
            return b'{"reasoning_content":%b,"reasoning":%b}' % (text, text)
        if isinstance(event, CallBegun):
            form = b'{"tool_calls":[{"index":%d,"id":%b,"type":"function","function":{"name":%b,"arguments":""}}]}'
            return form % (event.call, encode(self._reading.make_id()), encode(event.name))
        return b'{"tool_calls":[{"index":%d,"function":{"arguments":%b}}]}' % (event.call, encode(event.text))

    def _message(self, answer: ResponseChoice) -> AssistantMessage:
        reader = self._reading.reader()
        events = [*reader.feed(answer.text), *reader.finish()]
        answer.finish_reason = self._reading.ended(answer.finish_reason, reader)
        calls: list[AnsweredCall] = []
        for event in events:
            if isinstance(event, CallBegun):
                calls.append(AnsweredCall(id=self._reading.make_id(), function=AnsweredFunction(event.name, "")))
            elif isinstance(event, Arguments):
                calls[event.call].function.arguments += event.text
        content = "".join(event.text for event in events if isinstance(event, Content))
        content = self._echo + content
        thought = "".join(event.text for event in events if isinstance(event, Reasoning)) or None
        # As vLLM has it: where there is something else than content, and no content, there is none.
        forced = self._reading.use is not None and self._reading.use.forced
        message = AssistantMessage(content=content or (None if calls or thought or forced else ""))
        if self._reading.thinking is not None and self._reading.shows_thoughts:
            message.reasoning_content = message.reasoning = thought
        if calls:
            message.tool_calls = calls
        return message


def chat_shape(ask: GenerationRequest) -> ChatShape:
    return ChatShape(ask) if ask.reading is None else ReadChatShape(ask, ask.reading)


class CompletionShape(_Stream):
    def __init__(self, ask: GenerationRequest) -> None:
        super().__init__(ask, "text_completion")

    def opening(self, answer: ResponseChoice, usage: Usage | None) -> Iterable[bytes]:
        echo = self._echo(answer)
        if not echo:
            return
        yield self._head + b'{"index":%d,%b"text":%b,"logprobs":' % (answer.index, _NO_PROMPT_IDS, encode(echo))
        of_prompt = answer.of_prompt.echoed
        if of_prompt is None:
            yield b"null"
        else:
            yield from of_prompt.behind()
            answer.shown_chars = of_prompt.chars
        yield b',"finish_reason":null,"stop_reason":null}' + self.close(usage)

    def event(self, answer: ResponseChoice, delta: AnswerDelta, usage: Usage | None) -> bytes:
        logprobs = b"null"
        if delta.logprobs is not None:
            columns = CompletionLogprobsWriter(token_name if self._ask.tokens_as_ids else None)
            columns.add(delta.logprobs)
            logprobs = b"".join(columns.behind(start=answer.shown_chars))
            answer.shown_chars += columns.chars
        ids = self._new_ids(answer, delta.token_ids)
        choice = b'{"index":%d,%b"text":%b,"logprobs":%b,' % (answer.index, ids, encode(delta.text), logprobs)
        ended = delta.finish_reason is not None
        ending = _ending(delta) if ended else b'"finish_reason":null,"stop_reason":null}'
        return self._head + choice + ending + self.close(usage, ended=ended)

    def keep(self, answer: ResponseChoice, delta: AnswerDelta) -> None:
        if delta.logprobs is not None:
            answer.columns.add(delta.logprobs)

    def _ids(self, answer: ResponseChoice) -> bytes:
        """Of an answer and its prompt, as members of a choice: null unless they are asked for."""
        return _NO_PROMPT_IDS

    def _new_ids(self, answer: ResponseChoice, token_ids: list[int]) -> bytes:
        """The same in a stream."""
        return _NO_PROMPT_IDS

    def _echo(self, answer: ResponseChoice) -> str:
        return self._ask.echoes[answer.index // self._ask.params.n] if self._ask.echoes else ""

    def body(self, answers: list[ResponseChoice], usage: Usage) -> list[bytes]:
        # The closing quote is that of the answer.
        echoes = [encode(echo)[:-1] for echo in self._ask.echoes or [""] * len(self._ask.prompts)]
        pieces = [_head(self._ask, "text_completion")]
        for place, answer in enumerate(answers):
            echo = echoes[answer.index // self._ask.params.n]
            pieces.append(b'%b{"index":%d,%b"text":' % (_comma(place), answer.index, self._ids(answer)))
            pieces += [echo, encode(answer.text)[1:], b',"logprobs":']
            pieces += [b"null"] if self._ask.logprobs is None else answer.columns.behind(answer.of_prompt.echoed)
            pieces.append(_ended(answer) + b',"prompt_logprobs":')
            pieces += [*_listed(self._ask, answer), b',"routed_experts":null}']
        return [*pieces, b'],"usage":%b%b' % (encode(usage), _SERVICE)]


class CompletionIdsShape(CompletionShape):
    """With the token ids too: vLLM's return_token_ids, and all there is where there is no tokenizer."""

    def _new_ids(self, answer: ResponseChoice, token_ids: list[int]) -> bytes:
        prompt = None if answer.ids_shown else self._prompt(answer)
        answer.ids_shown = True
        return b'"prompt_token_ids":%b,"token_ids":%b,' % (encode(prompt), encode(token_ids))

    def _ids(self, answer: ResponseChoice) -> bytes:
        return b'"prompt_token_ids":%b,"token_ids":%b,' % (encode(self._prompt(answer)), encode(answer.token_ids))

    def _prompt(self, answer: ResponseChoice) -> list[int]:
        return self._ask.prompts[answer.index // self._ask.params.n]


def completion_shape(ask: GenerationRequest) -> CompletionShape:
    return CompletionIdsShape(ask) if ask.with_token_ids else CompletionShape(ask)


def _head(ask: GenerationRequest, kind: str) -> bytes:
    head = {"id": ask.answer_id, "object": kind, "created": ask.created, "model": ask.model}
    return encode(head)[:-1] + _CHOICES


def _comma(place: int) -> bytes:
    return b"," if place else b""


def _ended(answer: ResponseChoice) -> bytes:
    reason, stop_reason = encode(answer.finish_reason or "stop"), encode(answer.stop_reason)
    return b',"finish_reason":%b,"stop_reason":%b' % (reason, stop_reason)


def _listed(ask: GenerationRequest, answer: ResponseChoice) -> Iterable[bytes]:
    """vLLM's prompt_logprobs."""
    if ask.params.prompt_logprobs is None or answer.of_prompt.listed is None:
        return [b"null"]
    return answer.of_prompt.listed.behind()


def _ending(delta: AnswerDelta) -> bytes:
    if delta.finish_reason is None:
        return b'"finish_reason":null}'
    return b'"finish_reason":"%b","stop_reason":%b}' % (delta.finish_reason.value.encode(), encode(delta.stop_reason))


def chat_logprob(entry: dict[int, Logprob], count: int, bytes_of: BytesOf | None, *, as_ids: bool) -> TokenLogprob:
    def shown(token_id: int, candidate: Logprob) -> tuple[str, float, list[int]]:
        text = candidate.decoded_token or ""
        # A token may be half a character: its text is then U+FFFD, and only its bytes tell what it is.
        spelled = bytes_of(token_id) if bytes_of is not None else None
        name = token_name(token_id) if as_ids else text
        return name, max(candidate.logprob, LOWEST_LOGPROB), list(text.encode() if spelled is None else spelled)

    chosen = next(iter(entry.items()))
    likeliest = sorted(entry.items(), key=lambda item: -item[1].logprob)
    return TokenLogprob(*shown(*chosen), [TopLogprob(*shown(*top)) for top in likeliest[:count]])
