"""Tokenizes off the event loop, a few texts at a time, and truncates or refuses texts that are too long.

Exact counts, and what they mean with max_tokens, are checked in `engine/requests/admission.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

from holdfast.engine.requests.embedding import embedding_too_long
from holdfast.errors import ContextLengthError

if TYPE_CHECKING:
    from holdfast.text.tokenizer.tokenizer import Tokenizer

T = TypeVar("T")

OFF_LOOP_BYTES = 4096
"""Of a body; smaller ones are done before another thread would have begun."""
HEAD_CHARS_PER_TOKEN = 16
"""Several times what a token of any language stands for: a text with more is judged by its beginning first."""

_ANSWERED = ("messages", "prompt", "content")
"""Fields of prompts that get an answer; texts of others become vectors."""

THREADS = 2
"""A tokenizer needs some hundred times a text's own memory, so few work at once and the others wait."""


class TokenizePool:
    """Threads beside the event loop, started when they are first needed. Belongs to one application."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(max_workers=THREADS, thread_name_prefix="tokenize")

    async def run(self, work: Callable[[], T], size_bytes: int | None = None) -> T:
        """`size_bytes`: of a body; a small one is done at once, on the loop."""
        if size_bytes is not None and size_bytes <= OFF_LOOP_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        """Waits for nothing: what still runs has nobody left to answer."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def encode_within(
    context: int,
    tokenizer: Tokenizer,
    text: str,
    *,
    field: str,
    add_special_tokens: bool,
    truncation: Truncation | None = None,
) -> list[int]:
    """The ids of a text, unless its length, or its beginning alone, tells that it is far beyond the context."""
    if truncation is not None:
        return truncation.encode(tokenizer, text, add_special_tokens=add_special_tokens)
    check_text(context, tokenizer, text, field=field)
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)


def check_text(context: int, tokenizer: Tokenizer, text: str, *, field: str) -> None:
    """Refuses a text that is far beyond the context, without tokenizing all of it."""
    most = context * tokenizer.longest_token_chars
    if len(text) > most:
        raise _too_long(f"{len(text)} characters", f"at most {most} characters", context, field)
    head = context * HEAD_CHARS_PER_TOKEN
    if len(text) > head:
        count = len(tokenizer.encode(text[:head], add_special_tokens=False))
        # Where it is cut a beginning may have some tokens that the whole has not, but never twice as many.
        if count > 2 * context:
            raise _too_long(f"more than {count} tokens", None, context, field)


@dataclass(frozen=True, slots=True)
class Truncation:
    """What is kept of a prompt that is too long."""

    keep: int
    """Tokens, those that the tokenizer adds among them."""
    side: Literal["left", "right"] = "left"
    """Where tokens are dropped."""

    def of(self, ids: list[int]) -> list[int]:
        if len(ids) <= self.keep:
            return ids
        return ids[len(ids) - self.keep :] if self.side == "left" else ids[: self.keep]

    def encode(self, tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
        """The ids of a text. Of a long one no more is tokenized than it takes; what the tokenizer adds is kept."""
        chars = max(self.keep, 1) * HEAD_CHARS_PER_TOKEN
        while True:
            part = text[-chars:] if self.side == "left" else text[:chars]
            ids = tokenizer.encode(part, add_special_tokens=False)
            # Where it is cut a part may have tokens that the whole has not: they must not be among those kept.
            if len(part) == len(text) or len(ids) >= 2 * self.keep:
                break
            chars *= 4
        if not add_special_tokens:
            return self.of(ids)
        full = tokenizer.encode(part, add_special_tokens=True)
        if len(full) <= self.keep and len(part) == len(text):
            return full
        added = len(full) - len(ids)
        before = next((place for place in range(added + 1) if full[place : place + len(ids)] == ids), added)
        if added >= self.keep:
            return self.of(full)
        inner = Truncation(self.keep - added, self.side).of(ids)
        return [*full[:before], *inner, *full[before + len(ids) :]]


def check_ids(count: int, context: int, field: str) -> None:
    if count > context:
        raise _too_long(f"{count} tokens", None, context, field)


def _too_long(found: str, room: str | None, context: int, field: str) -> ContextLengthError:
    limit = f"{context} tokens" + (f", {room}" if room else "")
    # As `engine.requests.admission` says it, where the numbers are not exact.
    answered = (
        f"This model's maximum context length is {context} tokens. However, you requested {found} in the messages. "
        "Please reduce the length of the messages or completion."
    )
    return ContextLengthError(
        answered if field in _ANSWERED else embedding_too_long(found, context),
        needed=found,
        found=f"a context of {limit}",
        fix="shorten the prompt",
        field=field,
    )
