"""Weights against the config they lie beside, for every family: what agrees is taken, what contradicts is refused.

Checkpoints are made up here from a spec's own names, in memory; what is changed is the one thing a test is about.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoints import (
    Checkpoint,
    StoredTensor,
    as_stored,
    match,
    packing_of,
    require_agreement,
    stored_parts,
)
from holdfast.errors import CheckpointError
from holdfast.models import ModelSpec, TensorSpec, catalogue, describe_config
from holdfast.models.registry import FAMILIES
from holdfast.planner.inputs.question import PlannedModel
from holdfast.planner.sizing.sharded_weights import total_bytes, weights_of

SMALL: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
QWEN: dict[str, Any] = {**SMALL, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
LLAMA: dict[str, Any] = {**SMALL, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
MIXTRAL: dict[str, Any] = {
    **SMALL,
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}
ARCHITECTURES = {entry.config["architectures"][0] for entry in catalogue.entries()}
IN_CATALOGUE = [family for family, names in FAMILIES.items() if ARCHITECTURES.intersection(names.architectures)]


def smallest(family: str) -> ModelSpec:
    """In the catalogue: names of experts go into the ten thousands."""
    known = FAMILIES[family].architectures
    specs = [describe_config(one.config) for one in catalogue.entries() if one.config["architectures"][0] in known]
    return min(specs, key=lambda spec: spec.parameters)


def stored(name: str, shape: tuple[int, ...], layout: str = "BF16", size: int = 2) -> StoredTensor:
    return StoredTensor(name, tuple(shape), layout, Path("model.safetensors"), 0, prod(shape) * size)


def on_disk(spec: ModelSpec) -> dict[str, StoredTensor]:
    """As a quantizer or the maker would write it, without the parts that are not looked at."""
    found = {}
    for tensor in spec.tensors:
        if tensor.optional:
            continue
        packing = packing_of(spec.quantization, tensor, "bfloat16") if spec.quantization is not None else None
        for name, shape in tensor.in_safetensors():
            if packing is None:
                found[name] = stored(name, shape)
                continue
            *stacked, rows, columns = tensor.shape[1:] if "{expert}" in tensor.hf_name else tensor.shape
            for part in stored_parts(packing, rows, columns):
                join = "_" if packing.method == "mxfp4" else "."
                whole = f"{name.removesuffix('.weight')}{join}{part.name}"
                found[whole] = stored(whole, (*stacked, *part.shape), part.layout, 1)
    return found


def checkpoint(spec: ModelSpec, change: Callable[[dict[str, StoredTensor]], Any] = lambda _: None) -> Checkpoint:
    tensors = on_disk(spec)
    change(tensors)
    return Checkpoint(tensors, "safetensors")


def refused(config: dict[str, Any], change: Callable[[dict[str, StoredTensor]], Any]) -> CheckpointError:
    spec = describe_config(config)
    with pytest.raises(CheckpointError) as caught:
        require_agreement(spec, checkpoint(spec, change))
    assert caught.value.fix
    return caught.value


def without(*parts: str) -> Callable[[dict[str, StoredTensor]], None]:
    def change(tensors: dict[str, StoredTensor]) -> None:
        for name in [name for name in tensors if any(part in name for part in parts)]:
            del tensors[name]

    return change


def reshaped(part: str, shape: tuple[int, ...]) -> Callable[[dict[str, StoredTensor]], None]:
    def change(tensors: dict[str, StoredTensor]) -> None:
        name = next(name for name in tensors if part in name)
        tensors[name] = replace(tensors[name], shape=shape)

    return change


def repeated(part: str, other: str) -> Callable[[dict[str, StoredTensor]], None]:
    def change(tensors: dict[str, StoredTensor]) -> None:
        for name in [name for name in tensors if part in name]:
            again = name.replace(part, other)
            tensors[again] = replace(tensors[name], name=again)

    return change


# What agrees


@pytest.mark.parametrize("family", IN_CATALOGUE)
def test_every_family_agrees_with_its_own_weights(family: str) -> None:
    spec = smallest(family)
    assert require_agreement(spec, checkpoint(spec)) == ()


@pytest.mark.parametrize(
    "name",
    [
        "qwen2.5-0.5b-awq",
        "qwen2.5-7b-gptq-int4",
        "llama-3.1-8b-fp8",
        "llama-3.1-8b-int8",
        "llama-3.1-8b-w4a16",
        "qwen3-30b-a3b-fp8",
        "gpt-oss-20b",
    ],
)
def test_every_quantization_agrees_with_its_own_weights(name: str) -> None:
    spec = describe_config(catalogue.find(name).config)
    assert require_agreement(spec, checkpoint(spec)) == ()


def test_draft_layers_may_be_there_or_not() -> None:
    spec = describe_config({**catalogue.find("deepseek-v3").config, "num_hidden_layers": 4})
    whole, without_drafts = checkpoint(spec), checkpoint(spec, without("model.layers.4."))
    assert len(whole.tensors) > len(without_drafts.tensors)
    assert require_agreement(spec, whole) == require_agreement(spec, without_drafts) == ()


def test_a_matrix_that_the_quantizer_left_alone_may_be_plain() -> None:
    spec = describe_config({**QWEN, "quantization_config": AWQ})

    def change(tensors: dict[str, StoredTensor]) -> None:
        without("layers.0.mlp.down_proj")(tensors)
        plain = stored("model.layers.0.mlp.down_proj.weight", (256, 512))
        tensors[plain.name] = plain

    assert require_agreement(spec, checkpoint(spec, change)) == ()


# What contradicts


@pytest.mark.parametrize("config", [QWEN, LLAMA, MIXTRAL], ids=["qwen", "llama", "mixtral"])
@pytest.mark.parametrize(
    ("change", "field"),
    [
        (repeated(".layers.1.", ".layers.2."), "num_hidden_layers"),
        (repeated(".layers.1.", ".layers.99999999999999."), "num_hidden_layers"),
        (without(".layers.1."), "num_hidden_layers"),
        (without("lm_head"), "tie_word_embeddings"),
        (without("layers.1.input_layernorm"), "architectures"),
        (reshaped("embed_tokens", (1024, 256)), "vocab_size"),
        (reshaped("embed_tokens", (512, 128)), "hidden_size"),
        (reshaped("lm_head", (1024, 256)), "vocab_size"),
        (reshaped("k_proj.weight", (256, 256)), "num_key_value_heads"),
        (reshaped("q_proj.weight", (512, 256)), "num_attention_heads"),
        (reshaped("model.norm", (128,)), "final_norm"),
    ],
)
def test_contradictions_name_the_field(
    config: dict[str, Any], change: Callable[[dict[str, StoredTensor]], Any], field: str
) -> None:
    assert refused(config, change).field == field


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (repeated(".experts.3.", ".experts.4."), "num_local_experts"),
        (without("layers.1.block_sparse_moe.experts.3."), "num_local_experts"),
        (reshaped("experts.2.w1", (256, 256)), "intermediate_size"),
    ],
)
def test_experts_are_counted(change: Callable[[dict[str, StoredTensor]], Any], field: str) -> None:
    assert refused(MIXTRAL, change).field == field


def test_packed_matrices_are_measured() -> None:
    """The padded MLP of a quantized model beside the config of the plain one."""
    spec = describe_config({**QWEN, "quantization_config": AWQ})
    padded = describe_config({**QWEN, "quantization_config": AWQ, "intermediate_size": 640})
    with pytest.raises(CheckpointError) as caught:
        require_agreement(spec, checkpoint(padded))
    assert caught.value.field == "intermediate_size"
    assert "qweight" in caught.value.message


def test_packed_matrices_may_be_turned() -> None:
    """Some quantizers write [out, in / 8] where most write [in, out / 8]."""
    spec = describe_config({**QWEN, "quantization_config": AWQ})
    assert require_agreement(spec, checkpoint(spec, reshaped("0.mlp.up_proj.qweight", (512, 32)))) == ()


# What the config says of how numbers are stored

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
INT4 = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "strategy": "group", "group_size": 128}}},
}
BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_4bit": True}


@pytest.mark.parametrize("config", [QWEN, LLAMA, MIXTRAL], ids=["qwen", "llama", "mixtral"])
@pytest.mark.parametrize("quantization", [AWQ, GPTQ, FP8, INT4, BITSANDBYTES], ids=lambda table: table["quant_method"])
def test_plain_weights_under_a_quantization_are_refused(config: dict[str, Any], quantization: dict[str, Any]) -> None:
    spec = describe_config({**config, "quantization_config": quantization})
    with pytest.raises(CheckpointError, match="but they are not") as caught:
        require_agreement(spec, checkpoint(describe_config(config)))
    assert caught.value.field == "quantization_config"
    assert "BF16" in str(caught.value.found)
    assert caught.value.fix


@pytest.mark.parametrize(("said", "there"), [(AWQ, INT4), (FP8, AWQ), (INT4, GPTQ), (GPTQ, FP8), (BITSANDBYTES, FP8)])
def test_weights_of_another_quantizer_are_refused(said: dict[str, Any], there: dict[str, Any]) -> None:
    spec = describe_config({**LLAMA, "quantization_config": said})
    with pytest.raises(CheckpointError, match="are not quantized with") as caught:
        require_agreement(spec, checkpoint(describe_config({**LLAMA, "quantization_config": there})))
    assert caught.value.field == "quant_method"


@pytest.mark.parametrize(("said", "there"), [(GPTQ, AWQ), (AWQ, GPTQ)], ids=["awq under gptq", "gptq under awq"])
def test_awq_and_gptq_are_told_apart_by_what_they_pack(said: dict[str, Any], there: dict[str, Any]) -> None:
    spec = describe_config({**LLAMA, "quantization_config": said})
    with pytest.raises(CheckpointError) as caught:
        require_agreement(spec, checkpoint(describe_config({**LLAMA, "quantization_config": there})))
    assert (caught.value.code, caught.value.field) == ("HF230", "quant_method")


FP8_BLOCKS = {**FP8, "weight_block_size": [128, 128]}
INT4_64 = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "strategy": "group", "group_size": 64}}},
}


@pytest.mark.parametrize(
    ("said", "there", "field"),
    [
        ({**GPTQ, "group_size": 64}, GPTQ, "group_size"),
        ({**GPTQ, "group_size": -1}, GPTQ, "group_size"),
        ({**GPTQ, "bits": 8}, GPTQ, "bits"),
        ({**AWQ, "group_size": 64}, AWQ, "group_size"),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, AWQ, "q_group_size"),
        (INT4_64, INT4, "group_size"),
        (FP8_BLOCKS, FP8, "weight_block_size"),
        (FP8, FP8_BLOCKS, "weight_block_size"),
        ({**FP8, "weight_block_size": [64, 64]}, FP8_BLOCKS, "weight_block_size"),
        ({"quant_method": "fbgemm_fp8"}, FP8, "quant_method"),
    ],
)
def test_scales_of_other_groups_than_the_config_says_are_refused(
    said: dict[str, Any], there: dict[str, Any], field: str
) -> None:
    spec = describe_config({**LLAMA, "quantization_config": said})
    with pytest.raises(CheckpointError) as caught:
        require_agreement(spec, checkpoint(describe_config({**LLAMA, "quantization_config": there})))
    assert (caught.value.code, caught.value.field) == ("HF230", field)
    assert "_proj" in str(caught.value.found)
    assert caught.value.fix


def test_groups_may_differ_where_modules_have_settings_of_their_own() -> None:
    own = {**GPTQ, "dynamic": {"+:.*down_proj.*": {"group_size": 64}}}
    spec = describe_config({**LLAMA, "quantization_config": own})
    there = checkpoint(describe_config({**LLAMA, "quantization_config": {**GPTQ, "group_size": 64}}))
    assert require_agreement(spec, there) == ()


def test_one_scale_of_a_matrix_may_be_written_without_a_dimension() -> None:
    spec = describe_config({**LLAMA, "quantization_config": FP8})
    assert require_agreement(spec, checkpoint(spec, reshaped("q_proj.weight_scale", ()))) == ()


def test_packed_weights_that_the_config_does_not_tell_of_are_said() -> None:
    packed = checkpoint(describe_config({**LLAMA, "quantization_config": GPTQ}))
    (note,) = require_agreement(describe_config(LLAMA), packed)
    assert "quantization_config" in note


@pytest.mark.parametrize("quantization", [AWQ, GPTQ], ids=["awq", "gptq"])
def test_groups_that_do_not_divide_a_row_are_refused(quantization: dict[str, Any]) -> None:
    """A width of 512 in groups of 96: with the headers, and from the config alone."""
    good = describe_config({**LLAMA, "quantization_config": quantization})
    bad = describe_config({**LLAMA, "quantization_config": {**quantization, "group_size": 96}})
    with pytest.raises(CheckpointError) as caught:
        require_agreement(bad, checkpoint(good))
    assert (caught.value.field, "96" in str(caught.value.needed)) == ("group_size", True)
    assert "qweight" in str(caught.value.found)
    with pytest.raises(CheckpointError) as caught:
        weights_of(PlannedModel(name="x", spec=bad, origin="folder"), dtype="bfloat16")
    assert caught.value.field == "group_size"


def test_two_types_that_differ_are_refused() -> None:
    with pytest.raises(CheckpointError) as caught:
        describe_config({**LLAMA, "dtype": "float32", "torch_dtype": "bfloat16"})
    assert caught.value.field == "torch_dtype"
    assert "float32" in str(caught.value.needed)
    assert describe_config({**LLAMA, "dtype": "float16", "torch_dtype": "torch.float16"}).stored_dtype == "float16"


@pytest.mark.parametrize(
    ("said", "layout", "dtype"),
    [("bfloat16", "F32", "float32"), ("float32", "BF16", "bfloat16"), ("bfloat16", "F16", "bfloat16")],
)
def test_weights_of_another_type_are_believed_and_said(said: str, layout: str, dtype: str) -> None:
    spec = describe_config({**LLAMA, "dtype": said})
    held = {name: stored(name, tensor.shape, layout) for name, tensor in on_disk(spec).items()}
    found, (note,) = as_stored(spec, held)
    assert found.stored_dtype == dtype
    assert said in note
    assert as_stored(spec, {}) == (spec, ())
    quantized = describe_config({**LLAMA, "dtype": said, "quantization_config": AWQ})
    assert as_stored(quantized, held) == (quantized, ()), "what is left of a quantized model proves nothing"


def test_the_engine_refuses_more_layers_too() -> None:
    spec = describe_config(LLAMA)
    assert match(spec, checkpoint(spec))
    with pytest.raises(CheckpointError, match="more layers"):
        match(spec, checkpoint(spec, repeated(".layers.1.", ".layers.2.")))


def test_the_engine_refuses_a_quantization_that_is_not_there_or_not_told_too() -> None:
    said, plain = describe_config({**LLAMA, "quantization_config": AWQ}), describe_config(LLAMA)
    with pytest.raises(CheckpointError, match="but they are not"):
        match(said, checkpoint(plain))
    with pytest.raises(CheckpointError, match="lacks") as caught:
        match(plain, checkpoint(said))
    assert "quantize_config.json" in (caught.value.fix or "")


@pytest.mark.parametrize("model_type", ["mixtral", "qwen2", "gpt_oss"])
def test_a_config_of_two_families_is_refused(model_type: str) -> None:
    with pytest.raises(CheckpointError, match="two families") as caught:
        describe_config({**LLAMA, "model_type": model_type})
    assert caught.value.field == "model_type"


@pytest.mark.parametrize("model_type", ["llama", "mistral", "makers_own", None])
def test_a_type_of_the_same_family_or_of_none_is_taken(model_type: Any) -> None:
    assert describe_config({**LLAMA, "model_type": model_type}).family == "llama"


# Tied embeddings


@pytest.mark.parametrize("config", [QWEN, LLAMA], ids=["qwen", "llama"])
def test_a_head_beside_tied_embeddings_is_said_and_not_counted(config: dict[str, Any]) -> None:
    tied = describe_config({**config, "tie_word_embeddings": True})
    plain, doubled = checkpoint(tied), Checkpoint(on_disk(describe_config(config)), "safetensors")
    assert len(doubled.tensors) == len(plain.tensors) + 1
    (note,) = require_agreement(tied, doubled)
    assert "lm_head.weight" in note

    def counted(held: Checkpoint) -> int:
        model = PlannedModel(name="x", spec=tied, origin="folder", stored=held.tensors, format="safetensors")
        return total_bytes(weights_of(model, dtype="bfloat16"))

    assert counted(doubled) == counted(plain) == 2 * tied.parameters


# GGUF


def gguf(spec: ModelSpec, lacking: str = "", **shapes: tuple[int, ...]) -> Checkpoint:
    def one(tensor: TensorSpec) -> StoredTensor:
        return stored(tensor.gguf_name, shapes.get(tensor.name, tensor.shape))

    tensors = (one(tensor) for tensor in spec.tensors if tensor.gguf_name)
    return Checkpoint({tensor.name: tensor for tensor in tensors if tensor.name != lacking}, "gguf")


def test_small_vectors_of_a_gguf_may_have_other_names_and_matrices_may_not() -> None:
    spec = describe_config(QWEN)
    assert require_agreement(spec, gguf(spec)) == ()
    (note,) = require_agreement(spec, gguf(spec, lacking="blk.1.attn_norm.weight"))
    assert "1 norms and biases" in note
    with pytest.raises(CheckpointError, match=r"lacks 1 of the"):
        require_agreement(spec, gguf(spec, lacking="blk.1.ffn_up.weight"))
    with pytest.raises(CheckpointError) as caught:
        require_agreement(spec, gguf(spec, embed=(1024, 256)))
    assert caught.value.field == "Qwen2ForCausalLM.vocab_size"
