"""A tokenizer.json that lies or explodes: taken or refused with an error of its own, within bounds of memory and time.

The library behind it ends the process when it finds no memory, and its regular expressions go back and try again, so
what could do harm must be refused before it is run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hostile_json import HUGE, Raw, dump, spoiled_bytes
from limits import Limited

LOAD = "hostile_loads:load_tokenizer"


def added(index: int, content: str, **more: Any) -> dict[str, Any]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": index, "content": content, **plain, **more}


def document(**parts: Any) -> dict[str, Any]:
    vocabulary = {"<s>": 0, "</s>": 1, "a": 2, "b": 3, "ab": 4, "Ġ": 5, "▁": 6, "é": 7, "!": 8, "##a": 9, "<unk>": 10}
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [added(0, "<s>"), added(1, "</s>")],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [["a", "b"]], "unk_token": "<unk>"},
    }
    return whole | parts


def template(*pieces: str) -> dict[str, Any]:
    marks = {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}}
    spelled = [{"Sequence" if one in "AB" else "SpecialToken": {"id": one, "type_id": 0}} for one in pieces]
    return {"type": "TemplateProcessing", "single": spelled, "pair": spelled, "special_tokens": marks}


def replace(pattern: Any, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def sequence(kind: str, *steps: Any) -> dict[str, Any]:
    return {"type": "Sequence", kind: list(steps)}


SPLIT = r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
SPLITTING = {"type": "Split", "pattern": {"Regex": SPLIT}, "behavior": "Isolated", "invert": False}
DOCUMENTS = [
    document(
        normalizer={"type": "NFC"},
        pre_tokenizer=sequence("pretokenizers", SPLITTING, BYTE_LEVEL),
        post_processor=sequence("processors", BYTE_LEVEL, template("<s>", "A")),
        decoder=BYTE_LEVEL,
    ),
    document(
        normalizer=sequence("normalizers", {"type": "Prepend", "prepend": "▁"}, replace({"String": " "}, "▁")),
        post_processor=template("<s>", "A"),
        decoder=sequence(
            "decoders",
            replace({"String": "▁"}, " "),
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ),
    ),
    document(
        model={"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["▁", -1.0], ["a", -2.0], ["ab", -3.0]]},
        added_tokens=[],
        normalizer=sequence("normalizers", {"type": "NFKC"}, replace({"Regex": " {2,}"}, " ")),
        pre_tokenizer={"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
        decoder={"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
    ),
    document(
        model={
            "type": "WordPiece",
            "vocab": {"[UNK]": 0, "a": 1, "##b": 2},
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
        },
        added_tokens=[added(0, "[UNK]", normalized=True)],
        pre_tokenizer={"type": "BertPreTokenizer"},
        normalizer={
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": True,
        },
        post_processor={"type": "BertProcessing", "sep": ["a", 1], "cls": ["a", 1]},
        decoder={"type": "WordPiece", "prefix": "##", "cleanup": True},
    ),
]
"""The four kinds that models use."""

GROW = replace({"String": "a"}, "a" * 200)
EVIL = [
    r"(a+)+!",
    r"(a|a)*!",
    r"(a|ab|b)*!",
    r"(?:a?){25}a{25}!",
    r"(.*)(.*)(.*)(.*)(.*)!",
    r"(\w+\s?)*!",
    "(?:a|a)" * 30,
    r"(?:\p{L}|[a-c])*!",
    r"(a)\1+",
    r"(?<n>a\g<n>?b)",
    r"(?:(?=(a+)+!)a)*",
    r"(?:a{1,3})*!",
    "(" * 500 + "a" + ")" * 500,
]
BOMBS: dict[str, tuple[dict[str, Any], str]] = {
    "greatest id": (document(model={"type": "BPE", "vocab": {"a": (1 << 32) - 1}, "merges": []}), "HF233"),
    "greatest id of words": (
        document(model={"type": "WordLevel", "vocab": {"a": 1 << 31}, "unk_token": "a"}, added_tokens=[]),
        "HF233",
    ),
    "added id": (document(added_tokens=[added((1 << 32) - 1, "<x>")]), "HF233"),
    "long token": (document(model={"type": "BPE", "vocab": {"a" * 5000: 0}, "merges": []}), "HF233"),
    # Its tree of characters is taken down by recursion, which ended the process.
    "long token in a tree": (
        document(model={"type": "Unigram", "unk_id": 0, "vocab": [["☃" * 70_000, 0.0]]}, added_tokens=[]),
        "HF233",
    ),
    "long added token": (document(added_tokens=[added(11, "x" * 5000, normalized=True)]), "HF233"),
    "id of a template": (
        document(
            post_processor={
                **template("<s>", "A"),
                "special_tokens": {"<s>": {"id": "<s>", "ids": [(1 << 32) - 1], "tokens": ["<s>"]}},
            }
        ),
        "HF233",
    ),
    "words of any length": (
        document(
            added_tokens=[],
            model={
                "type": "WordPiece",
                "vocab": {"a": 0},
                "unk_token": "a",
                "max_input_chars_per_word": 1 << 30,
                "continuing_subword_prefix": "",
            },
        ),
        "HF233",
    ),
    "chained replacing": (document(normalizer=sequence("normalizers", *[GROW] * 9)), "HF235"),
    "nested chains": (
        document(normalizer=sequence("normalizers", *[sequence("normalizers", GROW, GROW)] * 5)),
        "HF235",
    ),
    "chained by pattern": (
        document(normalizer=sequence("normalizers", *[replace({"Regex": ""}, "aaaaaaaaa")] * 12)),
        "HF235",
    ),
    "chained prepending": (
        document(normalizer=sequence("normalizers", *[{"type": "Prepend", "prepend": "b" * 99}] * 9)),
        "HF235",
    ),
    "one long replacement": (document(normalizer=replace({"String": "a"}, "a" * 100_000)), "HF235"),
    "chained decoders": (document(decoder=sequence("decoders", *[GROW] * 9)), "HF235"),
    "chained bytes": (document(pre_tokenizer=sequence("pretokenizers", *[BYTE_LEVEL] * 40)), "HF235"),
    "chained byte normalizers": (
        document(normalizer=sequence("normalizers", *[{"type": "ByteLevel", "add_prefix_space": False}] * 40)),
        "HF235",
    ),
    "too many steps": (document(normalizer=sequence("normalizers", *[{"type": "NFC"}] * 5000)), "HF235"),
    "table of characters": (
        document(normalizer={"type": "Precompiled", "precompiled_charsmap": "/////w=="}),
        "HF230",
    ),
    "repeated text": (document(post_processor=template("A", "A", "A")), "HF235"),
    "chained templates": (document(post_processor=sequence("processors", *[template("<s>", *"A")] * 1000)), "HF235"),
    "many marks": (document(post_processor=template(*["<s>"] * 60, "A")), ""),
    "more marks": (
        document(post_processor=sequence("processors", *[template(*["<s>"] * 60, "A")] * 60)),
        "HF235",
    ),
    "huge number": (document(normalizer={"type": "Strip", "left": HUGE}), "HF230"),
    "depth": (document(decoder=Raw("[" * 100_000 + "]" * 100_000)), "HF230"),
}


@pytest.fixture(scope="module")
def load():
    with Limited(LOAD) as limited:
        yield limited


def write(folder: Path, whole: Any) -> str:
    (folder / "tokenizer.json").write_bytes(whole if isinstance(whole, bytes) else dump(whole).encode())
    return str(folder)


@pytest.mark.parametrize("kind", range(len(DOCUMENTS)))
def test_what_is_spoiled_here_is_good_at_first(load: Limited, tmp_path: Path, kind: int) -> None:
    ending = load(write(tmp_path, DOCUMENTS[kind]))
    assert ending.kind == "returned", ending.detail


@pytest.mark.parametrize("name", BOMBS)
def test_bombs(load: Limited, tmp_path: Path, name: str) -> None:
    whole, code = BOMBS[name]
    ending = load(write(tmp_path, whole))
    assert ending.kind == ("refused" if code else "returned"), ending.detail
    if code:
        assert ending.detail.startswith(code), ending.detail


@pytest.mark.parametrize("place", ["pre_tokenizer", "normalizer", "decoder"])
@pytest.mark.parametrize("pattern", EVIL)
def test_patterns_that_take_forever(load: Limited, tmp_path: Path, pattern: str, place: str) -> None:
    step = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Removed", "invert": False}
    whole = document(**{place: step if place == "pre_tokenizer" else replace({"Regex": pattern}, " ")})
    ending = load(write(tmp_path, whole))
    assert ending.kind == "refused", ending.detail
    assert ending.detail.startswith("HF236"), ending.detail
    assert place in ending.detail


def fuzz_tokenizers(cases, load: Limited, folder: Path, count: int = 500) -> None:
    special = (
        GROW,
        sequence("normalizers", *[GROW] * 3),
        sequence("decoders", *[GROW] * 3),
        BYTE_LEVEL,
        *EVIL,
        {"Regex": "(a+)+!"},
        {"type": "FixedLength", "length": 0},
        template("A", "A"),
        {"type": "Nmt"},
        {"type": "Precompiled", "precompiled_charsmap": "BAAAAAAAAAB4eAA="},
        ["a", (1 << 32) - 1],
        {"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": True},
        {"type": "BPEDecoder", "suffix": ""},
    )
    refused = 0
    for name, random in cases(count):
        whole = spoiled_bytes(random.choice(DOCUMENTS), random, special)
        (folder / "tokenizer_config.json").unlink(missing_ok=True)
        if random.random() < 0.2:
            roles = {
                "add_bos_token": True,
                "bos_token": "<s>",
                "eos_token": {"content": "</s>"},
                "add_eos_token": False,
            }
            (folder / "tokenizer_config.json").write_bytes(spoiled_bytes(roles, random))
        ending = load(write(folder, whole))
        assert ending.good, f"{name}: {ending.kind}\n{ending.detail}\n{whole[:3000]!r}"
        refused += ending.kind == "refused"
    assert refused > 20


def test_tokenizers(cases, load, tmp_path) -> None:
    fuzz_tokenizers(cases, load, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_tokenizers_for_long(cases, load, tmp_path) -> None:
    fuzz_tokenizers(cases, load, tmp_path)


def test_the_limits_are_there(tmp_path: Path) -> None:
    """That nothing died above says something only if what is harmful would have."""
    with Limited("hostile_loads:take_memory") as take:
        assert take(1 << 20).kind == "returned"
        assert take(3 << 30).kind == "raised"
        assert take(1 << 20).kind == "returned"
    with Limited("hostile_loads:abort") as abort:
        ending = abort()
        assert (ending.kind, "status -6" in ending.detail) == ("died", True), ending
        assert abort().kind == "died"
        assert abort.starts == 2
    with Limited("hostile_loads:wait", seconds=0.5) as wait:
        assert wait(60).kind == "hung"
        assert json.loads(wait(0).detail) == 0
