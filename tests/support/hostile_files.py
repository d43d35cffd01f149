"""Small models as files, written field by field so that any of them can lie: safetensors, GGUF, and their JSON."""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from hostile_json import dump, spoil, spoiled_bytes

from holdfast.models import from_config

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
}
GENERATION = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "eos_token_id": [2, 3], "max_new_tokens": 20}
SIZES = (0, 1, 7, 8, 32, 1 << 16, 1 << 24, (1 << 31) - 1, 1 << 32, 1 << 40, 1 << 62, (1 << 63) - 1, (1 << 64) - 1)
UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 4, 5, 6, 7, 8, 9, 10
_LETTERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def tensor_shapes(config: Mapping[str, Any] = CONFIG, *, gguf: bool = False) -> dict[str, tuple[int, ...]]:
    return {tensor.gguf_name if gguf else tensor.hf_name: tensor.shape for tensor in from_config(dict(config)).tensors}


# ---- safetensors


def safetensors_header(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        size = 4
        for one in shape:
            size *= one
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    return header


def safetensors_file(header: bytes, data_bytes: int, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + bytes(data_bytes)


def data_size(shapes: Mapping[str, tuple[int, ...]]) -> int:
    header = safetensors_header(shapes)
    return max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")


def spoiled_safetensors(shapes: Mapping[str, tuple[int, ...]], random: Random) -> bytes:
    header, size = safetensors_header(shapes), data_size(shapes)
    names = [name for name in header if name != "__metadata__"]
    one, other = random.choice(names), random.choice(names)
    roll = random.randrange(8)
    if roll == 0:
        header[one]["data_offsets"] = [random.choice(SIZES), random.choice(SIZES)]
    elif roll == 1:
        header[one] = copy.deepcopy(header[other])  # They overlap, or are one and the same.
    elif roll == 2:
        header[one]["shape"] = [random.choice(SIZES) for _ in range(random.randint(0, 9))]
    elif roll == 3:
        header[one]["dtype"] = random.choice(("F64", "I64", "F8_E4M3", "BOOL", "U4", "", "f32"))
    elif roll == 4:
        size = random.choice((0, 1, size // 2, size - 1))
    elif roll == 5:
        return safetensors_file(json.dumps(header).encode(), size, random.choice(SIZES))
    else:
        return safetensors_file(spoiled_bytes(header, random, SIZES), size)
    return safetensors_file(json.dumps(header).encode(), size)


# ---- GGUF


@dataclass(slots=True)
class GGUFFile:
    """`metadata`: (key, type, value); an array's value is (type, values). `tensors`: (name, sizes, type, offset)."""

    metadata: list[tuple[str, int, Any]]
    tensors: list[tuple[str, Sequence[int], int, int]]
    data_bytes: int
    counts: tuple[int, int] | None = None
    version: int = 3
    lies: dict[str, int] = field(default_factory=dict)
    """Lengths that are told of keys, instead of the true ones."""

    def encode(self) -> bytes:
        counts = self.counts or (len(self.tensors), len(self.metadata))
        raw = b"GGUF" + struct.pack("<IQQ", self.version, *counts)
        for key, kind, value in self.metadata:
            raw += _text(key) + struct.pack("<I", kind) + self._value(key, kind, value)
        for name, sizes, kind, offset in self.tensors:
            raw += _text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)
        return raw + bytes(-len(raw) % 32) + bytes(self.data_bytes)

    def _value(self, key: str, kind: int, value: Any) -> bytes:
        if kind == STRING:
            return _text(value, self.lies.get(key))
        if kind != ARRAY:
            return struct.pack("<" + _LETTERS.get(kind, "Q"), value)
        inner, values = value
        items = b"".join(self._value("", inner, one) for one in values)
        return struct.pack("<IQ", inner, self.lies.get(key, len(values))) + items


def _text(text: str, length: int | None = None) -> bytes:
    raw = text.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def good_gguf() -> GGUFFile:
    marks = ["<unk>", "<s>", "</s>"]
    tokens = [*marks, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "ab"]
    tokens += [f"<extra_{place}>" for place in range(300 - len(tokens))]
    kinds = [2, 3, 3] + [6] * 256 + [1] * 5 + [4] * (300 - 264)
    metadata: list[tuple[str, int, Any]] = [
        ("general.architecture", STRING, "llama"),
        ("general.alignment", UINT32, 32),
        ("llama.vocab_size", UINT32, 300),
        ("llama.context_length", UINT32, 64),
        ("llama.embedding_length", UINT32, 32),
        ("llama.block_count", UINT32, 1),
        ("llama.feed_forward_length", UINT32, 32),
        ("llama.attention.head_count", UINT32, 2),
        ("llama.attention.head_count_kv", UINT32, 1),
        ("llama.rope.freq_base", FLOAT32, 10000.0),
        ("llama.rope.dimension_count", UINT32, 16),
        ("llama.attention.layer_norm_rms_epsilon", FLOAT32, 1e-5),
        ("tokenizer.ggml.model", STRING, "llama"),
        ("tokenizer.ggml.tokens", ARRAY, (STRING, tokens)),
        ("tokenizer.ggml.scores", ARRAY, (FLOAT32, [-float(place) for place in range(300)])),
        ("tokenizer.ggml.token_type", ARRAY, (INT32, kinds)),
        ("tokenizer.ggml.bos_token_id", UINT32, 1),
        ("tokenizer.ggml.eos_token_id", UINT32, 2),
        ("tokenizer.ggml.unknown_token_id", UINT32, 0),
        ("tokenizer.ggml.add_bos_token", BOOL, True),
        ("tokenizer.chat_template", STRING, "{{ messages }}"),
    ]
    tensors, end = [], 0
    for name, shape in tensor_shapes(gguf=True).items():
        tensors.append((name, tuple(reversed(shape)), 0, end))
        size = 4
        for one in shape:
            size *= one
        end += -(-size // 32) * 32
    return GGUFFile(metadata, tensors, end)


def spoiled_gguf(random: Random) -> bytes:
    file = good_gguf()
    for _ in range(random.randint(1, 2)):
        _spoil_gguf(file, random)
    try:
        raw = file.encode()
    except (struct.error, OverflowError, TypeError):  # A value that its type has no room for: a smaller file will do.
        raw = good_gguf().encode()[: random.randrange(2000)]
    return raw[: random.randrange(len(raw))] if random.random() < 0.05 else raw


def _spoil_gguf(file: GGUFFile, random: Random) -> None:
    place = random.randrange(len(file.metadata))
    key, kind, value = file.metadata[place]
    where = random.randrange(len(file.tensors))
    name, sizes, layout, offset = file.tensors[where]
    roll = random.randrange(14)
    if roll == 0:
        file.counts = (random.choice(SIZES), len(file.metadata))
    elif roll == 1:
        file.counts = (len(file.tensors), random.choice(SIZES))
    elif roll == 2:
        file.lies[key] = random.choice(SIZES)
    elif roll == 3:
        file.metadata.append(file.metadata[place])
    elif roll == 4:
        del file.metadata[place]
    elif roll == 5:
        file.metadata[place] = (key, random.choice((UINT64, 11)), random.choice(SIZES[:-2]))
    elif roll == 6:
        numbers = (float("nan"), float("inf"), -1e308, 0.0)
        file.metadata[place] = (key, 12, random.choice(numbers))
    elif roll == 7:
        file.metadata[place] = (key, STRING, random.choice(("", "a", "\0", "x" * 70000, "gpt2", "bert", "default")))
    elif roll == 8 and kind == ARRAY:
        inner, values = value
        longer = [*values, *values] if random.random() < 0.5 else values[: random.choice((0, 1, 5))]
        file.metadata[place] = (key, ARRAY, (inner, longer))
    elif roll == 9:
        file.metadata[place] = (key, ARRAY, (ARRAY, [(UINT32, [1, 2]), (STRING, ["a"]), (ARRAY, [])]))
    elif roll == 10:
        file.tensors[where] = (name, [random.choice(SIZES) for _ in range(random.randint(0, 5))], layout, offset)
    elif roll == 11:
        file.tensors[where] = (name, sizes, random.choice((1, 2, 8, 14, 30, 4, 99)), random.choice((*SIZES, offset)))
    elif roll == 12:
        file.tensors.append(file.tensors[where])
    else:
        file.data_bytes = random.choice((0, 1, file.data_bytes // 2))


# ---- folders


def write_good_folder(folder: Path, tokenizer: dict[str, Any] | None = None) -> None:
    shapes = tensor_shapes()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    raw = safetensors_file(json.dumps(safetensors_header(shapes)).encode(), data_size(shapes))
    (folder / "model.safetensors").write_bytes(raw)
    if tokenizer is not None:
        (folder / "tokenizer.json").write_text(dump(tokenizer))
        (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))


def spoil_folder(folder: Path, random: Random) -> None:
    """One file of a good folder becomes a bad one."""
    shapes = tensor_shapes()
    roll = random.randrange(6)
    if roll == 0:
        (folder / "generation_config.json").write_bytes(spoiled_bytes(GENERATION, random))
    elif roll == 1:
        config = {
            "bos_token": {"content": "<s>"},
            "eos_token": "</s>",
            "add_bos_token": True,
            "chat_template": "{{ 1 }}",
        }
        (folder / "tokenizer_config.json").write_bytes(spoiled_bytes(config, random))
    elif roll == 2:
        (folder / "model.safetensors").write_bytes(spoiled_safetensors(shapes, random))
    elif roll == 3:
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
        index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(shapes, "model-00001-of-00001.safetensors")}
        names = ("../model.safetensors", "/etc/passwd", "..", "", "a/b.safetensors", "config.json", "\0.safetensors")
        (folder / "model.safetensors.index.json").write_bytes(spoiled_bytes(index, random, names))
    else:
        quantization = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
        config = CONFIG | {"quantization_config": quantization} if random.random() < 0.3 else CONFIG
        architectures = ("MistralForCausalLM", "Qwen2ForCausalLM", "Gemma2ForCausalLM", "MixtralForCausalLM", "Other")
        changed = spoil(config, random, architectures)
        (folder / "config.json").write_text(dump(changed), encoding="utf-8", errors="surrogatepass")
