"""What a fake answer says: scripts from prompt to tokens, and one answer spoken token by token. No clock, no queue."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

from holdfast.engine.fake_tokenizer import END, MESSAGE, VOCABULARY, ByteTokenizer
from holdfast.records import AnswerDelta, FinishReason, Logprob, SamplingParams

Script = Callable[[list[int]], Sequence[int]]
"""From a prompt's token ids to the answer's; the end token is added where the script ends."""


def echo(prompt_token_ids: list[int]) -> list[int]:
    """The bytes of the last message of a chat, or of the whole prompt where there is none."""
    start = 0
    for position, token_id in enumerate(prompt_token_ids):
        if token_id == MESSAGE:
            start = position + 1
    answer: list[int] = []
    for token_id in prompt_token_ids[start:]:
        if token_id >= END:
            break
        answer.append(token_id)
    return answer


def say(text: str) -> Script:
    """A script that always answers `text`, one byte a token."""
    token_ids = list(text.encode())
    return lambda prompt_token_ids: token_ids


class Answer:
    """One answer being spoken: turns scripted tokens into deltas and knows when it ends."""

    def __init__(self, index: int, token_ids: Sequence[int], params: SamplingParams):
        self.index = index
        self.params = params
        self.script = list(token_ids)
        self.count = 0
        self.text = ""
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def next_token(self) -> int:
        """Past its end the script starts again, for requests that ignore the end."""
        position = self.count % (len(self.script) + 1)
        return END if position == len(self.script) else self.script[position]

    def advance(self, context_left: int) -> AnswerDelta:
        token_id = self.next_token()
        self.count += 1
        piece = "" if token_id >= END else self.decoder.decode(bytes([token_id]))
        finish: FinishReason | None = None
        stop_reason: int | str | None = None
        if self.count > self.params.min_tokens:
            if token_id == END and not self.params.ignore_eos:
                finish = FinishReason.STOP
            elif token_id in self.params.stop_ids:
                finish, stop_reason = FinishReason.STOP, token_id
            else:
                piece, stop_reason = self._cut_at_stop(piece)
                finish = None if stop_reason is None else FinishReason.STOP
        if finish is None and self.count >= (self.params.max_tokens or context_left):
            finish = FinishReason.LENGTH
        self.text += piece
        logprobs = None if self.params.logprobs is None else [self._logprobs(token_id, self.params.logprobs)]
        return AnswerDelta(
            index=self.index,
            text=piece,
            token_ids=[token_id],
            logprobs=logprobs,
            finish_reason=finish,
            stop_reason=stop_reason,
        )

    def _cut_at_stop(self, piece: str) -> tuple[str, str | None]:
        """Nothing is held back, so of a stop string over several tokens the first ones are already said."""
        text = self.text + piece
        for stop in self.params.stop_strings:
            found = text.find(stop)
            if found >= 0:
                end = found + (len(stop) if self.params.include_stop_str_in_output else 0)
                return text[len(self.text) : end], stop
        return piece, None

    def _logprobs(self, token_id: int, count: int) -> dict[int, Logprob]:
        """The chosen token is always the likeliest; its runners-up are the next ids."""
        names = ByteTokenizer()
        entries = {}
        for rank in range(1, max(1, count) + 1):
            candidate = (token_id + rank - 1) % VOCABULARY
            entries[candidate] = Logprob(-0.25 * rank, rank, names.decode([candidate]))
        return entries
