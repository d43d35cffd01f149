"""One answer as it grows: from the engine's token ids to text, cut at a stop string, with readable logprobs.

Keeps what is needed to ask another engine to go on where one died.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import overload

import msgspec

from holdfast.records import AnswerDelta, EngineOutput, FinishReason, Logprob, Request, RequestTiming, TokenLogprobs
from holdfast.text.output.detokenizer import Detokenizer
from holdfast.text.tokenizer.tokenizer import Tokenizer


class OutputBuilder:
    def __init__(self, request: Request, index: int, tokenizer: Tokenizer | None) -> None:
        self.request = request
        self.index = index
        self.token_ids: list[int] = []
        self.finished = False
        self._named = bool(request.params.logprob_token_ids)
        self._prompt_entries = 0
        """That have gone out of its log-probabilities, None for the first token included."""
        self._timing: RequestTiming | None = None
        """As the first engine to give a token told it."""
        self._tokenizer = tokenizer
        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None and request.params.detokenize:
            self._detokenizer = Detokenizer(
                tokenizer,
                skip_special_tokens=request.params.skip_special_tokens,
                spaces_between_special_tokens=request.params.spaces_between_special_tokens,
                stop=request.params.stop_strings,
                include_stop=request.params.include_stop_str_in_output,
                min_tokens=request.params.min_tokens,
                prompt_tail=request.prompt_token_ids,
            )

    def resumed(self) -> Request:
        """The same request, with the tokens that have already gone out."""
        told = max(0, self._prompt_entries - 1)
        return msgspec.structs.replace(self.request, output_token_ids=list(self.token_ids), prompt_logprobs_sent=told)

    def take(self, output: EngineOutput) -> AnswerDelta:
        """Mutates the answer. When the delta is finished but the engine's output was not, the caller aborts the
        request in the engine: a stop string is seen only here."""
        tokens, reason = output.token_ids, output.finish_reason
        stop_reason: int | str | None = output.stop_token_id
        text = ""
        if self._detokenizer is not None:
            hidden = 1 if self._ends_with_hidden_token(output) else 0
            text = self._detokenizer.push(tokens[: len(tokens) - hidden])
            if self._detokenizer.stopped_by is not None:
                tokens = tokens[: self._detokenizer.tokens_used - len(self.token_ids)]
                reason, stop_reason = FinishReason.STOP, self._detokenizer.stopped_by
            elif reason is not None:
                text += self._detokenizer.flush()
                if self._detokenizer.stopped_by is not None:
                    reason, stop_reason = FinishReason.STOP, self._detokenizer.stopped_by
        self.token_ids.extend(tokens)
        self.finished = reason is not None
        return AnswerDelta(
            index=self.index,
            text=text,
            token_ids=tokens,
            logprobs=None
            if output.logprobs is None
            else [self._readable(entry, named=self._named) for entry in output.logprobs[: len(tokens)]],
            prompt_logprobs=self._of_prompt(output.prompt_logprobs or []),
            prompt_computed=output.prompt_computed,
            embedding=output.embedding,
            finish_reason=reason,
            stop_reason=stop_reason,
            cached_tokens=output.cached_tokens,
            fetched_tokens=output.fetched_tokens,
            timing=self._times(output),
        )

    def _of_prompt(self, entries: list[TokenLogprobs]) -> Sequence[dict[int, Logprob] | None] | None:
        """What was told of the prompt, with a None before all of it."""
        if self.request.params.prompt_logprobs is None or (self._prompt_entries and not entries):
            return None
        told: list[TokenLogprobs | None] = [*entries] if self._prompt_entries else [None, *entries]
        self._prompt_entries += len(told)
        return _Spelled(told, self._readable)

    def _times(self, output: EngineOutput) -> RequestTiming | None:
        """With the last delta only. What began in an engine that died has begun when it began; an answer that is ended
        here, by a stop string, ends now."""
        if self._timing is None:
            self._timing = output.timing
        if not self.finished or self._timing is None:
            return None
        ended = output.timing if output.finish_reason is not None else None
        finished_s = time.monotonic() if ended is None else ended.finished_s
        return msgspec.structs.replace(self._timing, finished_s=finished_s)

    def _ends_with_hidden_token(self, output: EngineOutput) -> bool:
        """The token that ended the answer is not part of its text, unless asked for."""
        if output.finish_reason is not FinishReason.STOP or not output.token_ids or output.complete:
            return False
        return not self.request.params.include_stop_str_in_output

    def _readable(self, entry: TokenLogprobs, *, named: bool = False) -> dict[int, Logprob]:
        """`named`: the others were asked for by their ids, and their ranks are not known."""
        readable: dict[int, Logprob] = {}
        for place, (token, logprob) in enumerate(zip(entry.token_ids, entry.logprobs, strict=True)):
            if token not in readable:
                rank = entry.rank if place == 0 else None if named else place
                readable[token] = Logprob(logprob=logprob, rank=rank, decoded_token=self._spelled(token))
        return readable

    def _spelled(self, token: int) -> str | None:
        """By itself. A prompt may ask for very many: where the bytes of tokens are known, they are looked up."""
        if self._tokenizer is None:
            return None
        pieces = self._tokenizer.pieces
        if pieces is None or not pieces.byte_level:
            return self._tokenizer.decode([token])
        return pieces.bytes_of(token).decode(errors="replace")


class _Spelled(Sequence[dict[int, Logprob] | None]):
    """Entries that are made readable one by one, when they are looked at: all at once they would keep others waiting
    and take several times the memory."""

    def __init__(
        self, entries: list[TokenLogprobs | None], readable: Callable[[TokenLogprobs], dict[int, Logprob]]
    ) -> None:
        self._entries = entries
        self._readable = readable

    def __len__(self) -> int:
        return len(self._entries)

    @overload
    def __getitem__(self, place: int) -> dict[int, Logprob] | None: ...
    @overload
    def __getitem__(self, place: slice) -> list[dict[int, Logprob] | None]: ...
    def __getitem__(self, place: int | slice) -> dict[int, Logprob] | list[dict[int, Logprob] | None] | None:
        if isinstance(place, slice):
            return [self._look(entry) for entry in self._entries[place]]
        return self._look(self._entries[place])

    def _look(self, entry: TokenLogprobs | None) -> dict[int, Logprob] | None:
        return None if entry is None else self._readable(entry)
