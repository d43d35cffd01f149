"""Start-up logs of vLLM that were published, against how a plan would have sized them."""

from __future__ import annotations

import statistics
import tomllib
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from holdfast import plan
from holdfast.config.plan import PlanConfig
from holdfast.errors import ConfigurationError
from holdfast.planner.api import question_of
from holdfast.planner.compat.vllm_release import ReleaseTerms, kv_bytes, parse_vllm, requested_bytes
from holdfast.planner.engines.vllm_command import tightest, vllm_terms
from holdfast.planner.engines.vllm_kv import kept_kv
from holdfast.planner.fit.search import Plan, fit
from holdfast.units import GIB

LOGS: list[dict[str, Any]] = tomllib.loads((Path(__file__).parent / "vllm_logs.toml").read_text())["log"]
BY_ID = {log["id"]: log for log in LOGS}


@cache
def sized(name: str) -> tuple[Plan, ReleaseTerms]:
    log = BY_ID[name]
    model, quantization = (*log.get("plan_as", [log["model"]]), None)[:2]
    ranks = log.get("tensor_parallel", 1)
    given = {
        "model": model,
        "quantization": quantization,
        "gpu": f"{log['gpu']}x{ranks}",
        "tensor_parallel_size": ranks,
        "enable_expert_parallel": log.get("expert_parallel", False),
        "gpu_memory_utilization": log["utilization"],
        "max_model_len": log.get("max_model_len", 4096),
        "max_num_seqs": log.get("seqs", 2),
        "max_num_batched_tokens": log.get("step", 4096),
        "dtype": log.get("dtype", "auto"),
    }
    question = question_of(
        PlanConfig.from_arguments(**{key: value for key, value in given.items() if value is not None})
    )
    vllm = parse_vllm("==" + log["version"])
    found = fit(replace(question, engine="vllm", vllm=vllm))
    return found, vllm_terms(found, vllm)


def pool_error(log: dict[str, Any]) -> float | None:
    """Of the KV pool, as a share of what was printed; None: it is not."""
    found, terms = sized(log["id"])
    vllm = parse_vllm("==" + log["version"])
    printed = log.get("kv", 0.0) * GIB
    if "kv_tokens" in log:
        printed = log["kv_tokens"] * kept_kv(found, tightest(found), vllm).printed_bytes
    if not printed:
        return None
    planned = kv_bytes(requested_bytes(int(log["total"] * GIB), log["utilization"]), terms, vllm)
    return float(planned / printed - 1)


def errors(use: str) -> list[float]:
    found = (pool_error(log) for log in LOGS if log["use"] == use)
    return sorted(abs(error) for error in found if error is not None)


def test_the_pool_of_logs_that_were_not_fitted() -> None:
    """The median within 2.5%, nine of ten within 10%."""
    held = errors("held")
    assert len(held) >= 10
    assert statistics.median(held) < 0.025
    assert held[int(0.9 * (len(held) - 1))] < 0.10


@pytest.mark.parametrize("log", [pytest.param(log, id=log["id"]) for log in LOGS])
def test_each_term_that_was_printed(log: dict[str, Any]) -> None:
    """Of those that were not fitted only weights, which are counted, and the pool."""
    _, terms = sized(log["id"])
    if "weights" in log:
        assert terms.weights / GIB == pytest.approx(log["weights"], rel=0.01)
    error = pool_error(log)
    assert error is None or abs(error) < 0.10
    if log["use"] == "held":
        return
    if "activations" in log:
        assert terms.peak_activation / GIB == pytest.approx(log["activations"], rel=0.08)
    if "non_torch" in log:
        assert terms.non_torch / GIB == pytest.approx(log["non_torch"], abs=0.12)


def test_what_vllm_refused_does_not_fit() -> None:
    """Its profile run sorts 201,088 tokens for each of 1,024 sequences: 7.3 GiB."""
    asked = {"max_model_len": 131072, "max_num_batched_tokens": 1024, "max_num_seqs": 1024}
    refused = plan("gpt-oss-120b", gpu="h100-80", engine="vllm==0.11.0", gpu_memory_utilization=0.95, **asked)
    assert not refused.fits
    assert refused.as_requested is not None
    assert "4.54 GiB KV cache is needed" in refused.as_requested.lacks[0]
    assert "sizes what was requested" in str(refused)
    assert refused.to_json()["as_requested"]["kv_tokens"] == refused.as_requested.kv_tokens
    newer = plan("gpt-oss-120b", gpu="h100-80", engine="vllm==0.20", gpu_memory_utilization=0.95, **asked)
    assert newer.fits, "it no longer sorts"
    assert newer.as_requested is None


