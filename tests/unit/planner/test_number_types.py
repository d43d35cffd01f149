"""What is computed in where nobody says: one rule, whoever asks, and a reason that is true of the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from named_gpus import device_of

from holdfast.errors import ConfigurationError
from holdfast.hardware.probe import KERNEL_VARIANTS
from holdfast.planner.engines.commands import commands
from holdfast.planner.fit.search import Plan, Question, fit
from holdfast.planner.inputs.machine import Asked, machine_of
from holdfast.planner.inputs.question import Device
from holdfast.planner.models.quantize import quantized_as
from holdfast.planner.report.answer import answer
from holdfast.planner.sizing.dtype import check_type
from holdfast.units import GIB

Ask = Callable[..., Question]
BF16_CPU, PLAIN_CPU = frozenset({"avx512_bf16"}), frozenset({"avx2"})
SAPPHIRE_RAPIDS = KERNEL_VARIANTS["amx"] | {"amx_bf16", "avx512_bf16"}
GRAVITON = frozenset({"asimd", "asimddp", "bf16"})


def said(found: Plan) -> str:
    (decision,) = [decision for decision in found.decisions if decision.field == "dtype"]
    assert decision.value == found.dtype
    return decision.reason


@pytest.mark.parametrize(
    ("features", "dtype", "reason"),
    [
        (BF16_CPU, "bfloat16", "this CPU multiplies bfloat16 in hardware"),
        (PLAIN_CPU, "float32", "this CPU has no bfloat16 instructions; emulation is many times slower"),
    ],
)
def test_on_a_cpu(ask: Ask, cpu: Callable[..., Device], features: frozenset[str], dtype: str, reason: str) -> None:
    question = ask("smollm2-135m", device=cpu(256))
    found = fit(replace(question, machine=replace(question.machine, cpu_features=features)))
    assert found.dtype == dtype
    assert said(found) == reason


@pytest.mark.parametrize(
    ("model", "features", "kernels", "expand", "dtype"),
    [
        ("llama-3.1-8b-awq", SAPPHIRE_RAPIDS, True, "auto", "float32"),
        ("llama-3.1-8b-awq", SAPPHIRE_RAPIDS, True, "never", "float32"),
        ("llama-3.1-8b-awq", SAPPHIRE_RAPIDS, True, "always", "bfloat16"),
        ("llama-3.1-8b-awq", SAPPHIRE_RAPIDS, False, "auto", "bfloat16"),
        ("llama-3.1-8b-awq", GRAVITON, True, "auto", "float32"),
        ("llama-3.1-8b Q4_K_M", SAPPHIRE_RAPIDS, True, "auto", "float32"),
        ("llama-3.1-8b Q4_K_M", GRAVITON, True, "auto", "float32"),
        ("llama-3.1-8b Q4_K_M", BF16_CPU, True, "auto", "bfloat16"),
        ("llama-3.1-8b", SAPPHIRE_RAPIDS, True, "auto", "bfloat16"),
    ],
)
def test_quantized_weights_are_not_expanded_for_bfloat16(
    ask: Ask, cpu: Callable[..., Device], model: str, features: frozenset[str], kernels: bool, expand: str, dtype: str
) -> None:
    """Where compiled kernels multiply them as they are, which they do in float32."""
    name, _, kind = model.partition(" ")
    question = ask(name, device=cpu(400, 400), expand_weights=expand, max_model_len=2048)
    if kind:
        question = replace(question, model=quantized_as(question.model, kind))
    machine = replace(question.machine, cpu_features=features, compiled_kernels=kernels)
    found = fit(replace(question, machine=machine))
    assert found.dtype == found.kv_dtype == dtype
    assert ("multiply quantized weights as they are" in said(found)) == (dtype == "float32")
    if dtype == "float32":
        assert not found.engine.expand_weights


@pytest.mark.parametrize(
    ("features", "kind", "reasons"),
    [
        (BF16_CPU, None, ["Holdfast does not run this model: vLLM, which does, uses the model's dtype"]),
        (PLAIN_CPU, None, ["uses the model's dtype", "emulation is many times slower"]),
        (PLAIN_CPU, "Q4_K_M", ["llama.cpp, which does, stores KV in 16 bits"]),
    ],
)
def test_on_a_cpu_a_model_that_others_run(
    ask: Ask, cpu: Callable[..., Device], features: frozenset[str], kind: str | None, reasons: list[str]
) -> None:
    """In what they take, not in what this engine would: it would be twice as large."""
    question = ask("qwen3-8b", device=cpu(22), runs_here=False)
    if kind is not None:
        question = replace(question, model=quantized_as(question.model, kind))
    found = fit(replace(question, machine=replace(question.machine, cpu_features=features)))
    assert found.dtype == found.kv_dtype == "bfloat16"
    assert found.fits
    assert all(reason in said(found) for reason in reasons)


def test_the_context_that_vllm_is_told_on_a_cpu_is_in_its_whole_gib(ask: Ask, cpu: Callable[..., Device]) -> None:
    found = fit(ask("qwen3-8b", device=cpu(22.5), runs_here=False))
    words = commands(found, sequences=4)["vllm"].text.split()
    space, length = int(words[0].partition("=")[2]) * GIB, int(words[words.index("--max-model-len") + 1])
    assert found.ranks[0].kv.sequence_bytes(length) <= space < found.ranks[0].room_bytes
    assert length < found.limits.max_model_len


@pytest.mark.parametrize(
    ("model", "gpu", "dtype", "reason"),
    [
        ("llama-3.1-8b", "l4", "bfloat16", "the model's dtype"),
        ("llama-3.1-8b", "t4", "float16", "does not support bfloat16"),
        ("llama-2-7b", "l4", "float16", "the model's dtype"),
        ("llama-2-7b", "t4", "float16", "the model's dtype"),
    ],
)
def test_on_a_gpu(ask: Ask, model: str, gpu: str, dtype: str, reason: str) -> None:
    found = fit(ask(model, gpu))
    assert found.dtype == dtype
    assert reason in said(found)


@pytest.mark.parametrize("architecture", ["Gemma2ForCausalLM", "gemma3"])
def test_what_outgrows_float16_is_not_computed_in_it(ask: Ask, architecture: str) -> None:
    """Stored in float16 or on a GPU without bfloat16; and it is refused where it is asked for."""
    question = ask("llama-3.1-8b", gpu="h100")
    spec = replace(question.model.spec, architecture=architecture, stored_dtype="float16")
    question = replace(question, model=replace(question.model, spec=spec))
    assert fit(question).dtype == "bfloat16"
    on_t4 = replace(question, machine=ask("llama-3.1-8b", gpu="t4").machine)
    assert fit(on_t4).dtype == "float32"
    for asked in ("half", "float16"):
        with pytest.raises(ConfigurationError) as refused:
            check_type(asked, spec)
        assert (refused.value.code, refused.value.field) == ("HF129", "dtype")
    check_type("bfloat16", spec)
    check_type("half", replace(spec, architecture="LlamaForCausalLM"))


def test_short_names_are_the_same_types(ask: Ask, cpu: Callable[..., Device]) -> None:
    assert fit(ask("llama-3.1-8b", "l4", dtype="half")).dtype == "float16"
    assert fit(ask("smollm2-135m", device=cpu(8), dtype="float")).dtype == "float32"


def test_the_default_share_of_a_version_is_named(ask: Ask) -> None:
    question = replace(ask("llama-3.1-8b", "l4"), machine=machine_of(Asked(vram="40GiB")).machine)
    (note,) = [note for note in answer(question, engine="vllm==0.26").commands["vllm"].notes if "--vram" in note]
    assert "default fraction, 0.92, free" in note


def test_gemma_in_bfloat16_on_a_cpu(ask: Ask, cpu: Callable[..., Device]) -> None:
    """Its norms stay in float32, whatever its matrices are kept in."""
    found = fit(ask("gemma-3-270m", device=cpu(64), dtype="bfloat16"))
    assert found.fits
    assert found.dtype == "bfloat16"


def test_a_gpu_without_bfloat16_is_left_out_where_it_makes_all_others_wider(ask: Ask) -> None:
    """Of a model that outgrows float16: another GPU shall not take away what there was."""
    alone = ask("gemma-3-12b", "rtx4090")
    both = replace(alone, machine=replace(alone.machine, devices=(device_of("t4", 0), device_of("rtx4090", 1))))
    found, before = fit(both), fit(alone)
    assert (found.dtype, found.longest_tokens) == ("bfloat16", before.longest_tokens)
    assert [rank.device.name for rank in found.ranks] == [device_of("rtx4090").name]
    assert any("left out: Tesla T4" in decision.reason for decision in found.decisions)
