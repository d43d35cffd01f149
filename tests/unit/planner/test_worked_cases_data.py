"""The published cases must be sound in themselves before the planner is held against them.

Recomputes every printed figure from the model shapes in the file. Knows nothing of the planner, on purpose: a second
reading of the same arithmetic, so that a case can only be wrong in both.
"""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Any

import pytest

GIB, MIB, KIB = 1 << 30, 1 << 20, 1 << 10
CASES: dict[str, Any] = tomllib.loads((Path(__file__).parent / "worked_cases.toml").read_text())
SHAPES: dict[str, dict[str, Any]] = CASES["shapes"]
KINDS = {"weights": 18, "kv_per_token": 12, "kv_tokens": 12, "refusals": 8}
KV_ELEMENT_BYTES = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "fp8": 1.0, "q8_0": 34 / 32}

SHAPE_KEYS = {"hub_id", "family", "layers", "hidden", "heads", "vocab", "max_position"}
OPTIONAL_SHAPE_KEYS = {
    "intermediate", "kv_heads", "head_dim", "tied", "other_parameters", "window", "window_layers", "experts",
    "shared_experts", "expert_intermediate", "dense_layers", "q_lora_rank", "kv_lora_rank", "rope_dim", "nope_dim",
    "value_dim",
}  # fmt: skip
COMMON_KEYS = {"id", "shape", "source", "note", "inferred", "tensor_parallel"}
KEYS = {
    "weights": {
        "engine", "dtype", "quantization", "printed_gib", "printed_gb", "parameters_billions", "rotary_table", "bytes",
        "expert_padded", "copied_parameters", "rounded_mib", "tolerance", "version", "gpu",
    },
    "kv_per_token": {
        "engine", "kv_dtype", "layers", "cells", "sequences", "printed_mib", "printed_step_mib",
        "printed_kib_per_token", "swap_gib", "cpu_blocks",
    },
    "kv_tokens": {
        "engine", "version", "dtype", "kv_dtype", "block_tokens", "max_model_len", "terms_complete", "total_gib",
        "utilization", "weights_gib", "torch_peak_gib", "non_torch_gib", "activation_gib", "kv_gib", "blocks",
        "null_blocks", "tokens",
    },
    "refusals": {
        "kv_dtype", "pipeline_parallel", "block_tokens", "max_model_len", "needed_gib", "available_gib",
        "estimated_max", "blocks", "stored_tokens",
    },
}  # fmt: skip


def each(kind: str) -> list[Any]:
    return [pytest.param(case, id=case["id"]) for case in CASES[kind]]


def attention_parameters(shape: dict[str, Any]) -> int:
    """Of one layer, without biases and norms."""
    hidden, heads = shape["hidden"], shape["heads"]
    if "kv_lora_rank" not in shape:
        return int(2 * hidden * shape["head_dim"] * (heads + shape["kv_heads"]))
    query_width = heads * (shape["nope_dim"] + shape["rope_dim"])
    rank = shape.get("q_lora_rank")
    query = hidden * query_width if rank is None else rank * (hidden + query_width)
    down = hidden * (shape["kv_lora_rank"] + shape["rope_dim"])
    up = shape["kv_lora_rank"] * heads * (shape["nope_dim"] + shape["value_dim"])
    return int(query + down + up + heads * shape["value_dim"] * hidden)


def parameters(shape: dict[str, Any], padded: dict[str, int] | None = None) -> dict[str, int]:
    """Parameters by class; `padded` replaces the sides of an expert by those that its kernel wants."""
    hidden, layers = shape["hidden"], shape["layers"]
    experts = shape.get("experts", 0)
    dense_layers = shape.get("dense_layers", 0 if experts else layers)
    sparse_layers = layers - dense_layers
    expert = 3 * hidden * shape.get("expert_intermediate", 0)
    if padded is not None:
        expert = 3 * padded["hidden"] * padded["intermediate"]
    embedding = shape["vocab"] * hidden
    return {
        "attention": layers * attention_parameters(shape),
        "mlp": dense_layers * 3 * hidden * shape.get("intermediate", 0)
        + sparse_layers * (experts + shape.get("shared_experts", 0)) * expert,
        "embedding": embedding,
        "head": 0 if shape.get("tied") else embedding,
        "rest": (2 * layers + 1) * hidden + sparse_layers * experts * hidden + shape.get("other_parameters", 0),
    }


