"""Tokenizers built from GGUF metadata and from tokenizer.json: ids, roles, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from holdfast.checkpoints.files import ModelFiles
from holdfast.errors import CheckpointError, RequestError, UnsupportedOptionError
from holdfast.text.tokenizer.pretokenizers import BYTE_LEVEL_SCHEMES
from holdfast.text.tokenizer.tokenizer import Tokenizer

SHARED = settings(
    deadline=None, max_examples=examples(150), suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@SHARED
@given(text=st.text())
def test_byte_level_round_trip(byte_level: Tokenizer, text: str) -> None:
    assert byte_level.decode(byte_level.encode(text)) == text


@SHARED
@given(text=st.text())
def test_sentencepiece_round_trip(sentencepiece: Tokenizer, text: str) -> None:
    # ▁ is how a space is spelled, so it comes back as one.
    expected = text.replace("▁", " ").replace("<unk>", "")
    assert sentencepiece.decode(sentencepiece.encode(text), skip_special_tokens=True) == expected


def test_merges_follow_scores(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("hello world ab", add_special_tokens=False)
    assert sentencepiece.convert_ids_to_tokens(ids) == ["▁hello", "▁world", "▁ab"]


@pytest.mark.parametrize(("key", "value", "first", "last"), [
    ("tokenizer.ggml.add_bos_token", False, "▁hello", "▁hello"),
    ("tokenizer.ggml.add_bos_token", True, "<s>", "▁hello"),
    ("tokenizer.ggml.add_eos_token", True, "<s>", "</s>"),
    ("tokenizer.ggml.add_space_prefix", False, "<s>", "o"),
])  # fmt: skip
def test_header_settings_are_honoured(
    sentencepiece_metadata: dict[str, Any], key: str, value: bool, first: str, last: str
) -> None:
    tokenizer = Tokenizer.from_gguf_metadata(sentencepiece_metadata | {key: value})
    tokens = tokenizer.convert_ids_to_tokens(tokenizer.encode("hello"))
    assert (tokens[0], tokens[-1]) == (first, last)
    assert tokenizer.decode(tokenizer.encode("hello"), skip_special_tokens=True) == "hello"


@pytest.mark.parametrize(("pre", "text", "pieces"), [
    ("gpt-2", "a12  34", ["a", "12", " ", " 34"]),
    ("default", "a1234  $5!?b's", ["a", "123", "4", "  ", "$", "5", "!?", "b", "'", "s"]),
    ("smollm", "a12  34", ["a", "1", "2", "  ", "3", "4"]),
    ("llama-bpe", "a12345 I'M", ["a", "123", "45", " I", "'M"]),
    ("qwen2", "a12\n\n3", ["a", "1", "2", "\n\n", "3"]),
    ("tekken", "camelCase's 12", ["camel", "Case", "'s", " ", "1", "2"]),
    ("gpt-4o", "camelCase's 1234", ["camel", "Case's", " ", "123", "4"]),
    ("starcoder", "x1 = 23", ["x", "1", " =", " ", "2", "3"]),
    ("dbrx", "a12345 I'M", ["a", "123", "45", " I", "'M"]),
])  # fmt: skip
def test_text_is_cut_as_the_family_does(pre: str, text: str, pieces: list[str]) -> None:
    splitter: pre_tokenizers.PreTokenizer = BYTE_LEVEL_SCHEMES[pre].split()
    found = [piece.replace("Ġ", " ").replace("Ċ", "\n") for piece, _ in splitter.pre_tokenize_str(text)]
    assert found == pieces


def test_llama3_takes_whole_pieces_and_begins_with_bos(byte_level_metadata: dict[str, Any]) -> None:
    byte_level_metadata["tokenizer.ggml.tokens"].append("xyz")
    byte_level_metadata["tokenizer.ggml.token_type"].append(1)
    plain = Tokenizer.from_gguf_metadata(byte_level_metadata)
    llama3 = Tokenizer.from_gguf_metadata(byte_level_metadata | {"tokenizer.ggml.pre": "llama-bpe"})
    assert plain.convert_ids_to_tokens(plain.encode("xyz")) == ["x", "y", "z"]
    assert llama3.convert_ids_to_tokens(llama3.encode("xyz")) == ["<|im_start|>", "xyz"]


def test_marks_are_single_tokens(byte_level: Tokenizer) -> None:
    assert byte_level.encode("<|im_start|>hello<tool>") == [1, *byte_level.encode("hello"), len(byte_level) - 1]
    assert byte_level.all_special_ids == [0, 1, 2]
    assert byte_level.is_special(1)
    assert not byte_level.is_special(len(byte_level) - 1)


def test_marks_stay_text_when_asked(byte_level: Tokenizer, sentencepiece: Tokenizer) -> None:
    for tokenizer, text in ((byte_level, "<|im_start|>hello<|im_end|>"), (sentencepiece, "a<s>b</s><unk>")):
        ids = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert not set(ids) & tokenizer.special_ids
        assert tokenizer.decode(ids) == text
        assert set(tokenizer.encode(text, add_special_tokens=False)) & tokenizer.special_ids


def test_no_merge_makes_a_mark(sentencepiece_metadata: dict[str, Any]) -> None:
    tokens, kinds = sentencepiece_metadata["tokenizer.ggml.tokens"], sentencepiece_metadata["tokenizer.ggml.token_type"]
    for token, kind in (("<", 1), (">", 1), ("s", 1), ("<s", 1), ("0", 1), ("4", 1), ("1", 1), ("<0x41", 1), ("<0", 1)):
        tokens.append(token)
        kinds.append(kind)
        sentencepiece_metadata["tokenizer.ggml.scores"].append(0.0)
    tokenizer = Tokenizer.from_gguf_metadata(sentencepiece_metadata)
    ids = tokenizer.encode("<s>", add_special_tokens=False, split_special_tokens=True)
    assert tokenizer.convert_ids_to_tokens(ids) == ["▁", "<s", ">"]
    assert tokenizer.decode(tokenizer.encode("<0x41>", add_special_tokens=False)) == "<0x41>"


def test_marks_of_phi3_swallow_the_space_behind_them(sentencepiece_metadata: dict[str, Any]) -> None:
    plain = Tokenizer.from_gguf_metadata(sentencepiece_metadata | {"general.architecture": "llama"})
    phi3 = Tokenizer.from_gguf_metadata(sentencepiece_metadata | {"general.architecture": "phi3"})
    for text, same in (("</s>\n\nab", False), ("<s>\n\nab", True)):
        assert (plain.encode(text) == phi3.encode(text)) is same
    assert phi3.encode("</s>\n\nab") == phi3.encode("</s>ab")


def test_names_of_transformers(byte_level: Tokenizer) -> None:
    assert (byte_level.bos_token, byte_level.bos_token_id) == ("<|im_start|>", 1)
    assert (byte_level.eos_token, byte_level.eos_token_id) == ("<|im_end|>", 2)
    assert (byte_level.pad_token, byte_level.pad_token_id) == (None, None)
    assert byte_level.vocab_size == len(byte_level) == len(byte_level.get_vocab()) == byte_level.ids_end
    assert byte_level("hello") == {"input_ids": byte_level.encode("hello"), "attention_mask": [1]}
    assert byte_level(["hello", "a b"])["input_ids"] == [byte_level.encode("hello"), byte_level.encode("a b")]
    assert byte_level.convert_tokens_to_ids(["<|im_end|>", "no such token"]) == [2, None]
    assert byte_level.decode(2) == "<|im_end|>"
    assert byte_level.batch_decode([[2], [1]], skip_special_tokens=True) == ["", ""]


@pytest.mark.parametrize("text", ["\ud800", "half \udc00 of one"])
def test_half_of_a_surrogate_pair_is_refused(byte_level: Tokenizer, text: str) -> None:
    with pytest.raises(RequestError, match="surrogate"):
        byte_level.encode(text)


def test_wrong_types_are_refused(byte_level: Tokenizer) -> None:
    with pytest.raises(RequestError, match="string"):
        byte_level.encode(5)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="token ids"):
        byte_level.decode([-1])


@pytest.mark.parametrize(("change", "words"), [
    ({"tokenizer.ggml.model": "t5"}, "t5"),
    ({"tokenizer.ggml.model": None}, "None"),
    ({"tokenizer.ggml.pre": "bloom"}, "bloom"),
    ({"tokenizer.ggml.pre": 7}, "7"),
    ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens"),
    ({"tokenizer.ggml.tokens": [1, 2, 3]}, "wrong type"),
    ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges"),
    ({"tokenizer.ggml.merges": ["h"]}, "an invalid merge"),
    ({"tokenizer.ggml.merges": ["Q nothere"]}, "no tokenizer can be built"),
    ({"tokenizer.ggml.token_type": [3]}, "not as long"),
    ({"tokenizer.ggml.eos_token_id": 10**9}, "eos_token_id"),
    ({"tokenizer.ggml.bos_token_id": -1}, "bos_token_id"),
])  # fmt: skip
def test_bad_headers_are_refused_by_name(
    byte_level_metadata: dict[str, Any], change: dict[str, Any], words: str
) -> None:
    metadata = {key: value for key, value in (byte_level_metadata | change).items() if value is not None}
    with pytest.raises(CheckpointError, match=words) as caught:
        Tokenizer.from_gguf_metadata(metadata)
    unsupported = {"tokenizer.ggml.model", "tokenizer.ggml.pre"} & change.keys()
    assert caught.value.code == ("HF234" if unsupported else "HF230")


@pytest.fixture
def folder(tmp_path: Path, byte_level: Tokenizer) -> Path:
    byte_level.backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def files_of(folder: Path, **fields: Any) -> ModelFiles:
    return ModelFiles(name="tiny", kind="folder", path=folder, weights=(), format="none", **fields)


def test_tokenizer_json_is_taken_as_it_is(folder: Path, byte_level: Tokenizer) -> None:
    config = {"eos_token": "<|im_end|>", "bos_token": {"content": "<|im_start|>"}, "chat_template": "{{ bos_token }}!"}
    tokenizer = Tokenizer.from_files(
        files_of(folder, tokenizer_json=folder / "tokenizer.json", tokenizer_config=config)
    )
    assert tokenizer.encode("hello 12") == byte_level.encode("hello 12")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False) == "<|im_start|>!"


def test_tokenizer_config_says_what_stands_around_a_text(folder: Path) -> None:
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "add_bos_token": True, "add_eos_token": True}
    tokenizer = Tokenizer.from_tokenizer_json(folder / "tokenizer.json", config)
    assert tokenizer.decode(tokenizer.encode("hello")) == "<|im_start|>hello<|im_end|>"
    assert tokenizer.decode(tokenizer.encode("hello", add_special_tokens=False)) == "hello"


def test_padding_and_truncation_in_the_file_are_ignored(folder: Path) -> None:
    path = folder / "tokenizer.json"
    stored = json.loads(path.read_text())
    stored["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(stored))
    assert len(Tokenizer.from_tokenizer_json(path).encode("x y z")) == 5


def test_named_templates(folder: Path) -> None:
    config = {"chat_template": [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]}
    tokenizer = Tokenizer.from_tokenizer_json(folder / "tokenizer.json", config)
    message = [{"role": "user", "content": ""}]
    assert tokenizer.apply_chat_template(message, tokenize=False) == "D"
    assert tokenizer.apply_chat_template(message, tokenize=False, tools=[{}]) == "T"
    tokenizer.chat_template = "own"
    assert tokenizer.apply_chat_template(message, tokenize=False, tools=[{}]) == "own"


def test_no_tokenizer_and_torn_tokenizer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no tokenizer"):
        Tokenizer.from_files(files_of(tmp_path))
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "mod')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.from_files(files_of(tmp_path, tokenizer_json=tmp_path / "tokenizer.json"))


def test_chat_as_ids_text_and_batch(byte_level: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hello"}]
    text = byte_level.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    ids = byte_level.apply_chat_template(messages, add_generation_prompt=True)
    assert ids == byte_level.encode(text, add_special_tokens=False)
    assert byte_level.apply_chat_template([messages, messages], add_generation_prompt=True) == [ids, ids]
    assert byte_level.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"] == ids
    with pytest.raises(UnsupportedOptionError, match="return_tensors"):
        byte_level.apply_chat_template(messages, return_tensors="pt")


def test_without_a_template_the_fix_is_named(sentencepiece: Tokenizer) -> None:
    with pytest.raises(RequestError) as caught:
        sentencepiece.apply_chat_template([{"role": "user", "content": "hello"}])
    assert caught.value.code == "HF303"
    assert "--chat-template" in str(caught.value)


def test_one_text_goes_the_way_that_lets_other_threads_run(byte_level: Tokenizer) -> None:
    class Watched:
        """tokenizers' encode() holds the interpreter's lock until it is done; the batch form does not."""

        def encode(self, *_: Any, **__: Any) -> Any:
            raise AssertionError("the form that makes every other thread wait")

        def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
            return byte_level.backend.encode_batch_fast(texts, **options)

    expected = byte_level.encode("hello world")
    watched = Tokenizer(byte_level.backend)
    watched._backend = Watched()  # type: ignore[assignment]
    assert watched.encode("hello world") == expected


def test_length_of_a_text_bounds_its_tokens(
    byte_level: Tokenizer, sentencepiece: Tokenizer, byte_level_metadata: dict[str, Any]
) -> None:
    assert byte_level.longest_token_chars == len("<|endoftext|>")
    composed = Tokenizer.from_gguf_metadata(byte_level_metadata | {"tokenizer.ggml.pre": "qwen2"})
    assert composed.longest_token_chars == 4 * len("<|endoftext|>")
    assert sentencepiece.longest_token_chars == len("▁hello")


def test_bytes_of_a_token(byte_level: Tokenizer) -> None:
    assert [byte_level.bytes_of(index) for index in byte_level.encode("é")] == [b"\xc3", b"\xa9"]


@pytest.mark.parametrize("tokens", [["a" * 1025], ["a" * 1000] * 2000], ids=["one long token", "too many cuts"])
def test_absurd_vocabularies_are_refused_at_once(sentencepiece_metadata: dict[str, Any], tokens: list[str]) -> None:
    known = sentencepiece_metadata["tokenizer.ggml.tokens"] + [f"{token[:-4]}{i:04}" for i, token in enumerate(tokens)]
    changes = {
        "tokenizer.ggml.tokens": known,
        "tokenizer.ggml.scores": [0.0] * len(known),
        "tokenizer.ggml.token_type": [1] * len(known),
    }
    with pytest.raises(CheckpointError, match="plausible") as caught:
        Tokenizer.from_gguf_metadata(sentencepiece_metadata | changes)
    assert caught.value.code == "HF233"


def test_too_many_tokens_are_refused(byte_level_metadata: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.text.tokenizer.gguf_vocab.MAX_TOKENS", 100)
    with pytest.raises(CheckpointError, match="vocabulary is not plausible"):
        Tokenizer.from_gguf_metadata(byte_level_metadata)


@pytest.mark.parametrize("value", [0.5, 7, True, "abc", {}])
def test_a_vocabulary_that_is_no_list_is_refused(byte_level_metadata: dict[str, Any], value: object) -> None:
    for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.token_type"):
        with pytest.raises(CheckpointError, match=key):
            Tokenizer.from_gguf_metadata(byte_level_metadata | {key: value})


def test_a_pair_is_joined_by_a_template_with_its_variables(byte_level: Tokenizer) -> None:
    template = "{{ first }}{% for message in messages %}|{{ message.role }}:{{ message.content }}{% endfor %}"
    ids = byte_level.encode_pair("a", "b", template, {"first": "x", "second": "y"})
    assert byte_level.decode(ids) == "x|query:a|document:b"
    assert byte_level.decode(byte_level.encode_pair("a", "b", variables={"first": "x"})) == "ab"
