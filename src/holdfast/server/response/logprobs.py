"""Log-probabilities encoded to JSON bytes once, in small pieces, shared by all outputs of a prompt: as Python objects
they would take three times the memory. Knows no HTTP and no engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from holdfast.records import Logprob

encode = msgspec.json.Encoder().encode

LOWEST_LOGPROB = -9999.0
"""JSON has no minus infinity; OpenAI and vLLM write this number."""
PIECE_ENTRIES = 512
"""Encoded between two turns of the others: 1 to 2 ms on an Arm core, and some 40 KB."""


class JsonArrayWriter:
    """The inside of a JSON array, growing: pieces that are never joined, so that they can be shared."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    def add(self, values: list[object]) -> None:
        if values:
            inside = encode(values)[1:-1]
            self.pieces.append(b"," + inside if self.pieces else inside)

    def behind(self, others: JsonArrayWriter | None = None) -> Iterator[bytes]:
        """These behind `others`, as one array."""
        yield b"["
        if others is not None:
            yield from others.pieces
            if others.pieces and self.pieces:
                yield b","
        yield from self.pieces
        yield b"]"


class CompletionLogprobsWriter:
    """OpenAI's log-probabilities of a completion: four lists side by side."""

    def __init__(self, name: Callable[[int], str] | None = None) -> None:
        """`name`: of a token, where it is not called by its text."""
        self._name = name
        self._tokens, self._logprobs, self._tops, self._starts = (
            JsonArrayWriter(),
            JsonArrayWriter(),
            JsonArrayWriter(),
            JsonArrayWriter(),
        )
        self._lengths: list[int] = []
        """Of the tokens, in characters: where they start is known when all before them are there."""
        self.chars = 0

    def add_first(self, token: str) -> None:
        """Of a prompt: nothing was known before it."""
        self._append([token], [None], [None])

    def add(self, entries: Iterable[dict[int, Logprob]]) -> None:
        tokens: list[str] = []
        logprobs: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        for entry in entries:
            chosen_id, chosen = next(iter(entry.items()))
            token, logprob = self._called(chosen_id, chosen), max(chosen.logprob, LOWEST_LOGPROB)
            shown = {token: logprob}  # First, as in vLLM; then from the likeliest on.
            for token_id, top in sorted(entry.items(), key=lambda item: -item[1].logprob):
                name = self._called(token_id, top)
                # Two ids may decode to the same text: the likelier one speaks for it.
                shown[name] = max(shown.get(name, LOWEST_LOGPROB), top.logprob)
            tokens.append(token)
            logprobs.append(logprob)
            tops.append(shown)
        self._append(tokens, logprobs, tops)

    def _called(self, token_id: int, candidate: Logprob) -> str:
        return (candidate.decoded_token or "") if self._name is None else self._name(token_id)

    def _append(self, tokens: list[str], logprobs: list[float | None], tops: list[dict[str, float] | None]) -> None:
        for members, values in ((self._tokens, tokens), (self._logprobs, logprobs), (self._tops, tops)):
            members.add([*values])
        lengths = [len(token) for token in tokens]
        self._starts.add([*_starts(lengths, self.chars)])
        self._lengths += lengths
        self.chars += sum(lengths)

    def behind(self, others: CompletionLogprobsWriter | None = None, start: int = 0) -> Iterator[bytes]:
        """As JSON, these behind `others`, or `start` characters behind the beginning."""
        before = CompletionLogprobsWriter() if others is None else others
        starts = JsonArrayWriter()
        starts.add([*_starts(self._lengths, start + before.chars)])
        for name, mine, its in (
            (b'{"tokens":', self._tokens, before._tokens),
            (b',"token_logprobs":', self._logprobs, before._logprobs),
            (b',"top_logprobs":', self._tops, before._tops),
            (b',"text_offset":', starts, before._starts),
        ):
            yield name
            yield from mine.behind(its)
        yield b"}"


def _starts(lengths: list[int], start: int) -> Iterator[int]:
    for length in lengths:
        yield start
        start += length


class PromptLogprobs:
    """Of one prompt, for all answers to it."""

    def __init__(self, *, listed: bool, echoed_first: str | None, name: Callable[[int], str] | None = None) -> None:
        """`listed`: as vLLM's `prompt_logprobs`. `echoed_first`: what the first token is called, where an echo shows
        them. `name`: see CompletionLogprobsWriter."""
        self.listed = JsonArrayWriter() if listed else None
        self.echoed: CompletionLogprobsWriter | None = None
        if echoed_first is not None:
            self.echoed = CompletionLogprobsWriter(name)
            self.echoed.add_first(echoed_first)

    async def take(self, entries: Sequence[dict[int, Logprob] | None]) -> None:
        """Piece by piece: others go on between two of them. A token that is told with its whole vocabulary is one by
        itself, and is written in a thread."""
        start = 0
        # What stands first may be the None of the first token; the others are as wide as the last.
        width = len(entries[-1] or ()) if entries else 0
        while start < len(entries):
            stop = start + max(1, PIECE_ENTRIES // max(1, width))
            if width > PIECE_ENTRIES:
                await asyncio.to_thread(self._add_between, entries, start, stop)
            else:
                self._add(entries[start:stop])
            start = stop
            if start < len(entries):
                await asyncio.sleep(0)

    def _add_between(self, entries: Sequence[dict[int, Logprob] | None], start: int, stop: int) -> None:
        self._add(entries[start:stop])

    def _add(self, piece: Sequence[dict[int, Logprob] | None]) -> None:
        if self.listed is not None:
            self.listed.add([entry and _writable(entry) for entry in piece])
        if self.echoed is not None:
            self.echoed.add(entry for entry in piece if entry is not None)


def _writable(entry: dict[int, Logprob]) -> dict[int, Logprob]:
    def finite(candidate: Logprob) -> Logprob:
        if candidate.logprob >= LOWEST_LOGPROB:
            return candidate
        return msgspec.structs.replace(candidate, logprob=LOWEST_LOGPROB)

    return {token: finite(candidate) for token, candidate in entry.items()}
