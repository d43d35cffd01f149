"""vLLM's own sizing, reproduced from the terms it prints: published cases, two runners, and its refusals."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import ConfigurationError
from holdfast.planner.compat.vllm_release import (
    ReleaseTerms,
    Vllm,
    kv_bytes,
    parse_vllm,
    refusal,
    requested_bytes,
)
from holdfast.planner.sizing.kv_cost import KVCost
from holdfast.units import GIB

CASES: dict[str, Any] = tomllib.loads((Path(__file__).parent / "worked_cases.toml").read_text())
NUMBERS = r"(?P<needed>[\d.]+) GiB KV cache is needed(?:.* maximum model length is (?P<longest>\d+))?"
ELEMENT_BYTES = {"f16": 2, "bf16": 2, "fp8": 1}


def cost_of(case: dict[str, Any]) -> KVCost:
    shape = CASES["shapes"][case["shape"]]
    element = ELEMENT_BYTES[case["kv_dtype"]]
    if "kv_lora_rank" in shape:
        each = shape["kv_lora_rank"] + shape["rope_dim"]
    else:
        each = 2 * max(1, shape["kv_heads"] // case.get("tensor_parallel", 1)) * shape["head_dim"]
    windowed = shape.get("window_layers", 0)
    return KVCost(
        growing_bytes=(shape["layers"] - windowed) * each * element,
        windows=((shape["window"], windowed * each * element),) if windowed else (),
        fixed_bytes=0,
        block_tokens=case["block_tokens"],
        step_tokens=0,
    )


def each(kind: str) -> list[Any]:
    return [pytest.param(case, id=case["id"]) for case in CASES[kind]]


def gib(case: dict[str, Any], *names: str) -> int:
    return int(sum(case.get(name, 0.0) for name in names) * GIB)


@pytest.mark.parametrize("case", each("kv_tokens"))
def test_published_token_counts_within_three_percent(case: dict[str, Any]) -> None:
    available = gib(case, "kv_gib")
    if case["terms_complete"]:
        # torch's peak has the weights in it.
        terms = ReleaseTerms(
            weights=gib(case, "weights_gib", "torch_peak_gib"),
            peak_activation=gib(case, "activation_gib"),
            non_torch=gib(case, "non_torch_gib"),
        )
        requested = requested_bytes(gib(case, "total_gib"), case["utilization"])
        available = kv_bytes(requested, terms, Vllm((0, 8), "v1"))
        assert available == pytest.approx(gib(case, "kv_gib"), abs=0.03 * GIB)
    printed = case.get("tokens", case.get("blocks", 0) * case["block_tokens"])
    found = cost_of(case).tokens(available, case.get("max_model_len", 4096))
    assert found == pytest.approx(printed, rel=0.03)


@pytest.mark.parametrize("case", each("refusals"))
def test_published_refusals(case: dict[str, Any]) -> None:
    cost = cost_of(case)
    stored = case.get("estimated_max", case.get("stored_tokens", 0))
    available = gib(case, "available_gib") if "available_gib" in case else stored * cost.growing_bytes
    refused = refusal(available, cost, case["max_model_len"])
    assert refused is not None
    numbers = re.search(NUMBERS, refused)
    assert numbers is not None
    if "needed_gib" in case:
        assert float(numbers["needed"]) == pytest.approx(case["needed_gib"], abs=0.0051)
    if "estimated_max" in case or "stored_tokens" in case:
        rounding = 0.0051 * GIB / cost.growing_bytes + case["block_tokens"]
        assert int(numbers["longest"]) == pytest.approx(stored, abs=rounding)
    assert f"({case['max_model_len']})" in refused


def test_what_fits_is_not_refused() -> None:
    cost = KVCost(growing_bytes=131072, windows=(), fixed_bytes=0, block_tokens=16, step_tokens=0)
    assert refusal(GIB, cost, 8192) is None
    refused = refusal(GIB - 1, cost, 8192)
    assert refused is not None
    assert refused.endswith("the estimated maximum model length is 8176.")
    assert "1.00 GiB KV cache is needed" in refused


def test_the_second_runner_of_0_26_takes_nothing_off_for_graphs() -> None:
    """Measured on an H200: 0.9 x 139.8 - 15.0 - 1.78 - 0.22 = 108.8 GiB, with 0.99 GiB of graphs on top."""
    terms = ReleaseTerms(
        weights=int(15.0 * GIB), peak_activation=int(1.78 * GIB), non_torch=int(0.22 * GIB), graphs=int(0.99 * GIB)
    )
    requested = requested_bytes(int(139.8 * GIB), 0.9)
    assert kv_bytes(requested, terms, Vllm((0, 26), "v2")) / GIB == pytest.approx(108.8, abs=0.05)
    assert kv_bytes(requested, terms, Vllm((0, 29), "v2")) / GIB == pytest.approx(107.8, abs=0.05)


def test_the_first_runner_of_0_26_takes_its_guess_off() -> None:
    """Measured: 24.0 - 17.88 - 2.02 - 0.3 - 0.17 = 3.63 GiB."""
    terms = ReleaseTerms(
        weights=int(17.88 * GIB), peak_activation=int(2.02 * GIB), non_torch=int(0.3 * GIB), graphs=int(0.17 * GIB)
    )
    assert kv_bytes(24 * GIB, terms, Vllm((0, 26), "v1")) / GIB == pytest.approx(3.63, abs=0.01)
    assert kv_bytes(24 * GIB, terms, Vllm((0, 11), "v1")) / GIB == pytest.approx(3.80, abs=0.01)


def test_blocks_are_tokens() -> None:
    """`# GPU blocks: 1234` at 16 tokens a block are 19,744 tokens."""
    cost = KVCost(growing_bytes=131072, windows=(), fixed_bytes=0, block_tokens=16, step_tokens=0)
    assert cost.tokens(1234 * 16 * 131072 + 5000, 4096) == 19744


@pytest.mark.parametrize(
    ("text", "version", "runner", "utilization"),
    [
        ("", (0, 29), "v2", 0.92),
        ("==0.26.0", (0, 26), "v2", 0.92),
        ("@0.26:v1", (0, 26), "v1", 0.92),
        ("0.11", (0, 11), "v1", 0.90),
        ("-0.8.5.post1", (0, 8), "v1", 0.90),
        (":v1", (0, 29), "v1", 0.92),
    ],
)
def test_versions_as_people_write_them(text: str, version: tuple[int, int], runner: str, utilization: float) -> None:
    found = parse_vllm(text)
    assert (found.version, found.runner, found.default_utilization) == (version, runner, utilization)


def test_a_version_that_is_not_known_says_which_was_taken() -> None:
    assert parse_vllm("==0.26").unknown is None
    assert parse_vllm("==0.4").unknown is None
    assert "vLLM 9.9" in (parse_vllm("==9.9").unknown or "")
    assert "as in 0.29" in (parse_vllm("==9.9").unknown or "")


@pytest.mark.parametrize("text", ["==latest", "0", "==0.26:v3", "; rm -rf"])
def test_what_is_no_version_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        parse_vllm(text)
    assert refused.value.code == "HF147"
    assert refused.value.field == "for"
    assert refused.value.fix
