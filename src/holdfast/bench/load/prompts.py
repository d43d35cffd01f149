"""Prompts of chosen lengths, and the bodies of requests around them.

    text       common English words, about one token each; how many make a token is found out from the server
    prefix     the same words before several prompts, for a prefix cache
    file       texts or messages as they are

A prompt depends on the seed and its number alone: the same in every run, and of two none begins alike, unless that is
asked for. Sends nothing.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import msgspec

from holdfast.bench.load.load import CHAT, LengthRange, Load

_TEXT = """
time people way water day man world life hand part child eye woman place work week case point company number
group problem fact house service friend father power hour game line end member law car city name team minute
idea body back parent face level office door health person art war history party result change morning reason
research girl guy food moment air teacher force order green river table light paper music market field stone
north south winter summer night road story book letter voice heart street money price
"""
WORDS = tuple(_TEXT.split())
HIGHEST_TOKEN_ID = 10_000
"""Below the vocabulary of any model that is served."""
LEAST_TOKENS = 1


class BenchRequest(msgspec.Struct, frozen=True):
    """One request to be sent."""

    number: int
    body: bytes
    output_tokens: int
    cancel_after: int | None = None
    """The client leaves after so many events."""
    adapter: str = ""
    turn: int = 0


class RequestMaker:
    """Of one load. `conversation` begins one; `ask` makes the request of its next turn."""

    def __init__(self, load: Load) -> None:
        self._load = load
        draws = [random.Random(f"{load.seed}-prefix-{at}") for at in range(load.prefixes if load.prefix_tokens else 0)]
        self._prefixes = [_words(draw, self._word_count(load.prefix_tokens)) for draw in draws]
        self._id_prefixes = [_ids(draw, load.prefix_tokens) for draw in draws] if load.token_ids else []

    def conversation(self, number: int, *, lengths: tuple[int, int] | None = None) -> BenchConversation:
        """`lengths`: of prompt and output, where a log says them."""
        return BenchConversation(self, self._load, number, lengths)

    def prefix(self, draw: random.Random) -> list[str]:
        if not self._prefixes or draw.random() >= self._load.prefix_share:
            return []
        return draw.choice(self._prefixes)

    def ids(self, draw: random.Random, tokens: int) -> list[int]:
        """A prompt of so many token ids; longer, where what it begins with is as long."""
        prefix: list[int] = []
        if self._id_prefixes and draw.random() < self._load.prefix_share:
            prefix = draw.choice(self._id_prefixes)
        return [*prefix, *_ids(draw, max(LEAST_TOKENS, tokens - len(prefix)))]

    def _word_count(self, tokens: int) -> int:
        return max(0, round(tokens * self._load.words_per_token))

    def words(self, draw: random.Random, tokens: int, prefix: Sequence[str]) -> list[str]:
        """A prompt of so many tokens, with its prefix and what the server adds."""
        left = self._word_count(tokens - round(self._load.template_tokens)) - len(prefix)
        return [*prefix, *_words(draw, max(LEAST_TOKENS, left))]


class BenchConversation:
    """What has been said so far, and what is asked next."""

    def __init__(self, maker: RequestMaker, load: Load, number: int, lengths: tuple[int, int] | None) -> None:
        self._maker, self._load, self._number, self._lengths = maker, load, number, lengths
        self._draw = random.Random(f"{load.seed}-{number}")
        self._messages: list[dict[str, Any]] = []
        self._turn = 0
        self._prepared: BenchRequest | None = None
        if load.adapters_in_turn:
            self._adapter = load.adapters[number % len(load.adapters)]
        else:
            self._adapter = self._draw.choice(load.adapters) if load.adapters else ""

    @property
    def turns(self) -> int:
        return self._load.turns

    def prepare(self) -> None:
        """Makes the next request before its time."""
        self._prepared = self._next()

    def ask(self) -> BenchRequest:
        prepared, self._prepared = self._prepared, None
        return prepared or self._next()

    def _next(self) -> BenchRequest:
        load, draw = self._load, self._draw
        lengths = self._lengths or (load.lengths[self._number % len(load.lengths)] if load.lengths else None)
        prompt_tokens, output_tokens = lengths or (drawn(draw, load.prompt), drawn(draw, load.output))
        body: dict[str, Any] = {"model": self._adapter or load.model, **self._prompt(prompt_tokens)}
        body |= {"max_tokens": output_tokens, "stream": True, "stream_options": {"include_usage": True}}
        if load.ignore_eos:
            body["ignore_eos"] = True
        if load.schema is not None and draw.random() < load.schema_share:
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": load.schema}}
            body.pop("ignore_eos", None)  # What is complete must end.
        cancel = draw.randint(1, max(1, output_tokens - 1)) if draw.random() < load.cancel_share else None
        request = BenchRequest(
            self._number * load.turns + self._turn,
            json.dumps(body | load.extra_body).encode(),
            output_tokens,
            cancel,
            self._adapter,
            self._turn,
        )
        self._turn += 1
        return request

    def answered(self, text: str) -> None:
        self._messages.append({"role": "assistant", "content": text})

    def _prompt(self, tokens: int) -> dict[str, Any]:
        load = self._load
        if load.prompts:
            given = load.prompts[self._number % len(load.prompts)]
            content = given if self._turn == 0 else " ".join(self._maker.words(self._draw, tokens, ()))
        elif load.token_ids and load.path != CHAT:
            return {"prompt": self._maker.ids(self._draw, tokens)}
        else:
            prefix = self._maker.prefix(self._draw) if self._turn == 0 else ()
            content = " ".join(self._maker.words(self._draw, tokens, prefix))
        if load.path != CHAT:
            return {"prompt": content if isinstance(content, str) else _as_text(content)}
        said = content if isinstance(content, list) else [{"role": "user", "content": content}]
        self._messages.extend(said)
        return {"messages": list(self._messages)}


def drawn(draw: random.Random, lengths: LengthRange) -> int:
    return draw.randint(lengths.low, lengths.high)


def _ids(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(100, HIGHEST_TOKEN_ID) for _ in range(count)]


def _words(draw: random.Random, count: int) -> list[str]:
    return draw.choices(WORDS, k=count)


def _as_text(messages: Sequence[dict[str, Any]]) -> str:
    return "\n\n".join(str(message.get("content", "")) for message in messages)
