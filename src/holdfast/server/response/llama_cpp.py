"""How answers of llama.cpp's /completion look, whole and streamed, and what its clients have beside OpenAI's members.
Knows nothing of the engine or of HTTP."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from holdfast.records import AnswerDelta, Logprob, RequestTiming
from holdfast.server.request.parse import GenerationRequest
from holdfast.server.response.logprobs import LOWEST_LOGPROB, encode
from holdfast.server.response.serialize import ResponseChoice, ResponseFormatter, error_event
from holdfast.server.schema.llama_cpp import LlamaMembers, NativeOptions
from holdfast.server.schema.requests import Usage


class NativeShape:
    ping = b""

    def __init__(self, ask: GenerationRequest) -> None:
        assert isinstance(ask.options, NativeOptions)
        self._ask = ask
        self._native = ask.options

    def beginning(self, usage: Usage) -> bytes:
        return b""

    def opening(self, answer: ResponseChoice, usage: Usage | None) -> Iterable[bytes]:
        return ()

    def event(self, answer: ResponseChoice, delta: AnswerDelta, usage: Usage | None) -> bytes:
        """As llama.cpp has it, the event with `stop` has no text: what the last step brought is one of its own."""
        ended, events = delta.finish_reason is not None, b""
        if not ended or delta.text or delta.token_ids:
            told = self._part(answer, delta.text, delta.token_ids)
            if delta.logprobs is not None:
                told["completion_probabilities"] = self._probabilities(delta.logprobs)
            events = b"data: " + encode(told) + b"\n\n"
        if ended:
            events += b"data: " + encode(self._part(answer, "", []) | {"stop": True} | self._end(answer)) + b"\n\n"
        return events

    def _part(self, answer: ResponseChoice, text: str, token_ids: Sequence[int]) -> dict[str, Any]:
        return {
            "index": answer.index,
            "content": text,
            "tokens": token_ids,
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": len(answer.token_ids),
            "tokens_evaluated": self._evaluated(answer),
        }

    def ending(self, usage: Usage) -> bytes:
        """Nothing: llama.cpp's own streams end with the event that has `stop`."""
        return b""

    def failure(self, error: dict[str, Any]) -> bytes:
        return error_event(error)

    def keep(self, answer: ResponseChoice, delta: AnswerDelta) -> None:
        if delta.logprobs is not None:
            answer.tokens.add([*self._probabilities(delta.logprobs)])

    def body(self, answers: list[ResponseChoice], usage: Usage) -> list[bytes]:
        pieces: list[bytes] = []
        for place, answer in enumerate(answers):
            told = {
                "index": answer.index,
                "content": answer.text,
                "tokens": answer.token_ids if self._native.return_tokens else [],
                "id_slot": -1,
                "stop": True,
                "tokens_predicted": len(answer.token_ids),
                "tokens_evaluated": self._evaluated(answer),
                **self._end(answer),
            }
            pieces += [b"," if place else b"", encode(told)[:-1]]
            if self._ask.logprobs is not None:
                pieces += [b',"completion_probabilities":', *answer.tokens.behind()]
            pieces.append(b"}")
        return [b"[", *pieces, b"]"] if len(answers) > 1 else pieces

    def _evaluated(self, answer: ResponseChoice) -> int:
        return len(self._ask.prompts[answer.index // self._ask.params.n])

    def _end(self, answer: ResponseChoice) -> dict[str, Any]:
        word = answer.stop_reason if isinstance(answer.stop_reason, str) else ""
        kind = "limit" if answer.finish_reason == "length" else "word" if word else "eos"
        return {
            "model": self._ask.model,
            "generation_settings": generation_settings(self._ask),
            "prompt": self._native.prompt if not answer.index else "",
            "truncated": False,
            "stop_type": kind,
            "stopping_word": word,
            "tokens_cached": self._evaluated(answer) + len(answer.token_ids),
            "timings": timings(answer.timing, self._evaluated(answer), answer.cached_tokens, len(answer.token_ids)),
        }

    def _probabilities(self, entries: list[dict[int, Logprob]]) -> list[dict[str, Any]]:
        def one(token_id: int, candidate: Logprob) -> dict[str, Any]:
            text = candidate.decoded_token or ""
            logprob = max(candidate.logprob, LOWEST_LOGPROB)
            return {"id": token_id, "token": text, "bytes": list(text.encode()), "logprob": logprob}

        found = []
        for entry in entries:
            likeliest = sorted(entry.items(), key=lambda item: -item[1].logprob)[: self._ask.logprobs]
            found.append({**one(*next(iter(entry.items()))), "top_logprobs": [one(*top) for top in likeliest]})
        return found


class WithLlamaMembers:
    """A chat or a completion in OpenAI's shape, with the members that llama.cpp's clients have asked for. Times between
    tokens are of this process's clock; at the end of an answer they are the engine's."""

    def __init__(self, inner: ResponseFormatter, ask: GenerationRequest, members: LlamaMembers) -> None:
        self._inner = inner
        self._ask = ask
        self._members = members
        self._begun_s = self._first_s = time.monotonic()
        self._counts: dict[int, int] = {}
        self.ping = inner.ping

    def beginning(self, usage: Usage) -> bytes:
        return self._inner.beginning(usage)

    def opening(self, answer: ResponseChoice, usage: Usage | None) -> Iterable[bytes]:
        self._first_s = time.monotonic()
        if self._members.progress and not answer.index % self._ask.params.n:
            yield self._progress(answer, self._prompt_tokens(answer), self._first_s)
        yield from self._inner.opening(answer, usage)

    def event(self, answer: ResponseChoice, delta: AnswerDelta, usage: Usage | None) -> bytes:
        if delta.prompt_computed:
            return self._progress(answer, delta.prompt_computed, time.monotonic())
        self._count(answer, delta)
        event = self._inner.event(answer, delta, usage)
        if not event or not (self._members.timings or (answer.timing and self._members.prompt is not None)):
            return event
        return event.removesuffix(b"}\n\n") + self._told(answer, ended=answer.timing is not None) + b"}\n\n"

    def ending(self, usage: Usage) -> bytes:
        return self._inner.ending(usage)

    def failure(self, error: dict[str, Any]) -> bytes:
        return self._inner.failure(error)

    def keep(self, answer: ResponseChoice, delta: AnswerDelta) -> None:
        self._count(answer, delta)
        self._inner.keep(answer, delta)

    def body(self, answers: list[ResponseChoice], usage: Usage) -> list[bytes]:
        *pieces, last = self._inner.body(answers, usage)
        return [*pieces, last.removesuffix(b"}") + self._told(answers[0], ended=True) + b"}"]

    def _count(self, answer: ResponseChoice, delta: AnswerDelta) -> None:
        self._counts[answer.index] = self._counts.get(answer.index, 0) + len(delta.token_ids)

    def _told(self, answer: ResponseChoice, *, ended: bool) -> bytes:
        """Further members of an object that has some."""
        told: dict[str, Any] = {}
        if self._members.timings:
            timing = answer.timing or RequestTiming(
                arrival_s=self._begun_s,
                scheduled_s=self._begun_s,
                first_token_s=self._first_s,
                finished_s=time.monotonic(),
            )
            told["timings"] = timings(
                timing, self._prompt_tokens(answer), answer.cached_tokens, self._counts.get(answer.index, 0)
            )
        if self._members.prompt is not None and ended:
            told["__verbose"] = {"prompt": self._members.prompt, "generation_settings": generation_settings(self._ask)}
        return b"," + encode(told)[1:-1] if told else b""

    def _prompt_tokens(self, answer: ResponseChoice) -> int:
        return len(self._ask.prompts[answer.index // self._ask.params.n])

    def _progress(self, answer: ResponseChoice, processed: int, now_s: float) -> bytes:
        """After each step that computed a part of the prompt, and when all of it was."""
        total, chat = self._prompt_tokens(answer), self._ask.prompt_field == "messages"
        choice: dict[str, Any] = {"index": answer.index, **({"delta": {}} if chat else {"text": ""})}
        told = {
            "id": self._ask.answer_id,
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": self._ask.created,
            "model": self._ask.model,
            "choices": [{**choice, "finish_reason": None}],
            "prompt_progress": {
                "total": total,
                "cache": answer.cached_tokens,
                "processed": processed,
                "time_ms": (now_s - self._begun_s) * 1000,
            },
        }
        return b"data: " + encode(told) + b"\n\n"


def with_llama_members(
    shape: Callable[[GenerationRequest], ResponseFormatter],
) -> Callable[[GenerationRequest], ResponseFormatter]:
    """The same shape; where nobody asks for more it is untouched."""

    def made(ask: GenerationRequest) -> ResponseFormatter:
        inner = shape(ask)
        return inner if ask.members is None else WithLlamaMembers(inner, ask, ask.members)

    return made


def generation_settings(ask: GenerationRequest) -> dict[str, Any]:
    params = ask.params
    return {
        "n_predict": -1 if params.max_tokens is None else params.max_tokens,
        "seed": -1 if params.seed is None else params.seed,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repeat_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "ignore_eos": params.ignore_eos,
        "stop": params.stop_strings,
        "n_probs": ask.logprobs or 0,
        "stream": ask.stream,
    }


def timings(timing: RequestTiming | None, prompt: int, cached: int, predicted: int) -> dict[str, float]:
    """llama.cpp's: from the engine's own clock, the prompt until the first token, the rest from there on."""
    prompt_ms = predicted_ms = 0.0
    if timing is not None:
        prompt_ms = max(timing.first_token_s - timing.scheduled_s, 0.0) * 1000
        predicted_ms = max(timing.finished_s - timing.first_token_s, 0.0) * 1000
    computed = prompt - cached

    def per(amount: float, by: float) -> float:
        return amount / by if by else 0.0

    return {
        "cache_n": cached,
        "prompt_n": computed,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": per(prompt_ms, computed),
        "prompt_per_second": per(computed * 1000, prompt_ms),
        "predicted_n": predicted,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": per(predicted_ms, predicted),
        "predicted_per_second": per(predicted * 1000, predicted_ms),
    }
