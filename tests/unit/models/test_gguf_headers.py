"""GGUF headers of every family: read into specs whose tensor names are those of the gguf package's own tables."""

from __future__ import annotations

from typing import Any

import gguf
import pytest
from whole_tables import check_rows

from holdfast.errors import CheckpointError
from holdfast.models import ModelSpec, describe_gguf, from_gguf, known_gguf_architectures

BASE: dict[str, Any] = {
    "block_count": 4,
    "context_length": 8192,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.layer_norm_epsilon": 1e-5,
}
EXPERTS: dict[str, Any] = {
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_feed_forward_length": 24,
    "expert_shared_feed_forward_length": 40,
    "expert_shared_count": 1,
    "leading_dense_block_count": 1,
}
OWN: dict[str, dict[str, Any]] = {
    "deepseek2": {
        "attention.kv_lora_rank": 16,
        "attention.q_lora_rank": 20,
        "attention.key_length": 20,
        "attention.value_length": 10,
        "rope.dimension_count": 8,
    },
    "glm4moe": {"nextn_predict_layers": 1},
    "gemma3": {"attention.key_length": 16, "attention.value_length": 16, "attention.sliding_window": 512},
    "gemma2": {"attention.key_length": 16, "attention.value_length": 16, "attention.sliding_window": 512},
    "gemma": {"attention.key_length": 16, "attention.value_length": 16},
    "llama4": {"attention.key_length": 16, "attention.value_length": 16, "interleave_moe_layer_step": 2},
    "gpt-oss": {"attention.key_length": 16, "attention.value_length": 16, "attention.sliding_window": 128},
    "cohere2": {"attention.sliding_window": 512},
}
MIXTURES = (
    "qwen2moe",
    "qwen3moe",
    "deepseek2",
    "glm4moe",
    "gpt-oss",
    "llama4",
    "olmoe",
    "granitemoe",
    "dbrx",
    "phimoe",
    "minimax-m2",
)
NAMES = ("token_embd.weight", "output.weight")
QKV_BIASES = ("blk.0.attn_q.bias", "blk.0.attn_k.bias", "blk.0.attn_v.bias")


def header(architecture: str, **changes: Any) -> dict[str, Any]:
    fields = {**BASE, **(EXPERTS if architecture in MIXTURES else {}), **OWN.get(architecture, {}), **changes}
    named = {f"{architecture}.{name}": value for name, value in fields.items()}
    tokens = [str(number) for number in range(100)]
    return {"general.architecture": architecture, "tokenizer.ggml.tokens": tokens, **named}


def known_names(architecture: str, blocks: int) -> set[str]:
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    stems = [gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[number]]
    return {stem.format(bid=block) for stem in stems for block in range(blocks)}


def stem_of(name: str) -> str:
    return name.removesuffix(".weight").removesuffix(".bias")


@pytest.mark.parametrize("architecture", known_gguf_architectures())
def test_names_are_those_of_llama_cpp(architecture: str) -> None:
    known = known_names(architecture, 4)
    present = [name for name in (*NAMES, "rope_freqs.weight") if stem_of(name) in known]
    spec = describe_gguf(header(architecture), (*present, *QKV_BIASES))
    assert {stem_of(tensor.gguf_name) for tensor in spec.tensors} <= known
    names = [tensor.gguf_name for tensor in spec.tensors]
    assert len(set(names)) == len(names)
    assert spec.vocab_size == 100


@pytest.mark.parametrize("architecture", known_gguf_architectures())
def test_both_names_of_a_tensor_mean_the_same(architecture: str) -> None:
    """Where the package's map knows the name of safetensors, it leads to our name of GGUF."""
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    table = gguf.get_tensor_name_map(number, 4)
    checked = 0
    for tensor in describe_gguf(header(architecture), (*NAMES, *QKV_BIASES)).tensors:
        if not tensor.hf_name or tensor.part != "text":
            continue
        name = tensor.hf_name.replace(".{expert}", "")
        if architecture == "chatglm":  # its converter takes this off first
            name = name.removeprefix("transformer.")
        found = table.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is not None:
            assert stem_of(found) == stem_of(tensor.gguf_name), tensor.name
            checked += 1
    assert checked > 8


def shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    return {tensor.gguf_name: tensor.shape for tensor in spec.tensors}


def test_experts_are_stacked() -> None:
    spec = describe_gguf(header("qwen3moe"), NAMES)
    found = shapes(spec)
    assert found["blk.0.ffn_gate_exps.weight"] == (4, 24, 64)
    assert found["blk.0.ffn_down_exps.weight"] == (4, 64, 24)
    assert spec.layers[0].experts is not None
    assert spec.layers[0].experts.per_token == 2


def test_mixtral_is_a_llama_with_experts() -> None:
    spec = describe_gguf(header("llama", expert_count=8, expert_used_count=2), NAMES)
    assert spec.family == "mixtral"
    assert shapes(spec)["blk.3.ffn_up_exps.weight"] == (8, 96, 64)
    assert from_gguf(header("llama", expert_count=8, expert_used_count=2), NAMES).runnable


@pytest.mark.parametrize("split", [False, True])
def test_latent_attention_old_and_new(split: bool) -> None:
    """Files of today keep key and value parts apart, and tell the head's sizes under other names."""
    new = {
        "attention.head_count_kv": 1,
        "attention.key_length": 24,
        "attention.value_length": 16,
        "attention.key_length_mla": 20,
        "attention.value_length_mla": 10,
    }
    names = (*NAMES, "blk.0.attn_k_b.weight") if split else NAMES
    spec = describe_gguf(header("deepseek2", **(new if split else {})), names)
    assert sum(map(spec.kv_elements, spec.layers)) == 4 * (16 + 8)
    assert spec.head_dim == 20
    found = shapes(spec)
    assert ("blk.0.attn_kv_b.weight" in found) is not split
    if split:
        assert found["blk.0.attn_k_b.weight"] == (4, 16, 12)
        assert found["blk.0.attn_v_b.weight"] == (4, 10, 16)


def test_draft_blocks_are_no_layers() -> None:
    spec = describe_gguf(header("glm4moe"), NAMES)
    assert len(spec.layers) == 3
    assert any(tensor.part == "draft" for tensor in spec.tensors)
    assert shapes(spec)["blk.3.nextn.eh_proj.weight"] == (64, 128)


@pytest.mark.parametrize(
    ("architecture", "windows"),
    [
        ("gemma2", [512, None, 512, None]),
        ("gemma3", [512, 512, 512, 512]),
        ("gpt-oss", [128, None, 128, None]),
        ("cohere2", [512, 512, 512, None]),
    ],
)
def test_windows_by_layer(architecture: str, windows: list[int | None]) -> None:
    assert [layer.window for layer in describe_gguf(header(architecture), NAMES).layers] == windows


BAD_FIELDS: list[tuple[str, Any]] = [
    ("block_count", 10**9),
    ("embedding_length", -1),
    ("embedding_length", "wide"),
    ("attention.head_count", 0),
    ("attention.head_count_kv", 3),
    ("context_length", None),
]


@pytest.mark.parametrize(("field", "value"), BAD_FIELDS)
def test_a_bad_field_is_named(field: str, value: Any) -> None:
    def check(architecture: str) -> None:
        with pytest.raises(CheckpointError) as caught:
            describe_gguf(header(architecture, **{field: value}), NAMES)
        assert f"{architecture}.{field}" in str(caught.value)
        assert caught.value.needed

    check_rows(known_gguf_architectures(), check, str)


def windows_of(architecture: str, **changes: Any) -> list[int | None]:
    return [layer.window for layer in describe_gguf(header(architecture, **changes), NAMES).layers]


WINDOW, PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"


@pytest.mark.parametrize("given", [{WINDOW: 0}, {WINDOW: None}, {WINDOW: None, PATTERN: 2}, {PATTERN: 1}])
def test_a_gemma_3_without_windows_rotates_all_layers_alike(given: dict[str, Any]) -> None:
    changes = {"rope.freq_base": 5e5, "rope.freq_base_swa": 1e4, **given}
    spec = describe_gguf(header("gemma3", **changes), NAMES)
    assert [layer.window for layer in spec.layers] == [None] * 4
    assert {spec.rope_of(layer).theta for layer in spec.layers} == {5e5}


