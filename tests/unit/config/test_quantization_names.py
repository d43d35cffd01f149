"""--quantization as vLLM takes it: names, spellings, and what is refused by name."""

from __future__ import annotations

import pytest

from holdfast.config.engine import EngineConfig
from holdfast.config.parts.quantization import KERNEL_NAMES, MADE_WHILE_LOADING, STORED_AS, method
from holdfast.errors import ConfigurationError


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        ("awq", "awq"),
        ("AWQ", "awq"),
        (" gptq_marlin ", "gptq_marlin"),
        ("compressed_tensors", "compressed-tensors"),
        ("bnb", "bitsandbytes"),
        ("nf4", "bitsandbytes"),
        ("W4A16", "compressed-tensors"),
        ("auto", None),
        ("None", None),
        ("", None),
    ],
)
def test_names_as_people_write_them(written: str, kept: str | None) -> None:
    assert method("--quantization", written) == kept
    assert EngineConfig.from_arguments(quantization=written).asked_quantization == kept


@pytest.mark.parametrize("written", ["aqlm", "hqq", "nvfp4", "modelopt_fp4", "torchao", 4, True])
def test_what_is_not_read_is_refused_with_what_runs(written: object) -> None:
    with pytest.raises(ConfigurationError) as caught:
        EngineConfig.from_arguments(quantization=written)
    assert str(written) in caught.value.message
    assert "AWQ, GPTQ, FP8" in (caught.value.fix or "")
    assert "--quantization int4" in (caught.value.fix or "")
    assert "compressed-tensors" in (caught.value.needed or "")
    # A name of vLLM's is known, and said to be one that is not there; others are not known to anybody.
    assert ("no such method" in caught.value.message) == (written in (4, True))


@pytest.mark.parametrize(
    ("written", "message", "fix"),
    [
        ("awk", "no such method", "did you mean --quantization awq?"),
        ("gptq_marlim", "no such method", "did you mean --quantization gptq_marlin?"),
        ("q4_k_m", "a type of GGUF files", "name such a file instead, or owner/name-GGUF:Q4_K_M"),
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
    for settings in ({}, {"quantization": "bitsandbytes"}):
        config = EngineConfig.from_arguments(load_format="bitsandbytes", **settings)
        assert config.asked_quantization == "bitsandbytes"


def test_settings_of_vllm_around_it() -> None:
    EngineConfig.from_arguments(allow_deprecated_quantization=True, quantization_config=None)
    with pytest.raises(ConfigurationError, match="have no options"):
        EngineConfig.from_arguments(quantization_config={"linear": "fp8"})
