"""Kinds of GGUF files: each counted to what llama.cpp's own tables and logs print for it."""

from __future__ import annotations

from dataclasses import replace

import gguf
import pytest

from holdfast.checkpoints import LAYOUTS
from holdfast.config.parts.gguf_kinds import KINDS, kind_of
from holdfast.errors import ConfigurationError
from holdfast.models import catalogue, describe_config
from holdfast.planner.inputs.question import PlannedModel
from holdfast.planner.models.gguf_mixes import description, layouts_of
from holdfast.planner.models.model_sources import llama_source
from holdfast.planner.models.quantize import quantized_as
from holdfast.planner.models.resolve import resolve_model
from holdfast.units import GIB, MIB


def unquantized(name: str) -> PlannedModel:
    config = {key: value for key, value in catalogue.find(name).config.items() if key != "quantization_config"}
    return PlannedModel(name=name, spec=describe_config(config), origin="catalogue")


def made(name: str, kind: str) -> PlannedModel:
    return quantized_as(unquantized(name), kind)


def file_bytes(model: PlannedModel) -> int:
    return sum(tensor.nbytes for tensor in (model.stored or {}).values())


# The table in tools/quantize/README.md of llama.cpp: Llama 3.1 8B, bits a weight.
BITS = {
    "IQ1_S": 2.0042, "IQ1_M": 2.1460, "IQ2_XXS": 2.3824, "IQ2_XS": 2.5882, "IQ2_S": 2.7403, "IQ2_M": 2.9294,
    "IQ3_XXS": 3.2548, "IQ3_XS": 3.4977, "IQ3_S": 3.6606, "IQ3_M": 3.7628, "IQ4_XS": 4.4597, "IQ4_NL": 4.6818,
    "Q2_K_S": 2.9697, "Q2_K": 3.1593, "Q3_K_S": 3.6429, "Q3_K_M": 3.9960, "Q3_K_L": 4.2979, "Q4_K_S": 4.6672,
    "Q4_K_M": 4.8944, "Q5_K_S": 5.5704, "Q5_K_M": 5.7036, "Q6_K": 6.5633, "Q8_0": 8.5008, "F16": 16.0005,
}  # fmt: skip


@pytest.mark.parametrize(("kind", "bits"), BITS.items())
def test_bits_of_a_weight_as_the_quantizer_prints_them(kind: str, bits: float) -> None:
    model = made("llama-3.1-8b", kind)
    assert file_bytes(model) * 8 / model.spec.parameters == pytest.approx(bits, abs=0.0001)


@pytest.mark.parametrize(
    ("name", "kind", "size"),
    [
        # llama-bench tables in benches/ and docs/ of llama.cpp.
        ("gpt-oss-20b", "MXFP4", 11.27 * GIB), ("gpt-oss-120b", "MXFP4_MOE", 59.02 * GIB),
        ("qwen3-30b-a3b", "Q8_0", 30.25 * GIB), ("qwen3-30b-a3b", "Q4_0", 16.18 * GIB),
        ("qwen2.5-7b", "Q4_K_M", 4.36 * GIB), ("qwen2.5-7b", "Q8_0", 7.54 * GIB),
        ("qwen3-4b", "Q4_0", 2.21 * GIB), ("qwen3-0.6b", "Q4_0", 358.78 * MIB), ("llama-3.2-3b", "Q4_K", 1.87 * GIB),
        ("llama-3.2-1b", "Q4_0", 729.75 * MIB), ("llama-2-7b", "Q4_0", 3.56 * GIB), ("llama-2-13b", "q4_0", 6.86 * GIB),
        # Measured on its main branch in llama.cpp's pull request 8836: head and embedding are one there.
        ("gemma-2-9b", "IQ1_S", 2.21 * GIB), ("gemma-2-9b", "IQ1_M", 2.37 * GIB),
        # Queries, keys and values in one matrix; as publishers list the files.
        ("phi-4", "Q4_K_M", 9.05e9), ("phi-3.5-mini", "Q4_K_M", 2.39e9),
    ],
)  # fmt: skip
def test_sizes_as_logged(name: str, kind: str, size: float) -> None:
    assert file_bytes(made(name, kind)) == pytest.approx(size, rel=0.005)


def test_every_kind_of_the_package_can_be_asked_for() -> None:
    names = {kind.name.removeprefix("MOSTLY_").removeprefix("ALL_") for kind in gguf.LlamaFileType}
    assert names - {"GUESSED"} <= KINDS.keys()
    assert set(KINDS.values()) <= LAYOUTS.keys()
    assert (kind_of("q4_k"), kind_of(" iq2_m "), kind_of("mxfp4"), kind_of("Q9_K")) == (
        "Q4_K_M",
        "IQ2_M",
        "MXFP4",
        None,
    )


