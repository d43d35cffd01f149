"""What a fake answer says: scripts from prompt to tokens, and one answer spoken token by token. No clock, no queue,
no text."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence

from holdfast.engine.fake.tokenizer import END, MESSAGE, VOCABULARY
from holdfast.records import EngineOutput, FinishReason, Request, RequestTiming, TokenLogprobs

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


EMBEDDING_SIZE = 8


def fake_vector(prompt_token_ids: list[int], labels: int = 0) -> bytes:
    """Of length 1, and nearly always another one for another prompt. `labels`: as many numbers in its place."""
    size = labels or EMBEDDING_SIZE
    numbers = [float(1 + (sum(prompt_token_ids) * (place + 1)) % 97) for place in range(size)]
    length = 97.0 if labels else math.hypot(*numbers)
    return struct.pack(f"<{size}f", *(number / length for number in numbers))


class Speaker:
    """One answer being spoken, as the news an engine would give of it: token by token, and when its ids end it. Stop
    strings are not its business."""

    def __init__(self, request: Request, token_ids: Sequence[int], max_model_len: int) -> None:
        self.count = 0
        """Tokens spoken."""
        self._request = request
        self._script = [*token_ids, END]
        self._most = request.params.max_tokens or max_model_len - len(request.prompt_token_ids)

    def next_output(self, cached_tokens: int, timing: RequestTiming) -> EngineOutput:
        """Past its end the script starts again, for requests that ignore the end."""
        params = self._request.params
        token_id = self._script[self.count % len(self._script)]
        self.count += 1
        finish: FinishReason | None = None
        stop_id: int | None = None
        if self.count > params.min_tokens:
            if token_id == END and not params.ignore_eos:
                finish = FinishReason.STOP
            elif token_id in params.stop_ids:
                finish, stop_id = FinishReason.STOP, token_id
        if finish is None and self.count >= self._most:
            finish = FinishReason.LENGTH
        return EngineOutput(
            request_id=self._request.request_id,
            token_ids=[token_id],
            logprobs=None if params.logprobs is None else [_logprobs(token_id, params.logprobs)],
            prompt_logprobs=self._of_prompt() if self.count == 1 else None,
            finish_reason=finish,
            stop_token_id=stop_id,
            cached_tokens=cached_tokens,
            timing=timing,
        )

    def _of_prompt(self) -> list[TokenLogprobs] | None:
        count = self._request.params.prompt_logprobs
        if count is None:
            return None
        return [_logprobs(token_id, count) for token_id in self._request.prompt_token_ids[1:]]


def _logprobs(token_id: int, count: int) -> TokenLogprobs:
    """The chosen token is always the likeliest; its runners-up are the next ids."""
    likeliest = range(max(1, count))
    return TokenLogprobs(
        token_ids=[token_id, *((token_id + place) % VOCABULARY for place in likeliest)],
        logprobs=[-0.25, *(-0.25 * (place + 1) for place in likeliest)],
        rank=1,
    )
