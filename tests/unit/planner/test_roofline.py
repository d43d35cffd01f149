"""Throughput against what was measured on an H200, and against what must hold on any machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from holdfast.planner.advice.throughput import (
    EVIDENCE,
    LIMITS,
    Attention,
    Estimate,
    Reads,
    Throughput,
    no_throughput_reason,
    throughput,
)
from holdfast.planner.fit.search import Question, fit
from holdfast.planner.inputs.question import Device
from holdfast.planner.models.quantize import quantized_as
from holdfast.units import GIB

Ask = Callable[..., Question]


def holds(estimate: Estimate, measured: float) -> bool:
    return estimate.low <= measured <= estimate.high


# vLLM 0.26, H200, dummy weights: one stream, 64 streams of 128 + 256 tokens, prefill of 32 x 4,000.
MEASURED = [
    ("llama-3.1-8b", 201, 9335, 41428),
    ("qwen3-0.6b", 388, 15398, 319014),
]


@pytest.mark.parametrize(("model", "one", "many", "prefill"), MEASURED)
def test_the_interval_holds_what_an_h200_did(ask: Ask, model: str, one: float, many: float, prefill: float) -> None:
    short = throughput(fit(ask(model, "h200", traffic=(64, 128, 256))))
    assert short is not None
    assert short.at_traffic is not None
    assert short.at_traffic.batch == 64
    assert holds(short.one.estimate, one)
    assert holds(short.at_traffic.estimate, many)
    long = throughput(fit(ask(model, "h200", traffic=(32, 4000, 1))))
    assert long is not None
    assert holds(long.prefill, prefill)


def test_one_stream_of_8b_is_expected_within_a_tenth_of_the_measurement(ask: Ask) -> None:
    found = throughput(fit(ask("llama-3.1-8b", "h200", traffic=(1, 32, 256))))
    assert found is not None
    assert found.one.estimate.tokens_per_s == pytest.approx(201, rel=0.1)
    assert found.one.limited_by == LIMITS["weights"]


def test_limits_are_named(ask: Ask) -> None:
    small = throughput(fit(ask("qwen3-0.6b", "h200", traffic=(1, 32, 256))))
    long = throughput(fit(ask("llama-3.1-8b", "h200", traffic=(40, 16000, 100))))
    assert small is not None
    assert long is not None
    assert long.at_traffic is not None
    assert small.one.limited_by == LIMITS["launches"]
    assert small.prefill_limited_by == LIMITS["compute"]
    assert long.at_traffic.limited_by == LIMITS["KV"]


def test_two_gpus_decode_faster_than_one_and_slower_than_twice(ask: Ask) -> None:
    rates = []
    for size in (1, 2):
        found = throughput(fit(ask("llama-3.1-8b", "a100-80", count=2, tensor_parallel=size)))
        assert found is not None
        rates.append(found.one.estimate.tokens_per_s)
    assert rates[0] < rates[1] < 2 * rates[0]


def test_without_a_fast_link_a_second_gpu_gains_less_for_prompts(ask: Ask) -> None:
    """A 4090 has no link between GPUs but the host's; an A100 has one ten times as wide."""
    gains = {}
    for gpu in ("rtx4090", "a100-80"):
        rates = []
        for size in (1, 2):
            found = throughput(fit(ask("llama-3.1-8b", gpu, count=2, tensor_parallel=size)))
            assert found is not None
            rates.append(found.prefill.tokens_per_s)
        gains[gpu] = rates[1] / rates[0]
    assert 0.5 < gains["rtx4090"] < gains["a100-80"] - 0.2 < 2


def test_experts_are_read_as_far_as_tokens_meet_them(ask: Ask) -> None:
    reads = Reads(100, ((1000, 0.1),))
    assert reads.bytes_for(1) == pytest.approx(200)
    assert reads.bytes_for(10_000) == pytest.approx(1100)
    sparse, dense = (throughput(fit(ask(model, "h200"))) for model in ("qwen3-30b-a3b", "qwen3-32b"))
    assert sparse is not None
    assert dense is not None
    assert sparse.one.estimate.tokens_per_s > 3 * dense.one.estimate.tokens_per_s


