"""Ids held against those of llama.cpp's own tokenizer, which lie in tests/data/tokenizers."""

from __future__ import annotations

import json
import unicodedata
from typing import Any

import pytest
from tokenizer_goldens import FOLDER, SMALL, TEXTS, small

from holdfast.checkpoints import from_path
from holdfast.checkpoints.sources import builtin
from holdfast.text.output.detokenizer import Detokenizer
from holdfast.text.tokenizer.pretokenizers import BYTE_LEVEL_SCHEMES
from holdfast.text.tokenizer.tokenizer import Tokenizer


def comparable(name: str, text: str) -> bool:
    """Where llama.cpp itself is like the families' own tokenizers."""
    if name.startswith("qwen2") and unicodedata.normalize("NFC", text) != text:
        return False  # it does not compose characters
    marked = any(unicodedata.category(character).startswith("M") for character in text)
    return not (name in ("tekken", "gpt-4o") and marked)  # it takes combining marks for no part of a word


def differing(tokenizer: Tokenizer, name: str, golden: dict[str, Any], without: str = "") -> list[str]:
    wrong = []
    for kind in ("marks", "plain"):
        found = tokenizer.encode_batch(TEXTS, add_special_tokens=False, split_special_tokens=kind == "plain")
        for index, (text, ours) in enumerate(zip(TEXTS, found, strict=True)):
            theirs = golden["marks"][index]
            if kind == "plain":
                theirs = golden["plain"].get(str(index), theirs)
            if ours != theirs and comparable(name, text) and not (without and without in text):
                wrong.append(f"{kind}: {text!r}: {ours} and not {theirs}")
    return wrong


@pytest.mark.parametrize("name", SMALL)
def test_small_vocabularies_give_the_same_ids(name: str) -> None:
    assert differing(small(name), name, SMALL[name]) == []


@pytest.mark.parametrize("name", SMALL)
def test_texts_come_back_also_in_a_stream(name: str) -> None:
    tokenizer = small(name)
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        stream = Detokenizer(tokenizer, skip_special_tokens=False)
        streamed = "".join(stream.push([token]) for token in ids) + stream.flush()
        assert streamed == tokenizer.decode(ids), text
        if name.startswith("sentencepiece"):
            if "<tool>" not in text:  # a space is put behind it too
                assert streamed == text.replace("▁", " "), text
        else:
            assert streamed == (unicodedata.normalize("NFC", text) if name == "qwen2" else text), text


def test_every_way_of_cutting_is_held_against_something() -> None:
    asked = {id(BYTE_LEVEL_SCHEMES[name]) for name in SMALL if name in BYTE_LEVEL_SCHEMES}
    assert {name for name, scheme in BYTE_LEVEL_SCHEMES.items() if id(scheme) not in asked} == {
        "deepseek-r1-qwen",
        "megrez",  # qwen2's cutting, without composing characters
    }


@pytest.mark.parametrize("name", [
    "smollm2",
    pytest.param("qwen2.5-coder-0.5b", marks=pytest.mark.long),
    pytest.param("gemma-3-270m", marks=pytest.mark.long),
])  # fmt: skip
def test_built_in_models_give_the_same_ids(name: str) -> None:
    entry = builtin.find(name)
    assert entry is not None
    if builtin.must_be_accepted(entry):
        pytest.skip(f"{name} is not cached, and its licence is not accepted: {builtin.ACCEPT_VARIABLE}")
    files = from_path(builtin.ensure(entry, progress=False), name=name)
    golden = json.loads((FOLDER / f"{name}.json").read_text())
    # llama.cpp takes "</s>" for an end wherever a vocabulary has it, though to these it is a tag of HTML.
    assert differing(Tokenizer.from_files(files), name, golden, without="</s>") == []