@pytest.mark.parametrize(("kind", "bits"), [("TQ1_0", 1.6875), ("TQ2_0", 2.0625), ("MXFP4", 4.25), ("NVFP4", 4.5)])
def test_matrices_of_layers_have_the_type_that_is_asked_for(kind: str, bits: float) -> None:
    model = made("llama-3.1-8b", kind)
    inner = [tensor for tensor in (model.stored or {}).values() if tensor.layout == kind]
    elements = sum(tensor.nbytes * 8 / bits for tensor in inner)
    assert elements == sum(
        tensor.elements for tensor in model.spec.tensors if tensor.linear and tensor.layer is not None
    )


def test_names_that_mean_a_gguf_file_say_so() -> None:
    """NVFP4 and MXFP4 are names of safetensors' formats too."""
    assert description("NVFP4").startswith("a GGUF file")
    assert "compressed-tensors or ModelOpt is not planned" in description("NVFP4")
    assert description("MXFP4_MOE").startswith("a GGUF file")


@pytest.mark.parametrize(
    ("asked", "near"), [("awq-marlin", "awq_marlin"), ("q4km", "Q4_K_M"), ("compressed_tensor", "compressed_tensors")]
)
def test_a_name_that_is_not_known_says_the_nearest(asked: str, near: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        made("llama-3.1-8b", asked)
    assert caught.value.fix == f"did you mean --quantization {near}?"


def test_what_has_no_experts_is_not_made_as_if_it_had() -> None:
    with pytest.raises(ConfigurationError) as caught:
        made("llama-3.1-8b", "MXFP4_MOE")
    assert (caught.value.code, caught.value.field) == ("HF144", "quantization")
    assert made("qwen3-30b-a3b", "MXFP4").made_as == "MXFP4_MOE"


def test_embeddings_of_each_layer_are_no_vectors() -> None:
    """They are a third of Gemma 4 E2B, and once counted as four bytes a number."""
    stored = made("gemma-4-e2b", "Q4_K_M").stored or {}
    assert stored["embed_per_layer"].layout == "Q6_K"


def test_a_file_is_known_by_what_most_of_it_is() -> None:
    def file(kind: str) -> PlannedModel:
        return replace(made("llama-3.1-8b", kind), derived=False, made_as=None)

    for kind in ("Q4_K_M", "IQ3_XS", "MXFP4", "Q6_K"):
        assert quantized_as(file(kind), kind).made_as is None
    with pytest.raises(ConfigurationError, match="is already quantized"):
        quantized_as(file("Q4_K_M"), "Q6_K")  # Which it has too, in a few places.


def test_types_that_go_by_small_blocks_where_rows_are_no_whole_large_ones() -> None:
    """Qwen 2.5 0.5B is 896 wide."""
    layouts = {tensor.name: layout for tensor, layout in layouts_of(unquantized("qwen2.5-0.5b").spec, "IQ2_XS")}
    assert (layouts["layers.0.q"], layouts["embed"]) == ("IQ4_NL", "Q8_0")


# What is said


def test_llama_cpp_reads_mxfp4() -> None:
    source = llama_source(resolve_model("gpt-oss-20b").model, "bfloat16")
    assert str(source.flags["-m"]).endswith("gpt-oss-20b-MXFP4.gguf")
    assert "does not read" not in " ".join(source.notes)
    assert "convert_hf_to_gguf.py" in " ".join(source.notes)


@pytest.mark.parametrize("asked", ["mxfp4", "MXFP4", "MXFP4_MOE"])
def test_what_is_stored_in_mxfp4_stays(asked: str) -> None:
    assert resolve_model("gpt-oss-20b", quantization=asked).decisions[-1].source == "model"


@pytest.mark.parametrize(
    ("kind", "said"),
    [("IQ2_XS", "importance matrix"), ("NVFP4", "--tensor-type 'blk=nvfp4'"), ("Q4_K_M", "convert to or download")],
)
def test_how_a_file_is_made_is_said(kind: str, said: str) -> None:
    assert said in " ".join(llama_source(made("llama-3.1-8b", kind), "bfloat16").notes)
    assert "llama.cpp" in resolve_model("llama-3.1-8b", quantization="Q4_K_M").decisions[-1].reason
    assert "Q8_0" in resolve_model("llama-3.1-8b", quantization="MXFP4").decisions[-1].reason
