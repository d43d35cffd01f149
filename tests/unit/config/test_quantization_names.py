"""--quantization as vLLM takes it: names, spellings, and what is refused by name."""

from __future__ import annotations

import pytest

from holdfast.config.engine import EngineConfig
from holdfast.config.parts.quantization import KERNEL_NAMES, MADE_WHILE_LOADING, READ_FORMATS, STORED_AS, method
from holdfast.config.plan import PlanConfig
from holdfast.errors import ConfigurationError


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        ("awq", "awq"),
        ("AWQ", "awq"),
        (" gptq_marlin ", "gptq_marlin"),
        ("compressed_tensors", "compressed-tensors"),
        ("bnb", "bitsandbytes"),
        ("nf4", "nf4"),
        ("W4A16", "w4a16"),
        ("int8", "int8"),
        ("modelopt_fp4", "modelopt_fp4"),
        ("q4_k_m", "Q4_K_M"),
        ("Q4_K", "Q4_K_M"),
        ("auto", None),
        ("None", None),
        ("", None),
    ],
)
def test_names_as_people_write_them(written: str, kept: str | None) -> None:
    assert method("--quantization", written) == kept
    assert EngineConfig.from_arguments(quantization=written).asked_quantization == kept
    planned = PlanConfig.from_arguments(quantization=written).quantization
    assert planned == (None if kept is None else written.strip()), "the same names, repeated as they were written"


@pytest.mark.parametrize("written", ["aqlm", "hqq", "modelopt_mxfp8", "torchao", 4, True])
@pytest.mark.parametrize("config", [EngineConfig, PlanConfig])
def test_what_is_not_read_is_refused_with_what_runs(config: type[EngineConfig | PlanConfig], written: object) -> None:
    with pytest.raises(ConfigurationError) as caught:
        config.from_arguments(quantization=written)
    assert caught.value.code == "HF144"
    assert str(written) in caught.value.message
    assert (caught.value.fix or "").startswith("leave --quantization out")
    assert "with fp8 or int4" in (caught.value.fix or "")
    for name in (*READ_FORMATS, "w4a16", "awq_marlin", "Q4_K_M"):
        assert name in (caught.value.needed or "")
    assert "nvfp4" not in (caught.value.needed or "")
    # A name of vLLM's is known, and said to be one that is not there; others are not known to anybody.
    assert ("no such method" in caught.value.message) == (written in (4, True))


@pytest.mark.parametrize(
    ("written", "message", "fix"),
    [
        ("awk", "no such method", "did you mean --quantization awq?"),
        ("gptq_marlim", "no such method", "did you mean --quantization gptq_marlin?"),
        ("q4km", "no such method", "did you mean --quantization Q4_K_M?"),
    ],
)
def test_what_may_be_meant_is_said(written: str, message: str, fix: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        method("--quantization", written)
    assert caught.value.fix == fix


def test_every_kernel_name_is_of_a_method() -> None:
    assert set(KERNEL_NAMES.values()) <= set(STORED_AS)
    assert set(MADE_WHILE_LOADING) <= set(STORED_AS)
    assert not set(KERNEL_NAMES) & set(STORED_AS)


def test_bitsandbytes_as_older_commands_say_it() -> None:
    for settings in ({}, {"quantization": "bitsandbytes"}, {"quantization": "nf4"}):
        config = EngineConfig.from_arguments(load_format="bitsandbytes", **settings)
        assert config.asked_quantization == "bitsandbytes"


def test_settings_of_vllm_around_it() -> None:
    EngineConfig.from_arguments(allow_deprecated_quantization=True, quantization_config=None)
    with pytest.raises(ConfigurationError, match="have no options"):
        EngineConfig.from_arguments(quantization_config={"linear": "fp8"})
