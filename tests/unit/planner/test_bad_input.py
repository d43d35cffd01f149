"""What cannot be planned is refused with a code and the field to blame: files, configs, numbers, contradictions.

Hostile headers are fuzzed beside the readers; here the whole way is taken, from what a user types to the refusal.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast import plan
from holdfast.errors import HoldfastError

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1000, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "torch_dtype": "float32",
}  # fmt: skip
MESSAGE_LIMIT_CHARS = 4000

Folder = Callable[..., str]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """A model folder with this config.json, as a table or as raw bytes, and these files."""

    def make(config: dict[str, Any] | bytes | None = None, **files: bytes) -> str:
        if config is not None:
            raw = config if isinstance(config, bytes) else json.dumps(config).encode()
            (tmp_path / "config.json").write_bytes(raw)
        for name, content in files.items():
            (tmp_path / name.replace("_", ".")).write_bytes(content)
        return str(tmp_path)

    return make


def refused(model: str, **settings: Any) -> HoldfastError:
    with pytest.raises(HoldfastError) as caught:
        plan(model, **({"gpu": "rtx4090"} | settings))
    error = caught.value
    assert error.field, error
    assert len(str(error)) < MESSAGE_LIMIT_CHARS
    return error


def safetensors(header: dict[str, Any] | bytes, data_bytes: int = 0) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + bytes(data_bytes)


# Files


@pytest.mark.parametrize("name", ["/nowhere/model", "nope.gguf", "./nope.safetensors", "", "x" * 5000, "~nobody/model"])
def test_nothing_there(name: str) -> None:
    error = refused(name)
    assert (error.code, error.field) == ("HF210", "model")


def test_a_name_with_a_slip_brings_the_nearest() -> None:
    error = refused("lama-3-8bb")
    assert (error.code, error.field) == ("HF142", "model")
    assert "llama-3-8b" in str(error)


def test_an_empty_folder(folder: Folder) -> None:
    error = refused(folder())
    assert (error.code, error.field) == ("HF230", "model")
    assert "config.json" in str(error)


@pytest.mark.parametrize("config", [b"", b"{not", b"[1]", b"null", b"\xff\xfe", b'{"a":' * 10_000])
def test_a_config_that_is_no_config(folder: Folder, config: bytes) -> None:
    error = refused(folder(config))
    assert error.code in ("HF230", "HF240")
    assert "config" in str(error) or error.field == "architectures"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01\x02",
        struct.pack("<Q", 1000) + b"{}",
        struct.pack("<Q", 1 << 60) + b"{}",
        safetensors(b"{not json"),
        safetensors({"a": {"dtype": "F32", "shape": [1000, 64], "data_offsets": [0, 256_000]}}),
        safetensors({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 12]}}, 12),
        safetensors({"a": {"dtype": "Z9", "shape": [4], "data_offsets": [0, 16]}}, 16),
        safetensors({"a": {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]}}, 16),
    ],
    ids=["empty", "short", "truncated", "huge", "no-json", "no-data", "contradicts", "unknown-type", "negative"],
)
def test_torn_safetensors(folder: Folder, content: bytes) -> None:
    error = refused(folder(LLAMA, model_safetensors=content))
    assert error.code == "HF230"
    assert "model.safetensors" in str(error)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GGUF",
        b"XXXX" * 20,
        b"GGUF" + struct.pack("<I", 99) + bytes(16),
        b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0),
    ],
    ids=["empty", "truncated", "foreign", "version", "bomb"],
)
def test_torn_gguf(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    error = refused(str(path))
    assert (error.code, error.field) == ("HF230", "model")
    assert "GGUF" in str(error)


def test_a_gguf_without_its_architecture(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 0))
    assert refused(str(path)).field == "general.architecture"


# Configs


@pytest.mark.parametrize(
    ("changes", "code", "field"),
    [
        ({"architectures": ["FooForCausalLM"], "model_type": "foo"}, "HF240", "architectures"),
        ({"architectures": None, "model_type": None}, "HF240", "architectures"),
        ({"num_hidden_layers": 0}, "HF230", "num_hidden_layers"),
        ({"num_hidden_layers": 10**30}, "HF230", "num_hidden_layers"),
        ({"hidden_size": 10**12}, "HF230", "hidden_size"),
        ({"hidden_size": "x"}, "HF230", "hidden_size"),
        ({"hidden_size": 64.5}, "HF230", "hidden_size"),
        ({"hidden_size": None}, "HF230", "hidden_size"),
        ({"vocab_size": True}, "HF230", "vocab_size"),
        ({"num_attention_heads": 0}, "HF230", "num_attention_heads"),
        ({"num_key_value_heads": 3}, "HF230", "num_key_value_heads"),
        ({"num_key_value_heads": 8}, "HF230", "num_key_value_heads"),
        ({"max_position_embeddings": -1}, "HF230", "max_position_embeddings"),
        ({"intermediate_size": -5}, "HF230", "intermediate_size"),
        ({"head_dim": 0}, "HF230", "head_dim"),
        ({"rope_theta": 0}, "HF230", "rope_theta"),
        ({"torch_dtype": "int3"}, "HF230", "torch_dtype"),
        ({"rope_scaling": {"rope_type": "weird"}}, "HF230", "rope_scaling"),
        ({"model_type": 1.5}, "HF230", "model_type"),
        ({"model_type": {"llama": 1}}, "HF230", "model_type"),
        ({"sliding_window": "x"}, "HF230", "sliding_window"),
        ({"sliding_window": -5}, "HF230", "sliding_window"),
        ({"quantization_config": {"quant_method": "magic"}}, "HF230", "quantization_config"),
        ({"quantization_config": {"quant_method": "awq", "bits": 99}}, "HF230", "bits"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": -7}}, "HF230", "group_size"),
    ],
)
def test_a_config_that_cannot_be(folder: Folder, changes: dict[str, Any], code: str, field: str) -> None:
    error = refused(folder({**LLAMA, **changes}))
    assert (error.code, error.field) == (code, field)
    assert error.needed


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"vocab_size": "32000"}, '"32000", a string'),
        ({"rope_theta": "1e4"}, '"1e4", a string'),
        ({"tie_word_embeddings": "true"}, '"true", a string'),
        ({"eos_token_id": "2"}, '"2", a string'),
        ({"quantization_config": "awq"}, '"awq", a string'),
        ({"quantization_config": {"quant_method": "awq", "bits": "4"}}, '"4", a string'),
        ({"vocab_size": -4}, "-4"),
    ],
)
def test_a_text_in_the_place_of_a_number_is_shown_as_one(folder: Folder, changes: dict[str, Any], shown: str) -> None:
    assert refused(folder({**LLAMA, **changes})).found == shown


def test_weights_of_another_model(folder: Folder) -> None:
    header = {"model.embed_tokens.weight": {"dtype": "F32", "shape": [1000, 64], "data_offsets": [0, 256_000]}}
    error = refused(folder(LLAMA, model_safetensors=safetensors(header, 256_000)))
    assert (error.code, error.field) == ("HF230", "architectures")
    assert "1 of them" in str(error)


def test_weights_of_another_shape(folder: Folder) -> None:
    header: dict[str, Any] = {}
    position = 0
    shapes = {"q_proj": (64, 64), "k_proj": (32, 64), "v_proj": (32, 64), "o_proj": (64, 64)}
    for layer in range(2):
        for name, shape in shapes.items():
            rows = shape[0] + (16 if (layer, name) == (1, "v_proj") else 0)
            nbytes = 4 * rows * shape[1]
            header[f"model.layers.{layer}.self_attn.{name}.weight"] = {
                "dtype": "F32",
                "shape": [rows, shape[1]],
                "data_offsets": [position, position + nbytes],
            }
            position += nbytes
    error = refused(folder(LLAMA, model_safetensors=safetensors(header, position)))
    assert (error.code, error.field) == ("HF230", "num_key_value_heads")
    assert "[48, 64]" in str(error)


# Numbers


@pytest.mark.parametrize(
    ("setting", "value", "code"),
    [
        ("gpu", "rtx9999", "HF140"),
        ("gpu", "", "HF140"),
        ("gpu", "rtx4090x0", "HF141"),
        ("gpu", "rtx4090x999999", "HF141"),
        ("gpu", 5, "HF100"),
        ("vram", "1e30", "HF100"),
        ("vram", "0", "HF100"),
        ("vram", "-1GiB", "HF100"),
        ("vram", "9" * 400 + "GiB", "HF100"),
        ("vram", "22GiBx0", "HF141"),
        ("ram", "lots", "HF100"),
        ("ram", True, "HF100"),
        ("nvme", "0", "HF100"),
        ("max_model_len", 0, "HF100"),
        ("max_model_len", 10**9, "HF100"),
        ("max_model_len", 8193, "HF111"),
        ("max_model_len", "long", "HF100"),
        ("max_num_seqs", 0, "HF100"),
        ("max_num_seqs", 10**12, "HF100"),
        ("max_num_batched_tokens", 0, "HF100"),
        ("gpu_memory_utilization", 0, "HF100"),
        ("gpu_memory_utilization", 1.5, "HF100"),
        ("gpu_memory_utilization", float("nan"), "HF100"),
        ("tensor_parallel_size", 3, "HF131"),
        ("tensor_parallel_size", 0, "HF100"),
        ("tensor_parallel_size", 10**6, "HF100"),
        ("pipeline_parallel_size", 100, "HF132"),
        ("concurrency", 0, "HF100"),
        ("kv_cache_dtype", "int2", "HF100"),
        ("dtype", "int8", "HF100"),
        ("quantization", "magic", "HF144"),
        ("block_size", 0, "HF100"),
        ("max_loras", 0, "HF100"),
        ("max_lora_rank", 0, "HF100"),
        ("traffic", "/nowhere.jsonl", "HF160"),
        ("revision", "main", "HF130"),
        ("device", "tpu", "HF100"),
    ],
)
def test_a_number_that_will_not_do(setting: str, value: object, code: str) -> None:
    machine = {} if setting in ("vram", "ram", "device") else {"gpu": "rtx4090"}
    with pytest.raises(HoldfastError) as caught:
        plan("llama-3-8b", **(machine | {setting: value}))
    assert (caught.value.code, caught.value.field) == (code, setting)
    assert len(str(caught.value)) < MESSAGE_LIMIT_CHARS


def test_the_name_of_a_gpu_is_said_as_it_was_written() -> None:
    assert "rtx9999" in str(refused("llama-3-8b", gpu="rtx9999"))
    assert "rtx9998 " in str(refused("llama-3-8b", gpu="rtx9998x2"))


@pytest.mark.parametrize(
    ("gpu", "fix"), [("rtx4090,", "--gpu rtx4090"), (",", "--gpu rtx4090"), ("l4, ,a100-80x2", "--gpu l4,a100-80x2")]
)
def test_an_empty_name_among_gpus_is_said_to_be_empty(gpu: str, fix: str) -> None:
    error = refused("llama-3-8b", gpu=gpu)
    assert "is empty" in error.message
    assert (error.code, error.fix) == ("HF140", fix)


@pytest.mark.parametrize(
    ("share", "meant"), [(1.5, "0.9"), (0, "0.9"), (-1, "0.9"), (5, "0.9"), (85, "0.85"), (100, "1"), (1e9, "0.9")]
)
def test_a_share_that_will_not_do_brings_one_that_is_of_use(share: float, meant: str) -> None:
    error = refused("llama-3-8b", gpu_memory_utilization=share)
    assert error.fix == f"gpu_memory_utilization {meant}"


def test_a_setting_that_does_not_exist_brings_the_nearest() -> None:
    error = refused("llama-3-8b", max_modle_len=5)
    assert error.field == "max_modle_len"
    assert "max_model_len" in str(error)


# Contradictions


@pytest.mark.parametrize(
    ("settings", "code", "field"),
    [
        ({"prompt": 10}, "HF143", "output"),
        ({"max_lora_rank": 64}, "HF143", "max_lora_rank"),
        ({"concurrency": 5}, "HF143", "concurrency"),
        ({"prompt": 0, "output": 0}, "HF143", "prompt"),
        ({"concurrency": 10**6, "prompt": 10**8, "output": 1}, "HF100", "concurrency"),
        ({"traffic": "log.jsonl", "prompt": 5, "output": 5}, "HF143", "prompt"),
        ({"vram": "48GiB"}, "HF143", "vram"),
        ({"vram": "22GiBx2", "gpu": "rtx4090x4"}, "HF143", "vram"),
        ({"device": "cpu"}, "HF143", "gpu"),
        ({"gpu": "rtx4090x2", "tensor_parallel_size": 4}, "HF133", "tensor_parallel_size"),
    ],
)
def test_settings_that_contradict_each_other(settings: dict[str, Any], code: str, field: str) -> None:
    error = refused("llama-3-8b", **settings)
    assert (error.code, error.field) == (code, field)
    assert error.fix


@pytest.mark.parametrize(
    "settings",
    [{"vram": "much"}, {"ram": "-1"}, {"nvme": "0"}, {"vram": "22GiBx0"}, {"gpu": "h100-80x0"}, {"ram": 1.5}],
)
def test_a_wrong_size_or_number_brings_a_right_one(settings: dict[str, Any]) -> None:
    assert refused("llama-3-8b", **settings).fix


@pytest.mark.parametrize("settings", [{"enable_lora": True}, {"max_loras": 1}])
def test_the_rank_of_adapters_is_counted(settings: dict[str, Any]) -> None:
    def adapters(**more: Any) -> int:
        found = plan("llama-3-8b", gpu="h100-80", **settings, **more).to_json()
        held: int = found["devices"][0]["terms"]["adapters"]
        return held

    assert adapters() == adapters(max_lora_rank=16) > 0
    # Beside what grows with the rank there are some numbers for each row of a step.
    assert 3.9 * adapters() < adapters(max_lora_rank=64) <= 4 * adapters()


@pytest.mark.parametrize("kind", ["float", "int"])
def test_scales_of_groups_are_counted_from_a_config_alone(folder: Folder, kind: str) -> None:
    def weights(**more: Any) -> int:
        group = {"weights": {"num_bits": 8, "type": kind, "symmetric": True, **more}}
        quantization = {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": group},
            "ignore": ["lm_head"],
        }
        found: int = plan(folder(LLAMA | {"quantization_config": quantization}), gpu="rtx4090").to_json()[
            "weights_bytes"
        ]
        return found

    # Of each layer: q, o; k, v; gate, up; down, as [out, in].
    matrices = 2 * [(64, 64), (64, 64), (32, 64), (32, 64), (128, 64), (128, 64), (64, 128)]
    rows, groups = sum(out for out, _ in matrices), sum(out * -(-columns // 32) for out, columns in matrices)
    by_channel = weights(strategy="channel")
    assert weights(strategy="group", group_size=32) - by_channel == 2 * (groups - rows)
    # A scale for a whole matrix is held as one for every row: of FP8 in float32, as it is stored.
    one = 4 if kind == "float" else 2
    assert by_channel - weights(strategy="tensor") == (2 - one) * rows


def test_a_quantized_model_is_not_quantized_again() -> None:
    assert refused("llama-3-70b-awq", quantization="int8").code == "HF144"


def test_traffic_of_requests_that_would_be_refused(tmp_path: Path) -> None:
    """Not refused here: a log's P99 is rounded up, and the rest of the traffic is still worth planning for."""
    log = tmp_path / "traffic.jsonl"
    log.write_text("\n".join(json.dumps({"prompt_tokens": 5000, "completion_tokens": 500}) for _ in range(5)))
    for settings in ({"traffic": str(log)}, {"prompt": 3000, "output": 3000}):
        found = plan("llama-3-8b", gpu="h100-80", max_model_len=4096, **settings)
        (warning,) = [one for one in found.warnings if one.code == "HFW34"]
        assert warning.field == "max_model_len"
        assert "will be refused" in warning.message