def test_a_device_without_rates_has_no_throughput(ask: Ask, cpu: Callable[..., Device]) -> None:
    unknown = Device(index=0, name="cuda:0", kind="gpu", total_bytes=80 * GIB, free_bytes=80 * GIB)
    for device in (unknown, cpu(64)):
        found = fit(ask("llama-3.1-8b", device=device))
        assert found.fits
        assert throughput(found) is None
        assert device.name in no_throughput_reason(found)


def test_what_does_not_fit_has_no_throughput(ask: Ask) -> None:
    found = fit(ask("llama-3-70b", "rtx4090"))
    assert throughput(found) is None
    assert no_throughput_reason(found) == "it does not fit"


@pytest.mark.parametrize("settings", [{}, {"pipeline_parallel": 2, "tensor_parallel": 4}])
def test_estimates_lie_within_their_interval(ask: Ask, settings: dict[str, Any]) -> None:
    found = throughput(fit(ask("llama-3.1-70b", "h100-80", count=8, traffic=(50, 2000, 500), **settings)))
    assert found is not None
    assert found.at_traffic is not None
    for estimate in (found.one.estimate, found.at_traffic.estimate, found.largest.estimate, found.prefill):
        assert 0 < estimate.low < estimate.tokens_per_s < estimate.high


def rates(question: Question) -> Throughput:
    found = throughput(fit(question))
    assert found is not None
    return found


@pytest.mark.parametrize(("gpu", "gain"), [("h100-80", (1.5, 2.0)), ("a100-80", (0.99, 1.01))])
def test_fp8_is_multiplied_twice_as_fast_where_the_gpu_does_it(ask: Ask, gpu: str, gain: tuple[float, float]) -> None:
    """An A100 unpacks FP8 and multiplies in 16 bits."""
    plain = ask("llama-3.1-8b", gpu, traffic=(8, 1000, 100))
    made = replace(plain, model=quantized_as(plain.model, "fp8"))
    assert gain[0] < rates(made).prefill.tokens_per_s / rates(plain).prefill.tokens_per_s < gain[1]


def test_integer_formats_are_counted_at_the_rate_of_16_bits(ask: Ask) -> None:
    plain = ask("llama-3.1-8b", "h100-80", traffic=(8, 1000, 100))
    made = replace(plain, model=quantized_as(plain.model, "int8"))
    assert rates(made).prefill.tokens_per_s == pytest.approx(rates(plain).prefill.tokens_per_s, rel=0.01)


def test_a_window_bounds_what_a_token_sees() -> None:
    windowed, whole = (Attention(((window, 10.0),), ((window, 10.0),)) for window in (100, None))
    assert windowed.of_token(50) == whole.of_token(50)
    assert windowed.of_token(5000) == 4 * 10 * 100
    assert windowed.of_prompt(100) == whole.of_prompt(100) == 4 * 10 * 50
    assert windowed.of_prompt(10_000) == pytest.approx(4 * 10 * 100, rel=0.01)
    assert Attention((), ()).of_token(5000) == 0, "recurrent layers only"


def test_evidence_is_said_and_what_it_lacks_widens_the_interval(ask: Ask) -> None:
    measured = rates(ask("llama-3.1-8b", "h200"))
    assert measured.evidence == EVIDENCE
    other = rates(ask("llama-3.1-8b", "h100-80"))
    assert "h100-80" in other.evidence

    def width(one: Throughput) -> float:
        return one.one.estimate.high / one.one.estimate.low

    assert width(other) > width(measured)
    strange = rates(ask("qwen3-30b-a3b", "h100-80", count=2, tensor_parallel=2))
    assert "experts" in strange.evidence
    assert "several GPUs" in strange.evidence
    assert width(strange) > width(other)


def test_latents_are_read_by_every_head(ask: Ask) -> None:
    """Decoding over a long context: 16 heads x (512 + 64/2) columns instead of 16 x 192, or whatever heads are wide."""
    one = ask("deepseek-v2-lite", "h200", traffic=(64, 8000, 100))
    spec = one.model.spec
    latent = next(layer.latent for layer in spec.layers if layer.latent is not None)
    assert latent.rank + latent.rope_dim / 2 > spec.head_dim
    assert rates(one).at_traffic is not None
