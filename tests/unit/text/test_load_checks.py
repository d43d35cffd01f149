"""Each warning appears for the fault it names, and a sound model gives none."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.checkpoints.files import ModelFiles
from holdfast.models.spec import ModelSpec, RopeSpec
from holdfast.text.load_checks import check_text
from holdfast.text.tokenizer.tokenizer import Tokenizer

FILES = ModelFiles(name="tiny", kind="folder", path=Path("tiny"), weights=(), format="none")
LLAMA3 = "{% for m in messages %}<|start_header_id|>{{ m.role }}\n{{ m.content }}<|eot_id|>{% endfor %}"
ENDOFTEXT = "{% for m in messages %}{{ m.content }}<|endoftext|>\n{% endfor %}"
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
)
INST = "{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"


@pytest.fixture
def spec(byte_level: Tokenizer) -> ModelSpec:
    return ModelSpec(
        family="llama",
        architecture="LlamaForCausalLM",
        vocab_size=len(byte_level),
        hidden_size=8,
        intermediate_size=8,
        heads=1,
        kv_heads=1,
        head_dim=8,
        layers=(),
        rope=RopeSpec(theta=1e4, dim=8),
        norm_eps=1e-5,
        max_position=64,
        tied_embeddings=True,
        bos_token_id=1,
        eos_token_ids=(2,),
    )


def codes(spec: ModelSpec, tokenizer: Tokenizer) -> list[str]:
    return [warning.code for warning in check_text(spec, tokenizer, FILES)]


def test_a_sound_model_gives_no_warning(spec: ModelSpec, byte_level: Tokenizer) -> None:
    assert codes(spec, byte_level) == []
    assert codes(dataclasses.replace(spec, vocab_size=spec.vocab_size + 64), byte_level) == []


@pytest.mark.parametrize(("change", "code", "words"), [
    ({"vocab_size": 100}, "HFW01", "100 rows"),
    ({"eos_token_ids": ()}, "HFW02", "has no EOS token"),
    ({"bos_token_id": 0}, "HFW03", "<|endoftext|>"),
])  # fmt: skip
def test_model_against_tokenizer(
    spec: ModelSpec, byte_level: Tokenizer, change: dict[str, Any], code: str, words: str
) -> None:
    (warning,) = check_text(dataclasses.replace(spec, **change), byte_level, FILES)
    assert warning.code == code
    assert words in warning.message
    assert warning.fix in str(warning)


def test_another_end_is_seen_in_tokenizer_and_template(spec: ModelSpec, byte_level: Tokenizer) -> None:
    assert codes(dataclasses.replace(spec, eos_token_ids=(0,)), byte_level) == ["HFW02", "HFW06"]


@pytest.mark.parametrize(("template", "expected"), [
    (None, ["HFW04"]), (LLAMA3, ["HFW05"]), (INST, ["HFW05"]), (ENDOFTEXT, ["HFW06"]), ("{% for %}", ["HFW07"]),
    ("{{ raise_exception('never') }}", ["HFW07"]), (NO_SYSTEM, []),
])  # fmt: skip
def test_templates(spec: ModelSpec, byte_level: Tokenizer, template: str | None, expected: list[str]) -> None:
    byte_level.chat_template = template
    assert codes(spec, byte_level) == expected


def test_plain_inst_is_at_home_in_sentencepiece_vocabularies(spec: ModelSpec, sentencepiece: Tokenizer) -> None:
    sentencepiece.chat_template = INST
    assert codes(dataclasses.replace(spec, vocab_size=1000), sentencepiece) == []


@pytest.mark.parametrize(("pre", "expected"), [("gpt-2", []), ("default", ["HFW08"]), (None, ["HFW08"])])
def test_a_header_that_does_not_say_how_text_is_cut(
    spec: ModelSpec, byte_level: Tokenizer, byte_level_metadata: dict[str, Any], pre: str | None, expected: list[str]
) -> None:
    metadata = {**byte_level_metadata, "tokenizer.ggml.pre": pre}
    if pre is None:
        del metadata["tokenizer.ggml.pre"]
    header: Any = SimpleNamespace(metadata=metadata)
    files = dataclasses.replace(FILES, header=header)
    assert [warning.code for warning in check_text(spec, byte_level, files)] == expected