@pytest.mark.parametrize("architecture", ["gemma2", "gemma3"])
@pytest.mark.parametrize(
    ("pattern", "slides"),
    [
        (2, [True, False, True, False]),
        (3, [True, True, False, True]),
        (0, [True] * 4),
        ([True, True, False, False], [True, True, False, False]),
        ([0, 1, 0, 1], [False, True, False, True]),
    ],
)
def test_windows_follow_the_header_s_pattern(architecture: str, pattern: Any, slides: list[bool]) -> None:
    assert windows_of(architecture, **{PATTERN: pattern}) == [512 if slide else None for slide in slides]


@pytest.mark.parametrize("architecture", ["gemma2", "gemma3"])
@pytest.mark.parametrize("pattern", [[True] * 3, [True, False, 2, True], [True, False, "yes", True], -1, "every", True])
def test_a_pattern_that_says_nothing_of_a_layer_is_refused(architecture: str, pattern: Any) -> None:
    with pytest.raises(CheckpointError) as caught:
        windows_of(architecture, **{PATTERN: pattern})
    assert caught.value.field == f"{architecture}.{PATTERN}"


def test_gemma_2_has_windows_of_4096_unless_told_and_may_rotate_them_otherwise() -> None:
    assert windows_of("gemma2", **{WINDOW: None}) == [4096, None, 4096, None]
    spec = describe_gguf(header("gemma2", **{"rope.freq_base": 5e5, "rope.freq_base_swa": 2e4}), NAMES)
    assert [spec.rope_of(layer).theta for layer in spec.layers] == [2e4, 5e5, 2e4, 5e5]
    with pytest.raises(CheckpointError) as caught:
        windows_of("gemma2", **{WINDOW: 0})
    assert caught.value.field == f"gemma2.{WINDOW}"


def test_a_llama_with_experts_keeps_its_biases_and_its_rotations() -> None:
    held = ("rope_freqs.weight", *(f"blk.0.attn_{part}.bias" for part in ("q", "k", "v", "output")))
    found = shapes(describe_gguf(header("llama", expert_count=4, expert_used_count=2), (*NAMES, *held)))
    assert found["rope_freqs.weight"] == (8,)
    assert [found[f"blk.3.attn_{part}.bias"] for part in ("q", "k", "v", "output")] == [(64,), (32,), (32,), (64,)]


def lacks(architecture: str, names: tuple[str, ...] = (), **changes: Any) -> tuple[str, ...]:
    return describe_gguf(header(architecture, **changes), (*NAMES, *names)).unsupported


@pytest.mark.parametrize("architecture", ["phi3", "stablelm"])
@pytest.mark.parametrize(("rotating", "runs"), [(0, False), (7, False), (8, True), (16, True)])
def test_dimensions_rotate_in_pairs(architecture: str, rotating: int, runs: bool) -> None:
    found = lacks(architecture, ("blk.0.ffn_norm.weight",), **{"rope.dimension_count": rotating})
    assert [one.partition(":")[0] for one in found] == ([] if runs else [f"{architecture}.rope.dimension_count"])


@pytest.mark.parametrize("held", [("long",), ("short",), (), ("long", "short")])
@pytest.mark.parametrize("said", [True, False])
def test_two_rotations_need_both_of_their_factors(held: tuple[str, ...], said: bool) -> None:
    changes = {"rope.scaling.type": "longrope"} if said else {}
    found = lacks("phi3", tuple(f"rope_factors_{name}.weight" for name in held), **changes)
    runs = len(held) == 2 or not (held or said)
    assert {one.partition(":")[0] for one in found} == (set() if runs else {"phi3.rope.scaling.type"})


def test_a_granite_may_not_rotate_at_all() -> None:
    for given, rotates in ((False, False), (True, True), (None, True)):
        spec = from_gguf(header("granite", **{"rope.scaling.finetuned": given}), NAMES)
        assert {layer.rotates for layer in spec.layers} == {rotates}


@pytest.mark.parametrize("field", ["attention.head_count_kv", "attention.head_count", "feed_forward_length"])
def test_sizes_by_layer_are_refused_in_words(field: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        describe_gguf(header("granite", **{field: [2, 2, 0, 2]}), NAMES)
    assert caught.value.field == f"granite.{field}"
    assert caught.value.found == "a list of 4, one a layer"
