"""--quantization against what a checkpoint says: confirmed, made while loading, or refused with both named."""

from __future__ import annotations

import contextlib

import pytest

from holdfast.config.parts.quantization import KERNEL_NAMES, STORED_AS
from holdfast.errors import ConfigurationError
from holdfast.models import QuantSpec, describe_config
from holdfast.planner.inputs.question import PlannedModel
from holdfast.planner.models.quantize import quantized_as
from holdfast.planner.models.requested import requested

AWQ = QuantSpec(method="awq", bits=4, group_size=128)
GPTQ = QuantSpec(method="gptq", bits=4, group_size=128)
INT8 = QuantSpec(method="int8", bits=8, granularity="channel")
FP8 = QuantSpec(method="fp8", bits=8, granularity="tensor")
NF4 = QuantSpec(method="bitsandbytes", bits=4, group_size=64)


@pytest.mark.parametrize(
    ("asked", "stored"),
    [
        (None, None), (None, AWQ), ("awq", AWQ), ("gptq", GPTQ), ("compressed-tensors", INT8),
        ("compressed-tensors", FP8), ("fp8", FP8), ("bitsandbytes", NF4),
    ],
)  # fmt: skip
def test_what_the_checkpoint_says_too_is_confirmed(asked: str | None, stored: QuantSpec | None) -> None:
    found = requested(asked, stored, gguf=False, name="m")
    assert found.made is None
    assert found.decisions == ()


@pytest.mark.parametrize(
    ("asked", "stored"),
    [("awq_marlin", AWQ), ("gptq_bitblas", GPTQ), ("marlin", GPTQ), ("fbgemm_fp8", FP8), ("moe_wna16", GPTQ)],
)
def test_names_of_kernels_are_said_once(asked: str, stored: QuantSpec) -> None:
    (decision,) = requested(asked, stored, gguf=False, name="m").decisions
    assert decision.value == stored.method
    assert decision.reason.startswith(f"{asked} names a kernel of vLLM's for {stored.method}")


@pytest.mark.parametrize(
    ("asked", "made"), [("fp8", "fp8"), ("fp8_per_tensor", "fp8"), ("fp8_per_block", "fp8"), ("int4", "int4")]
)
def test_unquantized_weights_are_quantized_while_loading(asked: str, made: str) -> None:
    found = requested(asked, None, gguf=False, name="m")
    assert found.made == made
    (decision,) = found.decisions
    assert decision.value == made
    assert "while they are loaded" in decision.reason


@pytest.mark.parametrize(
    ("asked", "stored"),
    [("awq", GPTQ), ("gptq_marlin", AWQ), ("fp8", AWQ), ("int4", FP8), ("int4", AWQ), ("mxfp4", NF4), ("gguf", AWQ),
     ("bitsandbytes", FP8), ("moe_wna16", INT8)],
)  # fmt: skip
def test_a_mismatch_names_both_and_the_command_that_works(asked: str, stored: QuantSpec) -> None:
    with pytest.raises(ConfigurationError) as caught:
        requested(asked, stored, gguf=False, name="owner/model")
    error = caught.value
    assert (error.code, error.field) == ("HF144", "quantization")
    assert f"--quantization {asked}" in error.message
    assert stored.method in error.message
    assert error.fix == "leave --quantization out: the checkpoint says how it is stored"


def test_ways_to_write_a_config_are_held_against_its_own_word() -> None:
    """FP8 weights of its own quant_method are no compressed-tensors, though those may hold FP8 too."""
    config = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4,
    }  # fmt: skip
    groups = {"all": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}}
    written = {
        "fp8": {"quant_method": "fp8"},
        "compressed-tensors": {"quant_method": "compressed-tensors", "config_groups": groups},
        "gptq": {"quant_method": "gptq", "bits": 4},
        "auto-round": {"quant_method": "auto_round", "bits": 4},
    }
    specs = {name: describe_config({**config, "quantization_config": one}) for name, one in written.items()}
    for asked, true in (("compressed-tensors", ("compressed-tensors",)), ("auto-round", ("auto-round",))):
        for name, spec in specs.items():
            planned = PlannedModel(name="m", spec=spec, origin="folder")
            if name in true:
                assert requested(asked, spec.quantization, gguf=False, name="m").made is None
                assert quantized_as(planned, asked) is planned
                continue
            with pytest.raises(ConfigurationError, match=asked):
                requested(asked, spec.quantization, gguf=False, name="m")
            with pytest.raises(ConfigurationError, match=r"already quantized|only says"):
                quantized_as(planned, asked)


