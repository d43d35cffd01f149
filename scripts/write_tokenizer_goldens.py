"""Writes tests/data/tokenizers/*.json: what llama.cpp's own tokenizer makes of odd texts. Run only to change them.

    pip install llama-cpp-python gguf
    python scripts/write_tokenizer_goldens.py [NAME=MODEL.gguf ...]

Without arguments the small vocabulary of tests/data/tokenizers is written into GGUF files, one for each way of cutting,
and asked. With arguments real models are asked, of whom only the ids are kept.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
import llama_cpp

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "data" / "tokenizers"
CUTS = ("default", "gpt-2", "smollm", "llama-bpe", "dbrx", "qwen2", "tekken", "gpt-4o", "deepseek-coder", "deepseek-v3")


def quiet(level: int, text: bytes, data: Any) -> None:
    pass


CALLBACK = llama_cpp.llama_log_callback(quiet)


class Reference:
    """llama.cpp with a vocabulary and no weights."""

    def __init__(self, path: Path) -> None:
        parameters = llama_cpp.llama_model_default_params()
        parameters.vocab_only = True
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
        if self._model is None:
            raise SystemExit(f"llama.cpp cannot load {path}")
        self._vocabulary = llama_cpp.llama_model_get_vocab(self._model)

    def ids(self, text: str, *, parse_marks: bool) -> list[int]:
        raw = text.encode()
        room = 2 * len(raw) + 16
        found = (llama_cpp.llama_token * room)()
        count = llama_cpp.llama_tokenize(self._vocabulary, raw, len(raw), found, room, False, parse_marks)
        return list(found[:count])

    def all_ids(self, texts: list[str]) -> dict[str, Any]:
        marks = [self.ids(text, parse_marks=True) for text in texts]
        plain = [self.ids(text, parse_marks=False) for text in texts]
        return {"marks": marks, "plain": {index: ids for index, ids in enumerate(plain) if ids != marks[index]}}


def write_gguf(path: Path, metadata: dict[str, Any]) -> None:
    writer = gguf.GGUFWriter(str(path), "llama")
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def dump(name: str, document: object) -> None:
    (FOLDER / name).write_text(json.dumps(document, ensure_ascii=True, separators=(",", ":")) + "\n")


def main() -> None:
    llama_cpp.llama_log_set(CALLBACK, None)
    texts = json.loads((FOLDER / "texts.json").read_text())
    for argument in sys.argv[1:]:
        name, _, path = argument.partition("=")
        dump(f"{name}.json", Reference(Path(path).expanduser()).all_ids(texts))
    if sys.argv[1:]:
        return
    vocabularies = json.loads((FOLDER / "vocabularies.json").read_text())
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocabulary.gguf"
        for cut in CUTS:
            write_gguf(path, vocabularies["byte_level"] | {"tokenizer.ggml.pre": cut})
            found[cut] = Reference(path).all_ids(texts)
        for prefix in (True, False):
            write_gguf(path, vocabularies["sentencepiece"] | {"tokenizer.ggml.add_space_prefix": prefix})
            found[f"sentencepiece {'with' if prefix else 'without'} prefix"] = Reference(path).all_ids(texts)
    dump("small.json", found)


if __name__ == "__main__":
    main()
