"""Small good files to read and to spoil. The GGUF writer here is independent of the reader under test."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest

from holdfast.checkpoints import ModelFiles, locate

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 8,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "dtype": "float32",
}

SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (8, 32),
    "model.layers.0.input_layernorm.weight": (32,),
    "model.layers.0.self_attn.q_proj.weight": (32, 32),
    "model.layers.0.self_attn.k_proj.weight": (16, 32),
    "model.layers.0.self_attn.v_proj.weight": (16, 32),
    "model.layers.0.self_attn.o_proj.weight": (32, 32),
    "model.layers.0.post_attention_layernorm.weight": (32,),
    "model.layers.0.mlp.gate_proj.weight": (32, 32),
    "model.layers.0.mlp.up_proj.weight": (32, 32),
    "model.layers.0.mlp.down_proj.weight": (32, 32),
    "model.norm.weight": (32,),
}


def safetensors_bytes(arrays: dict[str, numpy.ndarray[Any, Any]]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, array in arrays.items():
        raw = array.astype("<f4").tobytes()
        header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def gguf_string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def gguf_bytes() -> bytes:
    """Two tensors (F32 [2, 3] and Q8_0 [2, 32]) and one key of most kinds."""
    keys = [
        gguf_string("general.architecture") + struct.pack("<I", 8) + gguf_string("llama"),
        gguf_string("llama.block_count") + struct.pack("<II", 4, 3),
        gguf_string("a.float") + struct.pack("<If", 6, 0.5),
        gguf_string("a.truth") + struct.pack("<IB", 7, 1),
        gguf_string("a.big") + struct.pack("<Iq", 11, -5),
        gguf_string("tokens") + struct.pack("<IIQ", 9, 8, 3) + b"".join(map(gguf_string, ["a", "", "Ġé"])),
        gguf_string("numbers") + struct.pack("<IIQ3i", 9, 5, 3, 1, -2, 3),
        gguf_string("nested") + struct.pack("<IIQ", 9, 9, 2) + 2 * struct.pack("<IQ2B", 0, 2, 8, 9),
    ]
    infos = [
        gguf_string("plain") + struct.pack("<IQQIQ", 2, 3, 2, 0, 0),
        gguf_string("quantized") + struct.pack("<IQQIQ", 2, 32, 2, 8, 32),
    ]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(keys)) + b"".join(keys) + b"".join(infos)
    head += bytes(-len(head) % 32)
    return head + numpy.arange(6, dtype="<f4").tobytes().ljust(32, b"\0") + bytes(range(68))


@pytest.fixture
def model_folder(tmp_path: Path) -> Callable[..., Path]:
    """Writes a tiny whole model and returns its folder; `shards` splits its weights, 0 leaves them out."""

    def write(*, shards: int = 1, **config: Any) -> Path:
        folder = tmp_path / "model"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
        arrays = {name: numpy.full(shape, index, "<f4") for index, (name, shape) in enumerate(SHAPES.items())}
        if shards == 1:
            (folder / "model.safetensors").write_bytes(safetensors_bytes(arrays))
        elif shards > 1:
            weight_map = {}
            for number in range(shards):
                filename = f"model-{number + 1:05}-of-{shards:05}.safetensors"
                part = dict(list(arrays.items())[number::shards])
                (folder / filename).write_bytes(safetensors_bytes(part))
                weight_map |= dict.fromkeys(part, filename)
            (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return folder

    return write


@pytest.fixture(scope="session")
def good_gguf() -> bytes:
    return gguf_bytes()


@pytest.fixture(scope="session")
def good_safetensors() -> bytes:
    return safetensors_bytes({"a": numpy.zeros((2, 3)), "b": numpy.zeros((4,)), "c": numpy.zeros((0, 5))})


@pytest.fixture
def gguf_file(tmp_path: Path, good_gguf: bytes) -> Path:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(good_gguf)
    return path


@pytest.fixture(scope="session")
def default_model() -> ModelFiles:
    """The real built-in model, fetched once into the user's cache."""
    return locate(None)
