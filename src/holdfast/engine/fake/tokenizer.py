"""The fake engine's tokenizer: a byte is a token, plus three marks. Same methods as `holdfast.text`'s, no files."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

END, MESSAGE, ANSWER = 256, 257, 258
MARKS = {"<|end|>": END, "<|message|>": MESSAGE, "<|answer|>": ANSWER}
VOCABULARY = 259

_MARK = re.compile("(" + "|".join(re.escape(mark) for mark in MARKS) + ")")
_NAMES = {token_id: mark for mark, token_id in MARKS.items()}


class _Pieces:
    """As `text.tokenizer.token_bytes.TokenPieces`, so that a fake answer takes the way of a real one to its text."""

    byte_level = True
    cuts_first_space = False

    def __init__(self) -> None:
        self._bytes = [*(bytes([byte]) for byte in range(END)), *(mark.encode() for mark in MARKS)]

    def bytes_of(self, token_id: int) -> bytes:
        return self._bytes[token_id] if token_id < VOCABULARY else b""

    def spell(self, token_id: int) -> bytes:
        return self.bytes_of(token_id)


class ByteTokenizer:
    eos_token = "<|end|>"
    eos_token_id = END
    vocab_size = VOCABULARY
    ids_end = VOCABULARY
    all_special_ids = tuple(MARKS.values())
    special_ids = frozenset(all_special_ids)
    pieces = _Pieces()
    chat_template = "built in"
    longest_token_chars = max(map(len, MARKS))

    def __len__(self) -> int:
        return VOCABULARY

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        token_ids: list[int] = []
        for piece in _MARK.split(text):
            if piece in MARKS:
                token_ids.append(MARKS[piece])
            else:
                token_ids.extend(piece.encode())
        return token_ids

    def encode_pair(
        self,
        first: str,
        second: str,
        chat_template: str | None = None,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[int]:
        if chat_template is not None:
            messages = [{"role": "query", "content": first}, {"role": "document", "content": second}]
            return list(self.apply_chat_template(messages, chat_template=chat_template, **variables))  # type: ignore[arg-type]
        return [*self.encode(first), *self.encode(second)]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        raw = bytearray()
        for token_id in ids:
            if token_id < END:
                raw.append(token_id)
            elif not skip_special_tokens:
                raw.extend(_NAMES[token_id].encode())
        return raw.decode(errors="replace")

    def bytes_of(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < END else _NAMES[token_id].encode()

    def is_special(self, token_id: int) -> bool:
        return token_id >= END

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> str | list[str]:
        if isinstance(ids, int):
            return _NAMES.get(ids) or f"<0x{ids:02X}>"
        return [_NAMES.get(token_id) or f"<0x{token_id:02X}>" for token_id in ids]

    def convert_tokens_to_ids(self, tokens: str) -> int | None:
        return MARKS.get(tokens)

    def template_variables(self, given: Mapping[str, Any]) -> dict[str, Any]:
        return {"eos_token": self.eos_token, **given}

    def template_source(self, given: str | None = None, tools: object = None) -> str:
        return given or self.chat_template

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        chat_template: str | None = None,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str | list[int]:
        parts = [f"{message['role']}<|message|>{_text(message.get('content'))}<|end|>" for message in messages]
        if continue_final_message and parts:
            parts[-1] = parts[-1].removesuffix("<|end|>")
        if add_generation_prompt:
            parts.append("assistant<|answer|>")
        text = "".join(parts)
        return self.encode(text) if tokenize else text


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content or ())
