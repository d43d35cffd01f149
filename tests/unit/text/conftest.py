"""Small vocabularies in GGUF's own terms, one of each scheme: every byte, a few words, marks with a role."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.text.tokenizer.tokenizer import Tokenizer

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _byte_alphabet() -> list[str]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    spelled = {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}
    return [spelled[byte] for byte in range(256)]


@pytest.fixture
def byte_level_metadata() -> dict[str, Any]:
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġw o", "r l", "Ġwo rl", "Ġworl d", "Ġ Ġ", "1 2", "a b", "ab c"]
    words = [merge.replace(" ", "") for merge in merges]
    tokens = marks + _byte_alphabet() + words + ["<tool>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (256 + len(words)) + [4],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": CHATML,
    }


@pytest.fixture
def sentencepiece_metadata() -> dict[str, Any]:
    words = ["▁", "▁h", "▁he", "ll", "▁hell", "▁hello", "▁w", "▁wo", "rld", "▁world", "a", "b", "ab", "▁ab", "ld"]
    letters = [letter for letter in "helowrdcxyz.,!日本" if letter not in words]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, *letters]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(len(words) + len(letters))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(words) + len(letters)),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


@pytest.fixture
def byte_level(byte_level_metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf_metadata(byte_level_metadata)


@pytest.fixture
def sentencepiece(sentencepiece_metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf_metadata(sentencepiece_metadata)