@pytest.mark.parametrize(
    ("asked", "true"),
    [("w8a8", True), ("int8", True), ("compressed-tensors", True), ("w8a16", False), ("w4a16", False), ("int4", False)],
)
def test_a_scheme_is_held_against_bits_and_inputs(asked: str, true: bool) -> None:
    """Of a checkpoint of compressed-tensors: W8A8 in INT8."""
    stored = QuantSpec(method="int8", bits=8, granularity="channel", inputs="int8", quant_method="compressed-tensors")
    if true:
        assert requested(asked, stored, gguf=False, name="m").made is None
        return
    with pytest.raises(ConfigurationError, match=f"--quantization {asked} does not match m, which has int8") as caught:
        requested(asked, stored, gguf=False, name="m")
    assert caught.value.code == "HF144"


def test_nf4_is_no_int8_of_bitsandbytes() -> None:
    eight = QuantSpec(method="bitsandbytes", bits=8, granularity="channel")
    assert requested("bitsandbytes", eight, gguf=False, name="m").made is None
    with pytest.raises(ConfigurationError, match="nf4 does not match"):
        requested("nf4", eight, gguf=False, name="m")


@pytest.mark.parametrize("asked", ["int8", "w8a8", "w8a16", "Q8_0"])
def test_who_asks_for_eight_bits_is_told_of_fp8(asked: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        requested(asked, None, gguf=False, name="owner/model")
    assert (caught.value.fix or "").startswith("--quantization fp8, ")


@pytest.mark.parametrize(
    "asked", ["awq", "gptq_marlin", "compressed-tensors", "bitsandbytes", "mxfp4", "moe_wna16", "w4a16", "Q4_K_M"]
)
def test_what_only_says_how_files_are_stored_makes_nothing(asked: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        requested(asked, None, gguf=False, name="owner/model")
    assert asked in caught.value.message
    assert (caught.value.fix or "").startswith("--quantization int4, ")


def test_a_gguf_file_is_gguf() -> None:
    assert requested("gguf", None, gguf=True, name="m.gguf").made is None
    for asked in ("fp8", "int4", "awq"):
        with pytest.raises(ConfigurationError, match="blocks of a GGUF file"):
            requested(asked, None, gguf=True, name="m.gguf")
    with pytest.raises(ConfigurationError, match="unquantized weights"):
        requested("gguf", None, gguf=False, name="m")
    assert requested("Q4_K_M", None, gguf=True, name="m-q4_k_m.gguf").made is None
    with pytest.raises(ConfigurationError, match="blocks of a GGUF file"):
        requested("Q8_0", None, gguf=True, name="m-q4_k_m.gguf")


def test_mixed_schemes_are_confirmed_by_any_of_them() -> None:
    mixed = QuantSpec(method="fp8", bits=8, granularity="channel", others=(QuantSpec(method="int4", bits=4),))
    assert requested("compressed-tensors", mixed, gguf=False, name="m").made is None
    with pytest.raises(ConfigurationError, match="fp8 and int4"):
        requested("awq", mixed, gguf=False, name="m")


def test_every_name_is_answered() -> None:
    answered = 0
    for asked in (*STORED_AS, *KERNEL_NAMES):
        for stored in (None, AWQ, GPTQ, INT8, FP8, NF4):
            with contextlib.suppress(ConfigurationError):
                requested(asked, stored, gguf=False, name="m")
                answered += 1
    assert answered > len(STORED_AS) + len(KERNEL_NAMES) - 4, "nearly every name is true of one of these"
