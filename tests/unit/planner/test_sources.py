"""Where engines take a planned model from: what is published is named, what is not there is said."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.planner.advice.remedies import ways_out
from holdfast.planner.compat.vllm_release import parse_vllm
from holdfast.planner.engines.commands import commands
from holdfast.planner.fit.search import Question, fit
from holdfast.planner.models.model_sources import llama_source
from holdfast.planner.models.quantize import quantized_as
from holdfast.planner.models.resolve import resolve_model

Ask = Callable[..., Question]


def in_awq(question: Question) -> Question:
    return replace(question, model=quantized_as(question.model, "awq"))


def test_a_checkpoint_that_is_published_is_named(ask: Ask) -> None:
    by_engine = commands(fit(in_awq(ask("qwen3-32b", "l40s"))), sequences=4)
    for engine in ("vllm", "sglang", "holdfast"):
        assert "Qwen/Qwen3-32B-AWQ" in by_engine[engine].text
        assert "TO-BE-MADE" not in by_engine[engine].text
        assert by_engine[engine].available
    unknown = commands(fit(in_awq(ask("qwen3-4b", "l40s"))), sequences=4)["vllm"]
    assert "./TO-BE-MADE/Qwen3-4B-AWQ" in unknown.text
    assert not unknown.available


def in_fp8(question: Question) -> Question:
    return replace(question, model=quantized_as(question.model, "fp8"))


@pytest.mark.parametrize("version", ["==0.10", "==0.27"])
def test_fp8_that_is_published_is_not_made_again(ask: Ask, version: str) -> None:
    by_engine = commands(fit(in_fp8(ask("qwen3-30b-a3b", "l40s"))), sequences=4, vllm=parse_vllm(version))
    for engine in ("vllm", "sglang"):
        assert "Qwen/Qwen3-30B-A3B-FP8" in by_engine[engine].text
        assert "--quantization" not in by_engine[engine].text
        assert by_engine[engine].available


@pytest.mark.parametrize(
    ("gpu", "version", "available", "said"),
    [
        ("l4", "==0.15", False, "22.70 GiB per GPU"),
        ("l4", "==0.16", True, None),
        ("a100-40", "==0.15", True, "before 0.16 loads the full unquantized weights"),
    ],
)
def test_weights_must_fit_before_fp8_is_made_of_them(
    ask: Ask, gpu: str, version: str, available: bool, said: str | None
) -> None:
    """vLLM allocates each matrix when it is read since 0.16; SGLang allocates all of them in every release."""
    found = fit(in_fp8(ask("gemma-3-12b", gpu, max_model_len=4096)))
    by_engine = commands(found, sequences=4, vllm=parse_vllm(version))
    command = by_engine["vllm"]
    notes = " ".join(command.notes)
    assert command.available == available, notes
    assert ("full unquantized weights" in notes) == (said is not None)
    assert said is None or said in notes
    assert by_engine["sglang"].available == (gpu != "l4")
    assert "SGLang loads the full unquantized weights" in " ".join(by_engine["sglang"].notes)


def test_a_smaller_model_says_that_it_is_quantized_too(ask: Ask) -> None:
    (way,) = [way for way in ways_out(fit(in_awq(ask("qwen3-32b", "rtx3060")))) if way.kind == "smaller_model"]
    assert "in AWQ too" in way.change
    assert way.fit.question.model.made_as == "awq"
    (plain,) = [way for way in ways_out(fit(ask("qwen3-32b", "rtx3060"))) if way.kind == "smaller_model"]
    assert "too" not in plain.change


@pytest.mark.parametrize("entry", ["llama-3.1-70b-awq", "llama-3.1-8b-gptq", "llama-3.1-8b-w4a16", "qwen3-8b-fp8"])
def test_a_gguf_is_not_named_after_another_quantizer(ask: Ask, entry: str) -> None:
    name = str(llama_source(ask(entry, "h100-80").model, "bfloat16").flags["-m"]).lower()
    assert name.endswith(("-q4_k_m.gguf", "-q8_0.gguf"))
    assert not any(mark in name for mark in ("awq", "gptq", "int4", "w4a16", "fp8"))


def test_a_folder_without_weights_says_so(ask: Ask, tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    question = replace(ask("llama-3.1-8b", "l4"), model=resolve_model(str(tmp_path)).model)
    by_engine = commands(fit(question), sequences=4)
    for engine in ("holdfast", "vllm", "sglang"):
        assert not by_engine[engine].available
        assert any("no weights" in note for note in by_engine[engine].notes)
