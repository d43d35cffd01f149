"""From a raw answer to what is kept of it: when its tokens came, how many there were, or why it failed.

Parses the first and the last events of a stream alone. A role without text is no token, nor is what closes a stream;
an id without text is one.
"""

from __future__ import annotations

import itertools
import json
from array import array
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from holdfast.bench.client.wire import RawAnswer
from holdfast.bench.load.prompts import BenchRequest
from holdfast.units import shorten

OK = 200
SAID_CHARS = 200
_TEXTS = ("content", "reasoning_content", "reasoning", "tool_calls")
CANCELLED = "cancelled"
GIVEN_UP = ("abort", "error")
"""Reasons to finish with which vLLM, SGLang and we say that the server ended an answer before its end."""


class TimedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Times are on the clock that all processes of the machine share."""

    number: int
    intended_s: float
    """When it was to be sent; of a closed loop, when it was."""
    sent_s: float
    end_s: float
    """When its last event came, or it failed."""
    first_s: float | None = None
    """When its first token came."""
    gaps: bytes = b""
    """Seconds between events that carry tokens, as float32."""
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    output_tokens: int = 0
    counted: bool = False
    """By the server's usage; else its events were counted, as where a usage of 0 cannot be true."""
    error: str = ""
    """Its kind: `HTTP 503`, `timeout`, `reset`, `connect: ...`, `protocol`, `stream error`, `aborted`,
    `incomplete`."""
    said: str = ""
    """The server's words on it."""
    cancelled: bool = False
    adapter: str = ""
    turn: int = 0

    @property
    def good(self) -> bool:
        return not self.error and not self.cancelled


def read_answer(raw: RawAnswer, request: BenchRequest, *, intended_s: float) -> TimedAnswer:
    known: dict[str, Any] = {
        "number": request.number,
        "intended_s": intended_s,
        "sent_s": raw.sent_s,
        "end_s": raw.end_s,
        "adapter": request.adapter,
        "turn": request.turn,
    }
    if raw.failure and raw.failure != CANCELLED:
        return TimedAnswer(**known, error=raw.failure)
    if raw.status != OK:
        return TimedAnswer(**known, error=f"HTTP {raw.status}", said=_message(raw.body))
    if not raw.times:
        return TimedAnswer(**known, error="no stream", said=shorten(raw.body.decode("utf-8", "replace"), SAID_CHARS))
    (first, with_text), (trailing, closing) = _first_token(raw.head), _closing(raw.tail)
    if closing.error:
        return TimedAnswer(**known, error="stream error", said=closing.error)
    if closing.reason in GIVEN_UP:
        return TimedAnswer(**known, error="aborted", said=f"its finish_reason is {closing.reason}")
    last = len(raw.times) - 1 - trailing
    times = raw.times[first : last + 1]
    if not times:  # Nothing but an end: an answer of no tokens that can be seen.
        times = raw.times[-1:]
    cancelled = raw.failure == CANCELLED
    if not closing.finished and not cancelled:
        return TimedAnswer(**known, error="incomplete", said="the stream ended without a finish_reason or [DONE]")
    gaps = array("f", (later - earlier for earlier, later in itertools.pairwise(times)))
    usage = closing.usage
    told = _count(usage.get("completion_tokens"))
    believed = told is not None and (told > 0 or not with_text)
    details = usage.get("prompt_tokens_details") or {}
    return TimedAnswer(
        **known | {"end_s": raw.end_s if cancelled else max(times[-1], raw.sent_s)},
        first_s=times[0],
        gaps=gaps.tobytes(),
        prompt_tokens=_count(usage.get("prompt_tokens")) or 0,
        cached_tokens=_count(details.get("cached_tokens")) if isinstance(details, dict) else None,
        output_tokens=told if told is not None and believed else len(times),
        counted=believed,
        cancelled=cancelled,
    )


def text_of(raw: RawAnswer) -> str:
    """Of a stream that was kept whole."""
    return "".join(_text(event) for event in _events(raw.pieces) if event is not None)


class _Closing(msgspec.Struct):
    usage: dict[str, Any] = {}
    finished: bool = False
    reason: str = ""
    """Its finish_reason."""
    error: str = ""


def _first_token(head: Iterable[bytes]) -> tuple[int, bool]:
    """The place of the first event with text, and True; where none of these has any, of the first with a choice."""
    choice = 0
    for at, event in enumerate(_events(head)):
        if event is not None and _has_token(event):
            return at, True
        choice += at == choice and not (event or {}).get("choices")
    return choice, False


def _closing(tail: Iterable[bytes]) -> tuple[int, _Closing]:
    """How many events at the end carry no token, and what they say."""
    found, trailing = _Closing(), 0
    for event in reversed(list(_events(tail))):
        if event is None:
            found.finished = True
        else:
            if event.get("error"):
                found.error = _message(json.dumps(event).encode())
            if isinstance(event.get("usage"), dict) and not found.usage:
                found.usage = event["usage"]
            choice = _choice(event)
            found.reason = found.reason or str(choice.get("finish_reason") or "")
            found.finished = found.finished or bool(found.reason)
            if _has_token(event) or (choice and not choice.get("finish_reason")):
                break
        trailing += 1
    return trailing, found


def _events(pieces: Iterable[bytes]) -> Iterator[dict[str, Any] | None]:
    """None: [DONE]. What does not parse counts as an event that says nothing."""
    for piece in pieces:
        for line in piece.split(b"\n"):
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data == b"[DONE]":
                    yield None
                    continue
                try:
                    event = json.loads(data)
                except (ValueError, RecursionError):
                    event = {}
                yield event if isinstance(event, dict) else {}


def _choice(event: dict[str, Any]) -> dict[str, Any]:
    choices = event.get("choices")
    found = choices[0] if isinstance(choices, list) and choices else {}
    return found if isinstance(found, dict) else {}


def _has_token(event: dict[str, Any]) -> bool:
    """As text, or as an id from a server that has no tokenizer."""
    return bool(_text(event) or _choice(event).get("token_ids"))


def _text(event: dict[str, Any]) -> str:
    choice = _choice(event)
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return str(choice.get("text") or "")
    return "".join(str(delta[name]) for name in _TEXTS if delta.get(name))


def _message(body: bytes) -> str:
    try:
        error = json.loads(body)["error"]
        return shorten(str(error["message"] if isinstance(error, dict) else error), SAID_CHARS)
    except (ValueError, RecursionError, LookupError, TypeError):
        return shorten(body.decode("utf-8", "replace"), SAID_CHARS)


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
