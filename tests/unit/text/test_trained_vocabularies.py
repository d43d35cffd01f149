"""Vocabularies trained here, written as GGUF files and read back: ids as the trained tokenizer itself gives them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_goldens import SMALL, TEXTS, small
from tokenizers import Tokenizer as Trained
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from holdfast.checkpoints import from_path
from holdfast.text.tokenizer.tokenizer import Tokenizer

TRAINING = [*TEXTS, "def f(x):\n    return x\n" * 3, "the quick brown fox jumps over the lazy dog " * 5] * 3


def read_back(path: Path, metadata: dict[str, Any]) -> Tokenizer:
    writer = gguf.GGUFWriter(str(path), "llama")
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return Tokenizer.from_files(from_path(path, name="trained"))


def tokens_of(trained: Trained) -> list[str]:
    vocabulary = trained.get_vocab()
    return sorted(vocabulary, key=vocabulary.__getitem__)


def merges_of(trained: Trained) -> list[str]:
    return [" ".join(merge) for merge in json.loads(trained.to_str())["model"]["merges"]]


def test_byte_level(tmp_path: Path) -> None:
    trained = Trained(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(
        TRAINING, trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    )
    tokens = tokens_of(trained)
    ours = read_back(
        tmp_path / "byte_level.gguf",
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [1] * len(tokens),
            "tokenizer.ggml.merges": merges_of(trained),
        },
    )
    for text in TEXTS:
        assert ours.encode(text) == trained.encode(text).ids, text


def test_sentencepiece(tmp_path: Path) -> None:
    trained = Trained(models.BPE())
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.train_from_iterator(TRAINING, trainers.BpeTrainer(vocab_size=900, show_progress=False, max_token_length=10))
    made = tokens_of(trained)
    tokens = [f"<0x{byte:02X}>" for byte in range(256)] + made
    ours = read_back(
        tmp_path / "sentencepiece.gguf",
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [6] * 256 + [1] * len(made),
            "tokenizer.ggml.scores": [0.0] * 256 + [-float(rank) for rank in range(len(made))],
        },
    )
    trained.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    for text in TEXTS:
        expected = trained.encode(text)
        ids = ours.encode(text)
        assert ours.convert_ids_to_tokens(ids) == expected.tokens, text
        assert ours.decode(ids) == trained.decode(expected.ids), text


@pytest.mark.parametrize("name", [name for name in SMALL if name != "qwen2"])
def test_any_text_comes_back(name: str) -> None:
    tokenizer = small(name)

    @settings(deadline=None, max_examples=examples(60))
    @given(text=st.text())
    def comes_back(text: str) -> None:
        ids = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert tokenizer.decode(ids) == (text.replace("▁", " ") if name.startswith("sentencepiece") else text)

    comes_back()
