"""Warnings by code, and the rules of thumb that people bring: reproduced, or corrected with the reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from holdfast.errors import ConfigurationError
from holdfast.models import catalogue, describe_config
from holdfast.observability.codes import explain
from holdfast.planner.advice.rules_of_thumb import Thumb, rules_of_thumb
from holdfast.planner.advice.warnings import RULES, PlanWarning, safe_utilization, warnings
from holdfast.planner.fit.search import Question, fit
from holdfast.planner.inputs.question import Device
from holdfast.planner.models.quantize import quantized_as
from holdfast.planner.sizing.sharded_weights import total_bytes, weights_of
from holdfast.units import GIB

Ask = Callable[..., Question]
Gpu = Callable[..., Device]
GB = 10**9


def of(question: Question, code: str) -> list[PlanWarning]:
    return [warning for warning in warnings(fit(question)) if warning.code == code]


def thumb(question: Question, name: str) -> Thumb:
    return next(one for one in rules_of_thumb(fit(question)) if one.name == name)


def test_every_code_is_explained() -> None:
    codes = {code for code, _, _ in RULES}
    assert len(codes) == 22
    for code in codes:
        assert explain(code).helps


# Utilization


@pytest.mark.parametrize(
    ("utilization", "code"), [(1.0, "HFW20"), (0.999, "HFW20"), (0.96, "HFW21"), (0.95, None), (0.9, None)]
)
def test_too_high(ask: Ask, utilization: float, code: str | None) -> None:
    found = {warning.code for warning in warnings(fit(ask("llama-3.1-8b", "h100-80", utilization=utilization)))}
    assert found & {"HFW20", "HFW21"} == ({code} if code else set())


def test_half_of_the_memory_starves_the_cache(ask: Ask) -> None:
    (warning,) = of(ask("llama-3.1-8b", "a100-40", utilization=0.5), "HFW22")
    assert warning.fix == "--gpu-memory-utilization 0.9"
    assert not of(ask("llama-3.1-8b", "a100-40", utilization=0.85), "HFW22")
    assert not of(ask("llama-3-70b", "a100-40", utilization=0.5), "HFW22"), "more would not make it fit"


def test_a_24_gb_card_may_have_a_desktop(ask: Ask, gpu: Gpu) -> None:
    (warning,) = of(ask("llama-3-8b", "rtx4090"), "HFW23")
    assert "21.64 GiB" in warning.message
    assert warning.fix == "--gpu-memory-utilization 0.85"
    assert not of(ask("llama-3-8b", "rtx4090", utilization=0.85), "HFW23")
    assert "Without a monitor 0.9 is fine" in warning.message
    for utilization in (0.97, 1.0):
        (warning,) = of(ask("llama-3-8b", "rtx4090", utilization=utilization), "HFW23")
        assert "is fine" not in warning.message, "HFW20 and HFW21 say that it is not"
    assert not of(ask("llama-3-8b", "l4"), "HFW23"), "no monitor goes on that one"
    measured = gpu("rtx4090", measured=True)
    assert not of(ask("llama-3-8b", device=measured), "HFW23"), "what is free was measured"


def test_a_shared_card_gets_less(ask: Ask, gpu: Gpu) -> None:
    shared = gpu("h100-80", free_bytes=78 * GIB, measured=True, held_by=("python (pid 4711): 1.65 GiB",))
    (warning,) = of(ask("llama-3.1-8b", device=shared), "HFW24")
    assert "pid 4711" in warning.message
    assert not of(ask("llama-3.1-8b", device=shared, utilization=0.8), "HFW24")
    assert safe_utilization(fit(ask("llama-3.1-8b", device=shared))) == 0.8


def test_neighbours_are_named(ask: Ask, gpu: Gpu) -> None:
    crowded = gpu("h100-80", free_bytes=40 * GIB, measured=True, held_by=("jupyter (pid 99): 39.6 GiB",))
    (warning,) = of(ask("llama-3.1-8b", device=crowded), "HFW29")
    assert "jupyter (pid 99)" in warning.message
    assert "40.00 GiB free" in warning.message


# Limits


def test_256_sequences_where_few_fit(ask: Ask) -> None:
    (warning,) = of(ask("llama-3-8b", "rtx4090", max_num_seqs=256, max_model_len=8192), "HFW25")
    assert warning.fix is not None
    fixed = int(warning.fix.rpartition(" ")[2])
    assert 1 <= fixed <= 8
    assert not of(ask("llama-3-8b", "rtx4090", max_num_seqs=fixed, max_model_len=8192), "HFW25")
    assert not of(ask("llama-3-8b", "rtx4090", max_model_len=8192), "HFW25"), "a default is only a ceiling"


def test_a_context_far_beyond_the_traffic(ask: Ask) -> None:
    (warning,) = of(ask("llama-3.1-8b", "h100-80", traffic=(8, 1500, 500), max_model_len=32768), "HFW26")
    assert warning.fix == "--max-model-len 2048"
    assert not of(ask("llama-3.1-8b", "h100-80", traffic=(8, 1500, 500), max_model_len=4000), "HFW26")


def test_traffic_longer_than_the_context(ask: Ask) -> None:
    (warning,) = of(ask("llama-3.1-8b", "h100-80", traffic=(2, 6000, 500), max_model_len=4096), "HFW34")
    assert warning.fix == "--max-model-len 6500"
    first, *_ = warnings(fit(ask("llama-3-8b", "h100-80", traffic=(2, 9000, 500), max_num_seqs=500)))
    assert first.code == "HFW34"
    assert "context length is 8,192" in first.message
    assert "a model with a longer context" in (first.fix or "")
    assert not of(ask("llama-3-8b", "h100-80", traffic=(2, 9000, 500), max_num_seqs=500), "HFW25")


def test_tensor_parallel_1_on_a_box_with_two(ask: Ask) -> None:
    (warning,) = of(ask("llama-3.1-70b", "h200", count=2, tensor_parallel=1, utilization=0.97), "HFW27")
    assert "2 GPUs" in warning.message
    assert warning.fix == "-tp 2"
    assert not of(ask("llama-3.1-8b", "h100-80", count=2), "HFW27"), "the plan chose, and said why"


def test_kv_of_zero_tokens(ask: Ask) -> None:
    (warning,) = of(ask("llama-3-70b", "h100-80"), "HFW28")
    assert "0 tokens" in warning.message
    assert "nothing is left of 71.20 GiB; weights would take 131.42 GiB" in warning.message


def test_on_a_cpu_the_processes_themselves_may_take_it_all(ask: Ask, cpu: Gpu) -> None:
    (warning,) = of(ask("smollm2-135m", device=cpu(0.3)), "HFW28")
    assert "front" in warning.message


def test_fitting_by_less_than_the_error(ask: Ask, gpu: Gpu) -> None:
    limits = {"max_num_seqs": 256, "max_num_batched_tokens": 8192}
    found = fit(ask("llama-3-8b", "h100-80", **limits))
    needed = sum(term.nbytes for term in found.ranks[0].terms) + 512 * (1 << 20)
    tight = gpu("h100-80", budget_bytes=needed + (10 << 20))
    assert of(ask("llama-3-8b", device=tight, **limits), "HFW30")
    assert not of(ask("llama-3-8b", device=gpu("h100-80", budget_bytes=needed + 2 * GIB)), "HFW30")


def test_number_types_the_gpu_lacks(ask: Ask) -> None:
    assert of(ask("llama-3-8b", "a100-80", kv_cache_dtype="fp8"), "HFW32")
    assert not of(ask("llama-3-8b", "h100-80", kv_cache_dtype="fp8"), "HFW32")
    assert of(ask("qwen2.5-0.5b", "t4", dtype="bfloat16"), "HFW33")


# Rules of thumb


@pytest.mark.parametrize(
    ("model", "bits", "rule_gb"),
    [("llama-2-7b", 32, 28), ("llama-2-7b", 16, 14), ("llama-3-70b", 32, 280), ("llama-3-70b", 16, 140)],
)
def test_bytes_a_parameter(ask: Ask, model: str, bits: int, rule_gb: int) -> None:
    """7B: 28 and 14 GB, 70B: 280 and 140: right within the rounding of the names."""
    dtype = "float32" if bits == 32 else "float16"
    one = thumb(ask(model, "h200", count=8, dtype=dtype), "weights")
    assert one.rule_bytes / GB == pytest.approx(rule_gb, rel=0.05)
    assert one.right


@pytest.mark.parametrize(
    ("model", "method", "rule_gb", "low_gb", "high_gb"),
    [
        ("llama-3-70b", "int8", 70, 70, 74),
        ("llama-3-70b", "awq", 35, 37, 40),
        ("llama-3-70b", "Q4_K_S", 37, 37, 41),
        ("llama-2-7b", "int8", 7, 6.8, 7.4),
        ("llama-2-7b", "awq", 3.5, 3.7, 4.1),
        ("llama-3-8b", "awq", 4, 5, 6),
    ],
)
def test_quantized_weights_are_more_than_their_bits(
    ask: Ask, model: str, method: str, rule_gb: float, low_gb: float, high_gb: float
) -> None:
    """Scales, zeros and what stays whole: int4 of 70B is 37 to 40 GB, of 8B nearer 5 or 6 than 4."""
    weights = weights_of(quantized_as(ask(model, "h200").model, method), dtype="float16")
    assert low_gb <= total_bytes(weights) / GB <= high_gb
    assert total_bytes(weights) / GB >= rule_gb * 0.97


def test_the_hidden_size_formula_is_four_times_too_large_for_llama_3_8b(ask: Ask) -> None:
    one = thumb(ask("llama-3-8b", "a100-80", max_model_len=4096), "KV of one sequence")
    assert one.rule_bytes == 2 * GIB
    assert one.exact_bytes == GIB // 2
    assert "4.0 times too large" in one.verdict
    assert "8 KV heads serve 32" in one.verdict
    held = fit(ask("llama-3-8b", "a100-80", max_model_len=4096)).concurrency(4096)
    assert held > 3.5 * 30, "the guide's 30 concurrent requests on 80 GB are four times as many"


def test_the_hidden_size_formula_is_right_without_shared_heads(ask: Ask) -> None:
    assert thumb(ask("llama-2-7b", "a100-80"), "KV of one sequence").right


def test_70b_at_32k_with_eight_sequences_is_80_gib_of_kv(ask: Ask) -> None:
    found = fit(ask("llama-3.1-70b", "h100-80", count=4, tensor_parallel=4))
    assert found.kv_bytes_per_token == 320 << 10
    assert 8 * sum(rank.kv.sequence_bytes(32768) for rank in found.ranks) == 80 * GIB


def test_a_shorter_context_shrinks_a_sequence_and_not_the_pool(ask: Ask) -> None:
    long = fit(ask("llama-3.1-8b", "a100-80", max_model_len=32768))
    short = fit(ask("llama-3.1-8b", "a100-80", max_model_len=4096))
    assert long.ranks[0].kv.sequence_bytes(32768) == 8 * short.ranks[0].kv.sequence_bytes(4096)
    assert short.kv_tokens == pytest.approx(long.kv_tokens, rel=0.01)


def test_thirty_percent_depends_on_what_is_served(ask: Ask) -> None:
    """70B in FP16 'needs at least 180 GB': for one short sequence it is less, for many long ones far more."""
    little = thumb(ask("llama-3.1-70b", "h100-80", count=4, tensor_parallel=4), "everything")
    assert little.rule_bytes / GB == pytest.approx(183, abs=1)
    assert little.exact_bytes < little.rule_bytes
    much = thumb(ask("llama-3.1-70b", "h200", count=8, tensor_parallel=8, traffic=(16, 30000, 2000)), "everything")
    assert much.exact_bytes > much.rule_bytes * 1.4


@pytest.mark.parametrize(
    ("model", "guide_gb", "verdict"),
    [
        ("llama-3-8b", 16, "too small"),
        ("llama-2-13b", 28, "too small"),
        ("yi-34b", 70, "too small"),
        ("llama-3-70b", 140, "too small"),
    ],
)
def test_the_sizing_guide_leaves_too_little(ask: Ask, model: str, guide_gb: int, verdict: str) -> None:
    one = thumb(ask(model, "b200"), "sizing guide")
    assert one.rule_bytes == guide_gb * GB
    assert verdict in one.verdict
    if guide_gb == 140:
        assert one.rule_bytes < fit(ask(model, "b200")).weights_bytes, "not even the weights"


def test_4_bit_8b_gives_the_cache_three_times_the_room(ask: Ask) -> None:
    """On 24 GB 'tripling the space for KV': from 3.9 to 13.5 GiB."""
    plain = ask("llama-3.1-8b", "rtx4090")
    small = ask("llama-3.1-8b-awq", "rtx4090")
    gain = fit(small).ranks[0].room_bytes / fit(plain).ranks[0].room_bytes
    assert gain == pytest.approx(3.4, abs=0.4)
    assert describe_config(catalogue.find("llama-3.1-8b-awq").config).quantization is not None


# Shapes that nobody compared


def test_a_split_of_shapes_that_nobody_compared_is_warned_of(ask: Ask) -> None:
    question = ask("qwen2.5-32b-awq", "l4", count=4, tensor_parallel=4)
    unchecked = replace(question, model=replace(question.model, unchecked=True))
    (warning,) = of(unchecked, "HFW40")
    assert warning.field == "tensor_parallel_size"
    assert "Qwen/Qwen2.5-32B-Instruct-AWQ" in (warning.fix or "")
    assert not of(question, "HFW40")
    alone = replace(unchecked, settings=replace(unchecked.settings, tensor_parallel=1))
    assert not of(alone, "HFW40")
    three = replace(unchecked, settings=replace(unchecked.settings, tensor_parallel=3))
    with pytest.raises(ConfigurationError, match="cannot be split") as caught:
        fit(three)
    assert "unverified" in (caught.value.fix or "")


def test_a_peak_that_nobody_knows_is_warned_of(ask: Ask) -> None:
    question = ask("llama-3.1-8b", "rtx4090", traffic=(1, 500, 100))
    assert question.traffic is not None
    assert not of(question, "HFW35")
    (warning,) = of(replace(question, traffic=replace(question.traffic, peak_known=False, source="a.log")), "HFW35")
    assert "a.log does not show" in warning.message
    assert "this plan is for 1" in warning.message
    assert "--concurrency" in (warning.fix or "")


def test_a_rule_that_is_wrong_is_not_called_right(ask: Ask, cpu: Callable[..., Device]) -> None:
    """Compiled products keep half precision as it is stored: 2 bytes, though it is computed in float32."""
    question = ask("llama-3.1-8b", device=cpu(64))
    kept = replace(question, machine=replace(question.machine, compiled_kernels=True))
    for asked, each in ((question, 4), (kept, 2)):
        found = thumb(asked, "weights")
        assert f"x {each} bytes" in found.rule
        assert (found.right, found.verdict) == (True, "right")
    off = replace(fit(kept), weights_dtype="float32")
    wrong = next(one for one in rules_of_thumb(off) if one.name == "weights")
    assert not wrong.right
    assert wrong.verdict != "right"


def test_what_images_and_adapters_of_experts_take_is_said_not_to_be_counted(ask: Ask) -> None:
    def codes(question: Question) -> set[str]:
        return {warning.code for warning in warnings(fit(question))}

    [told] = [one for one in warnings(fit(ask("gemma-4-e4b", "h100-80"))) if one.code == "HFW38"]
    assert "sound" in told.message, "its config does not tell how long sounds are"
    assert "--limit-mm-per-prompt" in (told.fix or "")
    assert "HFW38" not in codes(ask("gemma-4-e4b", "h100-80", text_only=True))
    assert "HFW38" not in codes(ask("qwen3-vl-30b-a3b", "h100-80"))
    assert "HFW38" not in codes(ask("gemma-3-27b", "h100-80"))
    assert "HFW38" not in codes(ask("llama-3.1-8b", "h100-80"))
    assert "HFW39" in codes(ask("mixtral-8x7b", "h200", max_loras=2))
    assert "HFW39" not in codes(ask("mixtral-8x7b", "h200")) | codes(ask("llama-3.1-8b", "h100-80", max_loras=2))