def test_a_share_of_vram_is_the_budget() -> None:
    both = plan("qwen3-8b", vram="24GiB", gpu_memory_utilization=0.8)
    assert both.fit.budget_bytes == int(24 * GIB * 0.8)
    assert any(one.field == "vram" for one in both.decisions)
    assert plan("qwen3-8b", vram="24GiB").fit.budget_bytes == 24 * GIB


def test_whole_experts_split_what_their_columns_do_not() -> None:
    asked: dict[str, Any] = {"gpu": "l40sx8", "tensor_parallel_size": 8, "engine": "vllm"}
    with pytest.raises(ConfigurationError, match="cannot be split over 8"):
        plan("qwen3-235b-a22b-fp8", **asked)
    whole = plan("qwen3-235b-a22b-fp8", **asked, enable_expert_parallel=True, enforce_eager=True)
    assert "--enable-expert-parallel" in whole.commands["vllm"].text
    assert "--enforce-eager" in whole.commands["vllm"].text
    assert "graphs" not in {term.name for term in whole.fit.ranks[0].terms}


YARN = '{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}'


def test_positions_stretched_by_yarn() -> None:
    with pytest.raises(ConfigurationError, match="context length is"):
        plan("qwen3-8b", gpu="l40s", max_model_len=131072)
    asked: dict[str, Any] = {"gpu": "l40s", "max_model_len": 131072, "rope_scaling": YARN}
    longer = plan("qwen3-8b", engine="vllm", **asked)
    assert longer.fits
    assert '"rope_parameters"' in longer.commands["vllm"].text
    assert f"--rope-scaling '{YARN}'" in plan("qwen3-8b", engine="vllm==0.9.2", **asked).commands["vllm"].text
    assert not longer.commands["holdfast"].available


