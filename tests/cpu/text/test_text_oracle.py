"""Ids, text and prompts against transformers: the real default model's vocabulary, and a small SentencePiece one.

transformers imports torch, so these are not among the unit tests.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from gguf_reference import tokenizer_from_gguf
from tokenizers import normalizers, pre_tokenizers
from transformers import LlamaTokenizer
from transformers.tokenization_utils_base import generate_merges

from holdfast.checkpoints import ModelFiles, locate
from holdfast.text.output.detokenizer import Detokenizer
from holdfast.text.tokenizer.tokenizer import Tokenizer

ODD_TEXTS = [
    "", " ", "   ", "\n", "\n\n\n", "\t x\t", "Hello, world!", "  leading and trailing  ", "don't I'LL we've",
    "1", "12", "3.14159", "a1b22c333", "x = [1, 2,  3]\n\n4.", "10,000  20,000", "١٢٣", "½²",
    "def f(x):\n    return x ** 2  # note\n\n\nclass A:\n\tpass\n", "{\"key\": [null, true]}", "<html>&amp;</html>",
    "日本語のテキスト。", "한국어 텍스트", "Ελληνικά Привет", "שלום עולם", "مرحبا بالعالم 123", "हिन्दी पाठ", "ไทย",
    "😀👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 \u0065\u0301", "\x00", "a\x00b", "\u200b\u200d\ufeff", "\u2028\u2029\x85", "\ufffd\ufffe",
    "naïve café ﬁ ß ẞ İ", "𝕳𝖊𝖑𝖑𝖔", "a" * 300, " " * 100, "ab " * 100, "\r\n\r\n",
    "<|im_start|>user\nhi<|im_end|>\n", "<|endoftext|><|im_start|>", "<|im_start", "im_end|>", "<repo_name>x<file_sep>",
    " <|im_end|> ", "▁", "Ġ", "<0x41>", "</s><s>",
]  # fmt: skip

CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "  é\n"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "{{ c }} {% d %}"},
    ],
]

TEMPLATES = [
    "{{ bos_token }}{% for m in messages %}\n  {% if not loop.first %}\n{{ m.role }}: {% endif %}\n"
    "{{ m.content | trim }}{{ eos_token }}\n{% endfor %}\n",
    "{%- set ns = namespace(n=0) -%}{%- for m in messages -%}{%- set ns.n = ns.n + 1 -%}{{ ns.n }}{{ m | tojson }}"
    "{%- generation -%}{{ m['content'] }}{%- endgeneration -%}"
    "{% if loop.index > 1 %}{% break %}{% endif %}{%- endfor -%}",
    "{% for m in messages %}{{ m.reasoning_content or '' }}{{ m.thinking or '' }}|{{ m.content.split(' ')[-1] }}"
    "{% endfor %}{{ tools | tojson(indent=2) if tools else 'none' }}{{ extra | default('x') }}{{ unk_token }}",
]


@pytest.fixture(scope="session")
def smollm2_files() -> ModelFiles:
    return locate("smollm2", progress=False)


@pytest.fixture(scope="session")
def smollm2(smollm2_files: ModelFiles) -> Tokenizer:
    return Tokenizer.from_files(smollm2_files)


@pytest.fixture(scope="session")
def smollm2_oracle(smollm2_files: ModelFiles) -> Any:
    oracle = tokenizer_from_gguf(smollm2_files.path)
    # Its reader does not know the header's pre-tokenizer "smollm", which cuts digits apart first, and falls back to
    # GPT-2's: after a run of blanks or newlines a digit would get other ids than the model was trained with.
    oracle.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return oracle


def test_odd_texts_get_the_same_ids(smollm2: Tokenizer, smollm2_oracle: Any) -> None:
    for text in ODD_TEXTS:
        assert smollm2.encode(text) == smollm2_oracle.encode(text), text
    assert smollm2.encode_batch(ODD_TEXTS) == [smollm2_oracle.encode(text) for text in ODD_TEXTS]


def test_random_ids_get_the_same_text(smollm2: Tokenizer, smollm2_oracle: Any) -> None:
    rng = random.Random(1)
    for skip in (True, False):
        for _ in range(100):
            ids = [rng.randrange(len(smollm2)) for _ in range(rng.randrange(1, 40))]
            expected = smollm2_oracle.decode(ids, skip_special_tokens=skip)
            assert smollm2.decode(ids, skip_special_tokens=skip) == expected
            stream = Detokenizer(smollm2, skip_special_tokens=skip)
            assert "".join(stream.push([token]) for token in ids) + stream.flush() == expected


def test_roles_and_sizes(smollm2: Tokenizer, smollm2_oracle: Any) -> None:
    assert smollm2.special_tokens_map == smollm2_oracle.special_tokens_map
    for name in ("bos_token_id", "eos_token_id", "unk_token_id", "pad_token_id", "vocab_size"):
        assert getattr(smollm2, name) == getattr(smollm2_oracle, name), name
    assert len(smollm2) == len(smollm2_oracle)
    assert smollm2.get_vocab() == smollm2_oracle.get_vocab()
    assert set(smollm2_oracle.all_special_ids) <= set(smollm2.all_special_ids)


@pytest.mark.parametrize("template", [None, *TEMPLATES])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("options", [
    {}, {"add_generation_prompt": True},
    {"tools": [{"type": "function", "function": {"name": "é<f>"}}], "extra": "given"},
])  # fmt: skip
def test_prompts_are_the_same(
    smollm2: Tokenizer, smollm2_oracle: Any, template: str | None, chat: list[dict[str, Any]], options: dict[str, Any]
) -> None:
    arguments = {"chat_template": template, "tokenize": False, **options}
    expected = smollm2_oracle.apply_chat_template(chat, **arguments)
    assert smollm2.apply_chat_template(chat, **arguments) == expected


@pytest.mark.parametrize("template", [None, TEMPLATES[0]])
@pytest.mark.parametrize("chat", CHATS)
def test_continued_prompts_are_the_same(
    smollm2: Tokenizer, smollm2_oracle: Any, template: str | None, chat: list[dict[str, Any]]
) -> None:
    arguments = {"chat_template": template, "tokenize": False, "continue_final_message": True}
    expected = smollm2_oracle.apply_chat_template(chat, **arguments)
    assert smollm2.apply_chat_template(chat, **arguments) == expected


def test_reasoning_is_offered_under_the_common_names(smollm2: Tokenizer, smollm2_oracle: Any) -> None:
    for name in ("reasoning_content", "thinking", "reasoning"):
        chat = [{"role": "assistant", "content": "b c", name: "because"}]
        arguments = {"chat_template": TEMPLATES[2], "tokenize": False}
        expected = smollm2_oracle.apply_chat_template(chat, **arguments)
        assert smollm2.apply_chat_template(chat, **arguments) == expected


def test_chat_ids_are_the_same(smollm2: Tokenizer, smollm2_oracle: Any) -> None:
    for chat in CHATS:
        expected = smollm2_oracle.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        assert smollm2.apply_chat_template(chat, add_generation_prompt=True) == expected


@pytest.fixture(scope="session")
def sentencepiece_pair() -> tuple[Tokenizer, Any]:
    """One vocabulary of random merges, as GGUF metadata and as transformers' own Llama tokenizer."""
    rng = random.Random(2)
    letters = list("▁abcdefgh.,!0123\n日本")
    pieces = dict.fromkeys(letters)
    while len(pieces) < 400:
        pieces[rng.choice(list(pieces)) + rng.choice(list(pieces))] = None
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(pieces))]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = generate_merges(vocabulary, dict(zip(tokens, scores, strict=True)))
    oracle = LlamaTokenizer(vocab=vocabulary, merges=merges)
    # As Llama 2's own tokenizer.json has it, and SentencePiece: the class puts no space before one that is there.
    spaces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    oracle.backend_tokenizer.normalizer = normalizers.Sequence(spaces)
    oracle.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([])
    return Tokenizer.from_gguf_metadata(metadata), oracle


def test_sentencepiece_gets_the_same_ids_and_text(sentencepiece_pair: tuple[Tokenizer, Any]) -> None:
    ours, oracle = sentencepiece_pair
    rng = random.Random(3)
    made = ["".join(rng.choice("abcdefgh .,!0123\n日本é😀") for _ in range(rng.randrange(40))) for _ in range(300)]
    for text in [*ODD_TEXTS, *made]:
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == oracle.encode(text, add_special_tokens=False), text
        assert ours.decode(ids) == oracle.decode(ids), text
        stream = Detokenizer(ours, skip_special_tokens=False)
        assert "".join(stream.push([token]) for token in ids) + stream.flush() == oracle.decode(ids), text
