"""Token ids of one answer turned into text as they arrive: whole characters only, cut exactly at stop strings.

Owns what may be shown now and what must wait. Does not know requests, scheduling or the wire.

    all text so far = shown | held: may begin a stop string | bytes of half a character
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from holdfast.text.output.stop_strings import StopMatcher

if TYPE_CHECKING:
    from holdfast.text.tokenizer.token_bytes import TokenPieces
    from holdfast.text.tokenizer.tokenizer import Tokenizer

_CONTEXT_TOKENS = 8
"""Of the prompt, enough to know the bytes of a character that the prompt leaves half written."""


class _Decoder(Protocol):
    def text_of(self, token_id: int) -> str:
        """What the token adds to the text: whole characters only."""

    def rest(self) -> str:
        """The half character left at the end, as U+FFFD."""


class Detokenizer:
    """Not thread-safe; one for each answer.

    Shown text equals `tokenizer.decode` of all ids (cut at the stop string) for byte-level vocabularies. For
    byte-fallback ones it does unless the model writes invalid UTF-8: there `decode` turns a whole run of bytes
    into U+FFFD, while a stream has already shown the run's good characters.

    `prompt_tail` is the prompt or its last tokens: with text before it, an answer keeps its leading space.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        prompt_tail: Sequence[int] = (),
    ) -> None:
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        spaced = skip_special_tokens or spaces_between_special_tokens
        self._unspaced = frozenset[int]() if spaced else tokenizer.special_ids
        """Special tokens, which are written as they are behind another one."""
        self._tokenizer, self._after_special = tokenizer, False
        self._decoder: _Decoder
        if tokenizer.pieces is not None:
            self._decoder = _PieceDecoder(tokenizer.pieces, self._shown_of(prompt_tail))
        else:
            self._decoder = _WindowDecoder(tokenizer, self._shown_of(prompt_tail))
        self._matcher = StopMatcher(stop) if stop else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._held = ""
        self.stopped_by: str | None = None
        """The stop string that ended the answer."""
        self.tokens_used = 0
        """Pushed tokens up to and with the one that completed the stop string; those behind it do not count."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is safe to show now. Once stopped, always empty."""
        shown: list[str] = []
        for token_id in token_ids:
            if self.stopped_by is not None:
                break
            self.tokens_used += 1
            if token_id in self._skipped:
                continue
            text = self._decoder.text_of(token_id)
            if self._unspaced:
                special = token_id in self._unspaced
                if special and self._after_special:
                    text = self._tokenizer.convert_ids_to_tokens(token_id) or ""
                self._after_special = special
            if text:
                shown.append(self._release(text))
        return "".join(shown)

    def flush(self) -> str:
        """At the end of the answer: everything that waited. Half characters become U+FFFD."""
        if self.stopped_by is not None:
            return ""
        text = self._release(self._decoder.rest())
        if self.stopped_by is None:
            text, self._held = text + self._held, ""
        return text

    def _release(self, text: str) -> str:
        if self._matcher is None:
            return text
        waiting = len(self._held)
        # While the answer is not longer than min_tokens, stop strings are passed over, as vLLM does.
        armed = not self._min_tokens or self.tokens_used > self._min_tokens
        found = self._matcher.feed(text, armed=armed)
        text = self._held + text
        if found is not None:
            self.stopped_by, self._held = found.stop, ""
            end = waiting + found.end
            return text[: end if self._include_stop else end - len(found.stop)]
        cut = len(text) - self._matcher.held
        self._held = text[cut:]
        return text[:cut]

    def _shown_of(self, prompt_tail: Sequence[int]) -> list[int]:
        """The last tokens of the prompt that make text, in order."""
        shown: list[int] = []
        for token_id in reversed(prompt_tail):
            if len(shown) == _CONTEXT_TOKENS:
                break
            if token_id not in self._skipped:
                shown.append(token_id)
        return shown[::-1]


class _PieceDecoder:
    """Bytes of each token into an incremental UTF-8 decoder."""

    def __init__(self, pieces: TokenPieces, context: Sequence[int]) -> None:
        self._bytes_of = pieces.bytes_of
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._half = False
        """Whether a character is half written."""
        self._cut_space = pieces.cuts_first_space
        for token_id in context:
            self.text_of(token_id)

    def text_of(self, token_id: int) -> str:
        piece = self._bytes_of(token_id)
        if not self._half:
            # Most tokens are whole characters behind whole characters: no state is needed, and none is made.
            try:
                return self._without_first_space(piece.decode())
            except UnicodeDecodeError:
                pass
        text = self._utf8.decode(piece)
        self._half = bool(self._utf8.getstate()[0])
        return self._without_first_space(text)

    def rest(self) -> str:
        return self._without_first_space(self._utf8.decode(b"", final=True))

    def _without_first_space(self, text: str) -> str:
        if self._cut_space and text:
            self._cut_space = False
            return text.removeprefix(" ")
        return text


class _WindowDecoder:
    """For decoders that only work on whole texts: decodes a short window again with each token and shows the growth.

    The window is cut where its text ended in a whole character, or after so many tokens that none can still be open.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._window = list(context)
        self._known = len(self._window)
        self._prefix = self._decode(self._window)

    def text_of(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        new_tokens = len(self._window) - self._known
        half = text.endswith("\ufffd") and new_tokens < _CONTEXT_TOKENS
        if half or len(text) <= len(self._prefix):
            return ""
        grown = text[len(self._prefix) :]
        self._window = self._window[self._known :]
        self._known = len(self._window)
        self._prefix = self._decode(self._window)
        return grown

    def rest(self) -> str:
        return self._decode(self._window)[len(self._prefix) :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids)