def kv_bytes_per_token(case: dict[str, Any]) -> float:
    """On one rank, for the layers that the case counts."""
    shape = SHAPES[case["shape"]]
    window_layers = shape.get("window_layers", 0)
    counted = {"all": shape["layers"], "window": window_layers, "full": shape["layers"] - window_layers}
    layers = counted[case.get("layers", "all")]
    element = KV_ELEMENT_BYTES[case["kv_dtype"]]
    if "kv_lora_rank" in shape:
        return float(layers * (shape["kv_lora_rank"] + shape["rope_dim"]) * element)
    heads = max(1, shape["kv_heads"] // case.get("tensor_parallel", 1))
    return float(layers * 2 * heads * shape["head_dim"] * element)


def test_there_are_enough_cases_and_no_two_share_a_name() -> None:
    names = [case["id"] for kind in KINDS for case in CASES[kind]]
    for kind, least in KINDS.items():
        ids = [case["id"] for case in CASES[kind]]
        assert len(ids) == len(set(ids))
        assert len(ids) >= least
    assert len(names) >= 45
    assert set(CASES) == {"shapes", *KINDS}


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_case_names_its_source_and_only_known_fields(kind: str) -> None:
    for case in CASES[kind]:
        assert case["source"].startswith("https://"), case["id"]
        assert case["shape"] in SHAPES, case["id"]
        assert set(case) <= COMMON_KEYS | KEYS[kind], case["id"]
        assert set(case.get("inferred", [])) <= set(case), case["id"]


def test_every_shape_is_whole_and_used() -> None:
    used = {case["shape"] for kind in KINDS for case in CASES[kind]}
    assert set(SHAPES) == used
    for name, shape in SHAPES.items():
        assert set(shape) >= SHAPE_KEYS, name
        assert set(shape) <= SHAPE_KEYS | OPTIONAL_SHAPE_KEYS, name
        assert ("kv_lora_rank" in shape) != ("kv_heads" in shape), name
        assert shape["hub_id"].count("/") == 1
        assert shape.get("window_layers", 0) < shape["layers"]


@pytest.mark.parametrize("case", each("weights"))
def test_weights(case: dict[str, Any]) -> None:
    shape = SHAPES[case["shape"]]
    counts = parameters(shape, case.get("expert_padded"))
    if "parameters_billions" in case:
        total = sum(counts.values()) + case.get("copied_parameters", 0)
        assert total == pytest.approx(case["parameters_billions"] * 1e9, rel=case["tolerance"])
        return
    ranks = case.get("tensor_parallel", 1)
    size = sum(count * case["bytes"][name] / (1 if name == "rest" else ranks) for name, count in counts.items())
    if case.get("rotary_table"):
        size += shape["max_position"] * shape["head_dim"] * 2
    size += case.get("rounded_mib", 0) * MIB
    printed = case["printed_gib"] * GIB if "printed_gib" in case else case["printed_gb"] * 1e9
    assert size == pytest.approx(printed, rel=case["tolerance"])


@pytest.mark.parametrize("case", each("kv_per_token"))
def test_kv_per_token(case: dict[str, Any]) -> None:
    per_token = kv_bytes_per_token(case)
    if "printed_kib_per_token" in case:
        assert per_token == case["printed_kib_per_token"] * KIB
    elif "cpu_blocks" in case:
        assert math.floor(case["swap_gib"] * GIB / (16 * per_token)) == case["cpu_blocks"]
    else:
        # Exact but for the rounding of the print.
        step_mib = case.get("printed_step_mib", 0.01)
        total_mib = per_token * case["cells"] * case.get("sequences", 1) / MIB
        assert total_mib == pytest.approx(case["printed_mib"], abs=step_mib / 2 + 1e-6)


@pytest.mark.parametrize("case", each("kv_tokens"))
def test_kv_tokens(case: dict[str, Any]) -> None:
    if case["terms_complete"]:
        terms = ("weights_gib", "torch_peak_gib", "non_torch_gib", "activation_gib")
        left = case["total_gib"] * case["utilization"] - sum(case.get(term, 0.0) for term in terms)
        # Up to five printed numbers, each rounded to 0.01.
        assert left == pytest.approx(case["kv_gib"], abs=0.03)
    tokens = case.get("tokens", case.get("blocks", 0) * case["block_tokens"])
    if "blocks" in case:
        assert (case["blocks"] - case.get("null_blocks", 0)) * case["block_tokens"] == tokens
    fits = max(0.0, case["kv_gib"] * GIB / kv_bytes_per_token(case))
    assert fits == pytest.approx(tokens, rel=0.03)


@pytest.mark.parametrize("case", each("refusals"))
def test_refusals(case: dict[str, Any]) -> None:
    per_token, block = kv_bytes_per_token(case), case["block_tokens"]
    needed_gib = math.ceil(case["max_model_len"] / block) * block * per_token / GIB
    if "needed_gib" in case:
        assert needed_gib == pytest.approx(case["needed_gib"], abs=0.0051)
    if "available_gib" in case:
        assert case["available_gib"] < needed_gib
        longest = max(0.0, case["available_gib"] * GIB / per_token)
        known = case.get("estimated_max", case.get("stored_tokens"))
        if known is not None:
            # What the print rounds away (0.005 GiB), and one block.
            assert longest == pytest.approx(known, abs=0.0051 * GIB / per_token + block)
    if "stored_tokens" in case:
        assert case["stored_tokens"] < case["max_model_len"]
        assert case["stored_tokens"] == case.get("blocks", case["stored_tokens"] // block) * block