@pytest.mark.parametrize(
    "written",
    [
        "4",
        "{}",
        '{"rope_type": "linear", "factor": 2}',
        "[" * 9999,
        YARN.replace("4.0", "0"),
        YARN.replace("32768", "1e999"),
    ],
)
def test_other_scalings_are_refused(written: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        plan("qwen3-8b", gpu="l40s", rope_scaling=written)
    assert refused.value.code == "HF148"


def test_draft_layers_are_counted_where_they_are_loaded() -> None:
    asked: dict[str, Any] = {"gpu": "h200x8", "tensor_parallel_size": 8, "max_model_len": 8192, "engine": "vllm"}
    alone, drafting = plan("glm-4.6", **asked), plan("glm-4.6", **asked, spec_method="mtp")
    one = alone.fit.kv_bytes_per_token // 92
    assert drafting.fit.kv_bytes_per_token == 93 * one
    assert 5 * GIB < drafting.fit.weights_bytes - alone.fit.weights_bytes < 9 * GIB
    assert '"method": "mtp"' in drafting.commands["vllm"].text
    written = plan("glm-4.6", **asked, speculative_config='{"method": "glm4_moe_mtp", "num_speculative_tokens": 2}')
    assert written.fit.weights_bytes == drafting.fit.weights_bytes
    with pytest.raises(ConfigurationError) as refused:
        plan("qwen3-8b", gpu="l40s", spec_method="mtp")
    assert refused.value.code == "HF149"


def test_the_draft_layer_of_qwen_attends() -> None:
    """Qwen3.5-27B: one layer with attention and an MLP, and the join of a state and a token: 0.79 GiB."""
    asked: dict[str, Any] = {"gpu": "h200", "max_model_len": 8192, "engine": "vllm"}
    alone, drafting = plan("qwen3.5-27b", **asked), plan("qwen3.5-27b", **asked, spec_method="mtp")
    assert drafting.fit.kv_bytes_per_token * 16 == alone.fit.kv_bytes_per_token * 17
    layer = 5120 * (2 * 6144 + 2 * 1024 + 6144) + 3 * 5120 * 17408 + 2 * 5120 * 5120
    assert drafting.fit.weights_bytes - alone.fit.weights_bytes == pytest.approx(2 * layer, rel=0.001)


DRAFT = '{"model": "qwen3-0.6b", "num_speculative_tokens": 5}'


def test_a_draft_model_is_counted_beside_the_model() -> None:
    asked: dict[str, Any] = {"gpu": "h100-80x2", "tensor_parallel_size": 2, "max_model_len": 8192}
    for version in ("vllm==0.19", "vllm==0.26"):
        alone = plan("qwen3-32b", engine=version, **asked)
        drafting = plan("qwen3-32b", engine=version, speculative_config=DRAFT, **asked)
        small = plan("qwen3-0.6b", engine=version, **asked)
        rank, before = drafting.fit.ranks[0], alone.fit.ranks[0]
        assert rank.kv.growing_bytes - before.kv.growing_bytes == small.fit.ranks[0].kv.growing_bytes
        draft = next(term.nbytes for term in rank.terms if term.name == "draft")
        assert draft == next(term.nbytes for term in small.fit.ranks[0].terms if term.name == "weights")
        vllm = parse_vllm(version.removeprefix("vllm"))
        assert vllm_terms(drafting.fit, vllm).weights - vllm_terms(alone.fit, vllm).weights == draft
        kept = [kept_kv(one.fit, tightest(one.fit), vllm) for one in (drafting, alone)]
        more = small.fit.ranks[0].kv.growing_bytes
        assert kept[0].cost.growing_bytes - kept[1].cost.growing_bytes == more
        assert kept[0].printed_bytes - kept[1].printed_bytes == more
        assert '"model": "Qwen/Qwen3-0.6B"' in drafting.commands["vllm"].text
        assert not drafting.commands["holdfast"].available


def test_a_draft_model_of_llama_cpp_is_counted_and_named() -> None:
    asked: dict[str, Any] = {"gpu": "rtx4090", "quantization": "Q4_K_M", "max_model_len": 8192, "engine": "llama.cpp"}
    alone, drafting = plan("qwen3-8b", **asked), plan("qwen3-8b", speculative_config=DRAFT, **asked)
    small = plan("qwen3-0.6b", **{**asked, "quantization": None}).fit.ranks[0]
    rank, before = drafting.fit.ranks[0], alone.fit.ranks[0]
    assert rank.kv.growing_bytes - before.kv.growing_bytes == small.kv.growing_bytes
    assert {term.name: term.nbytes for term in small.terms}["weights"] == rank.terms[-1].nbytes
    assert drafting.fit.kv_tokens < alone.fit.kv_tokens
    assert " -md ./TO-BE-MADE/" in drafting.commands["llama.cpp"].text
    assert "with the draft model's" in str(drafting)


@pytest.mark.parametrize("written", ["5", "{}", '{"method": 3}', '{"method": "eagle3"}', "[" * 9999])
def test_speculation_that_cannot_be_planned_is_refused(written: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        plan("qwen3-8b", gpu="l40s", speculative_config=written)
    assert refused.value.code == "HF149"
    assert not plan("qwen3-8b", gpu="l40s", speculative_config='{"method": "ngram"}').fit.question.model.draft


def test_one_of_several_replicas_is_planned() -> None:
    asked: dict[str, Any] = {"max_model_len": 8192, "engine": "vllm", "concurrency": 40}
    alone = plan("qwen3-8b", gpu="l40s", **{**asked, "concurrency": 10})
    replicas = plan("qwen3-8b", gpu="l40sx4", data_parallel_size=4, **asked)
    assert replicas.fit.kv_tokens == alone.fit.kv_tokens
    assert replicas.fit.required_sequences == 10
    text = replicas.commands["vllm"].text
    assert "--data-parallel-size 4" in text
    assert "CUDA_VISIBLE_DEVICES" not in text
    assert "--dp-size 4" in replicas.commands["sglang"].text
    assert replicas.commands["holdfast"].available
    assert "--data-parallel-size 4" in replicas.commands["holdfast"].text
    with pytest.raises(ConfigurationError, match="4 replicas of 2 GPUs each need 8 GPUs"):
        plan("qwen3-8b", gpu="l40sx4", data_parallel_size=4, tensor_parallel_size=2, **asked)


def test_replicas_divide_experts_where_those_are_whole() -> None:
    asked: dict[str, Any] = {"gpu": "h200x16", "max_model_len": 8192, "engine": "vllm", "data_parallel_size": 16}
    assert not plan("deepseek-v3", **asked).fits
    together = plan("deepseek-v3", **asked, enable_expert_parallel=True)
    assert together.fits
    held = next(term.nbytes for term in together.fit.ranks[0].terms if term.name == "weights")
    assert 50 * GIB < held < 60 * GIB


def test_zero_points_that_are_all_alike_are_given_up() -> None:
    """Qwen2.5-7B-Instruct-GPTQ-Int4 is symmetric, and printed 5.1811 GiB; a GPTQ that is not keeps its zero points."""
    found, _ = sized("qwen2.5-7b-gptq-l40s")
    model = found.question.model
    assert model.spec.quantization is not None
    alike = replace(model, spec=replace(model.spec, quantization=replace(model.spec.quantization, symmetric=True)))
    vllm = parse_vllm("==0.8.5.post1")
    told = fit(replace(found.question, model=alike))
    assert vllm_terms(told, vllm).weights / GIB == pytest.approx(5.1811, rel=0.002)
    assert vllm_terms(found, vllm).weights / GIB > 5.195
