"""What a release of vLLM keeps of KV, held against what its source at that tag does: windows, latents, groups of
layers, the context it cuts, the type it keeps KV in, and the GPUs and rotary positions it knows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from holdfast.errors import ConfigurationError
from holdfast.models import QuantSpec
from holdfast.planner.compat.vllm_release import parse_vllm
from holdfast.planner.engines.command import Command
from holdfast.planner.engines.commands import commands
from holdfast.planner.engines.vllm_command import tightest, vllm_kv_bytes, vllm_terms
from holdfast.planner.engines.vllm_features import spec_features
from holdfast.planner.engines.vllm_kv import KeptKV, kept_kv
from holdfast.planner.fit.search import Plan, Question, fit
from holdfast.planner.models.quantize import quantized_as
from holdfast.planner.report.answer import answer
from holdfast.units import GIB

Ask = Callable[..., Question]
GEMMA_3_LAYER = 2 * 16 * 128 * 2
"""Bytes of a token in a layer of the 27B, in bfloat16: 52 of 62 layers have a window of 1,024."""


def kept(found: Plan, version: str) -> KeptKV:
    return kept_kv(found, tightest(found), parse_vllm(version))


def vllm(found: Plan, version: str) -> Command:
    return commands(found, sequences=4, vllm=parse_vllm(version))["vllm"]


def said(command: Command, text: str) -> bool:
    return any(text in note for note in command.notes)


def length(command: Command) -> int:
    words = command.text.split()
    return int(words[words.index("--max-model-len") + 1])


# Windows


@pytest.mark.parametrize(
    "version", ["==0.8.0", "==0.8.2", "==0.8.3", "==0.8.5", "==0.9.0", "==0.9.2:v0", "==0.10.0:v0"]
)
def test_beside_layers_that_forget_nothing_no_layer_forgot_before_0_9_1(ask: Ask, version: str) -> None:
    found = fit(ask("gemma-3-27b", "h100-80"))
    cost = kept(found, version).cost
    assert (cost.growing_bytes, cost.windows) == (62 * GEMMA_3_LAYER, ())
    command = vllm(found, version)
    held = vllm_kv_bytes(found, parse_vllm(version)) // (16 * 62 * GEMMA_3_LAYER) * 16
    assert length(command) == command.max_model_len == command.kv_tokens == held < found.limits.max_model_len
    assert command.available
    assert said(command, "keeps every token in all layers")
    assert said(command, "frees them since 0.9.1")


@pytest.mark.parametrize("version", ["==0.9.1", "==0.9", "==0.11", "==0.17", "==0.23", "==0.24", ""])
def test_since_then_each_kind_of_layers_has_groups_of_its_own(ask: Ask, version: str) -> None:
    """10 layers that forget nothing, and 52 that do, in groups of 10: the last group is filled up."""
    cost = kept(fit(ask("gemma-3-27b", "h100-80")), version).cost
    assert cost.growing_bytes == 10 * GEMMA_3_LAYER
    assert cost.windows == ((1024, 60 * GEMMA_3_LAYER),)


@pytest.mark.parametrize(("version", "groups"), [("==0.11.0", (17, 34)), ("==0.13", (18, 18)), ("", (18, 18))])
def test_groups_are_of_the_larger_kind_where_both_are_about_as_many(
    ask: Ask, version: str, groups: tuple[int, int]
) -> None:
    """17 layers that forget nothing and 18 that do: since 0.12 one more than needed, before 16 more."""
    found = fit(ask("gpt-oss-20b", "h100-80"))
    spec = found.question.model.spec
    layers = [replace(spec.layers[index % 2], index=index) for index in range(35)]
    odd = replace(found.question.model, spec=replace(spec, layers=tuple(layers)))
    cost = kept(replace(found, question=replace(found.question, model=odd)), version).cost
    each = 2 * spec.kv_heads * spec.head_dim * 2
    assert [cost.growing_bytes // each, cost.windows[0][1] // each] == list(groups)


@pytest.mark.parametrize(("version", "groups"), [("==0.17", (10, 20)), ("==0.18", (14, 14)), ("", (14, 14))])
def test_kinds_that_differ_by_less_than_half_are_alike_since_0_18(
    ask: Ask, version: str, groups: tuple[int, int]
) -> None:
    """10 layers that forget nothing and 14 that do."""
    found = fit(ask("gpt-oss-20b", "h100-80"))
    spec = found.question.model.spec
    full, sliding = sorted(spec.layers[:2], key=lambda layer: layer.window is not None)
    layers = [replace(full if index < 10 else sliding, index=index) for index in range(24)]
    other = replace(found.question.model, spec=replace(spec, layers=tuple(layers)))
    cost = kept(replace(found, question=replace(found.question, model=other)), version).cost
    each = 2 * spec.kv_heads * spec.head_dim * 2
    assert [cost.growing_bytes // each, cost.windows[0][1] // each] == list(groups)


@pytest.mark.parametrize(
    ("version", "forgets"),
    [
        ("==0.7.3", False),
        ("==0.8.2", False),
        ("==0.8.3", True),
        ("==0.8.5:v0", False),
        ("", True),
    ],
)
def test_windows_in_every_layer_forget_since_0_8_3(ask: Ask, version: str, forgets: bool) -> None:
    cost = kept(fit(ask("mistral-7b-v0.1", "l4")), version).cost
    each = 32 * 2 * 8 * 128 * 2
    assert (cost.growing_bytes, cost.windows) == ((0, ((4096, each),)) if forgets else (each, ()))


@pytest.mark.parametrize(("version", "forgets"), [
    ("==0.8.5", False), ("==0.9.2", False), ("==0.10.0", True), ("==0.10.1", False), ("==0.13", False),
    ("==0.14", True),
])  # fmt: skip
def test_chunks_forgot_were_kept_and_forget_again(ask: Ask, version: str, forgets: bool) -> None:
    found = fit(ask("llama-4-scout", "h200", count=8))
    assert bool(kept(found, version).cost.windows) == forgets
    assert said(vllm(found, version), "keeps every token in all layers") != forgets


def test_windows_hold_the_tokens_of_every_step_under_way(ask: Ask) -> None:
    found = fit(ask("gemma-3-27b", "h100-80", max_num_batched_tokens=8192))
    assert kept(found, "==0.25").cost.step_tokens == 8192
    assert kept(found, "==0.26").cost.step_tokens == kept(found, "==0.26:v1").cost.step_tokens == 2 * 8192
    staged = fit(ask("gemma-3-27b", "h100-80", count=2, pipeline_parallel=2, max_num_batched_tokens=8192))
    assert kept(staged, "==0.26").cost.step_tokens == 3 * 8192
    assert kept(staged, "==0.26:v1").cost.step_tokens == 2 * 8192


def test_tokens_are_printed_as_each_release_counts_them(ask: Ask) -> None:
    """Blocks over groups to 0.20; what sequences of full length hold since 0.21."""
    found = fit(ask("gemma-3-27b", "h100-80", max_num_batched_tokens=2048))
    pool = 20 * GIB
    blocks = pool // (10 * GEMMA_3_LAYER * 16)
    assert kept(found, "==0.11").printed_tokens(pool, 32768) == blocks // 7 * 16
    one = 32768 // 16 + 6 * (-(-(1023 + 2048) // 16) + 1)
    assert kept(found, "==0.21").printed_tokens(pool, 32768) == pytest.approx(blocks / one * 32768, rel=1e-3)
    assert kept(found, "==0.9.0").printed_tokens(pool, 32768) == pool // (62 * GEMMA_3_LAYER * 16) * 16


def test_a_length_that_it_takes_at_the_start_and_never_holds(ask: Ask) -> None:
    """To 0.9.0 it asked for windows at the start, and then kept everything."""
    found = fit(ask("gemma-3-27b", "h100-80", max_model_len=65536))
    assert said(vllm(found, "==0.8.5"), "it would start, but its KV cache does not hold a sequence of 65,536 tokens")
    assert said(vllm(found, "==0.8.2"), "it would refuse: To serve at least one request")
    for version in ("==0.8.2", "==0.8.5"):
        assert not vllm(found, version).available
    assert vllm(found, "==0.9.1").available


@pytest.mark.parametrize(
    ("version", "most"), [("==0.5.1", 4096), ("==0.5.4", 4096), ("==0.6.4", 4096), ("==0.6.5", 8192), ("==0.7", 8192)]
)
def test_gemma_2_was_cut_to_its_window(ask: Ask, version: str, most: int) -> None:
    found = fit(ask("gemma-2-9b", "h100-80"))
    command = vllm(found, version)
    assert length(command) == most
    assert said(command, "cuts the context to the window, 4,096 tokens") == (most == 4096)
    assert not said(command, "a step must hold")
    longer = vllm(fit(ask("gemma-2-9b", "h100-80", max_model_len=8192)), version)
    assert longer.available == (most == 8192)
    assert said(longer, "User-specified max_model_len (8192) is greater than 4096") == (most == 4096)


# Latents


@pytest.mark.parametrize(("version", "layer_elements"), [
    ("==0.5.1", 2 * 16 * 256), ("==0.6.6", 2 * 16 * 256), ("==0.7.0", 2 * 16 * 192), ("==0.7.1", 576),
    ("==0.7.2", 640), ("==0.7.3", 640), ("==0.8.0", 576), ("==0.8:v0", 576), ("", 576),
])  # fmt: skip
def test_latents_since_0_7_1(ask: Ask, version: str, layer_elements: int) -> None:
    found = fit(ask("deepseek-v2-lite", "h100-80"))
    assert kept(found, version).cost.growing_bytes == 27 * layer_elements * 2
    assert said(vllm(found, version), "does not cache latents") == (layer_elements > 640)


def test_heads_are_split_over_ranks_and_latents_are_not(ask: Ask) -> None:
    found = fit(ask("deepseek-v3", "h200", count=8, tensor_parallel=8))
    assert kept(found, "==0.6.6").cost.growing_bytes == 61 * 2 * 128 // 8 * 256 * 2
    assert kept(found, "==0.7.1").cost.growing_bytes == 61 * 576 * 2
    older, newer = vllm(found, "==0.6.6"), vllm(found, "==0.8")
    assert (older.kv_tokens or 0) < (newer.kv_tokens or 0) / 10


@pytest.mark.parametrize(("version", "expanded"), [("==0.7.1", True), ("==0.7.2", True), ("==0.7.3", False)])
def test_other_quantizations_than_fp8_had_their_latents_expanded(ask: Ask, version: str, expanded: bool) -> None:
    question = ask("deepseek-v2-lite", "h100-80")
    found = fit(replace(question, model=quantized_as(question.model, "nf4")))
    assert said(vllm(found, version), "does not cache latents") == expanded


@pytest.mark.parametrize(
    ("version", "chunks"), [("==0.7.0", True), ("==0.7.1", False), ("==0.7.3", False), ("==0.8:v0", True)]
)
def test_prompts_with_latents_were_not_chunked_at_first(ask: Ask, version: str, chunks: bool) -> None:
    found = fit(ask("deepseek-v2-lite", "h100-80"))
    command = vllm(found, version)
    assert ("--enable-chunked-prefill" in command.text) == chunks
    if not chunks:
        words = command.text.split()
        assert int(words[words.index("--max-num-batched-tokens") + 1]) >= length(command)


def test_blocks_are_as_large_in_every_group(ask: Ask) -> None:
    """Of Gemma 4 layers that forget nothing keep half as much of a token: their blocks hold twice as many, and are
    counted as if they did not. 0.20 printed about 50 GiB as about 55,000 tokens, 0.21 as ten times that:
    https://github.com/vllm-project/vllm/issues/43308"""
    found = fit(ask("gemma-4-31b", "a100-80", max_num_batched_tokens=2048))
    assert kept(found, "==0.20").printed_tokens(50 * GIB, 262_144) == pytest.approx(55_000, rel=0.02)
    assert kept(found, "==0.21").printed_tokens(50 * GIB, 262_144) > 500_000


# The type of KV


@pytest.mark.parametrize(("version", "gpu", "fp8"), [
    ("==0.11.0", "h200", True), ("==0.11.1", "h200", False), ("==0.11", "h200", False), ("", "h200", False),
    ("==0.23", "rtx-pro-6000-blackwell", False), ("==0.24", "rtx-pro-6000-blackwell", True),
])  # fmt: skip
def test_what_attends_by_an_index_was_kept_in_fp8_by_default(ask: Ask, version: str, gpu: str, fp8: bool) -> None:
    found = fit(ask("deepseek-v3.2", gpu, count=8))
    cost = kept(found, version).cost
    assert cost.growing_bytes == 61 * ((656 if fp8 else 576 * 2) + 132)
    assert said(vllm(found, version), "stores KV of this model in FP8 by default") == fp8


def test_a_type_that_was_asked_for_is_asked_of_it(ask: Ask) -> None:
    found = fit(ask("deepseek-v3.2", "h200", count=8, kv_cache_dtype="bfloat16"))
    assert "--kv-cache-dtype bfloat16" in vllm(found, "==0.11.0").text
    assert "--kv-cache-dtype" not in vllm(found, "==0.11.1").text
    assert kept(found, "==0.11.0").cost.growing_bytes == 61 * (576 * 2 + 132)


# What it knows


@pytest.mark.parametrize(("model", "version", "since"), [
    ("llama-3.1-8b", "==0.4", "0.5.3.post1"), ("llama-3.1-8b", "==0.5.0", "0.5.3.post1"),
    ("llama-3.1-8b", "==0.5.3", "0.5.3.post1"), ("llama-3.1-8b", "==0.5.3.post1", None),
    ("llama-3.1-8b", "==0.5.4", None), ("llama-3-8b", "==0.5.0", None),
])  # fmt: skip
def test_rotary_positions_that_it_did_not_read(ask: Ask, model: str, version: str, since: str | None) -> None:
    command = vllm(fit(ask(model, "h100-80", max_model_len=8192)), version)
    assert command.available == (since is None), command.notes
    assert since is None or said(command, f"is in vLLM since {since}, and not in")


@pytest.mark.parametrize(
    ("scaling", "first", "last_without"),
    [("longrope", "==0.5.1", "==0.5.0"), ("mrope", "==0.6.1", "==0.6.0"), ("yarn", "==0.4", None)],
)
def test_other_ways_to_stretch_positions(ask: Ask, scaling: Any, first: str, last_without: str | None) -> None:
    spec = ask("llama-3-8b", "h100-80").model.spec
    stretched = replace(spec, rope=replace(spec.rope, scaling=scaling))
    since = max((release for _, release in spec_features(stretched)), default=())
    assert parse_vllm(first).at >= since
    assert last_without is None or parse_vllm(last_without).at < since


def test_what_only_some_releases_of_a_version_have_is_said(ask: Ask) -> None:
    command = vllm(fit(ask("llama-3.1-8b", "h100-80", max_model_len=8192)), "==0.5")
    assert command.available
    assert "RoPE scaling llama3 is in vLLM since 0.5.3.post1" in command.notes


@pytest.mark.parametrize(("gpu", "version", "most"), [
    ("gb10", "==0.8.5", "9.0, 0.10.2"), ("gb10", "==0.9.0", "10.0, 0.10.2"), ("gb10", "==0.10.0", "12.0, 0.10.2"),
    ("rtx5090", "==0.9.0", "10.0, 0.9.2"), ("b200", "==0.8.5", "9.0, 0.9.0"),
])  # fmt: skip
def test_the_most_that_a_release_is_built_for(ask: Ask, gpu: str, version: str, most: str) -> None:
    assert said(vllm(fit(ask("llama-3-8b", gpu)), version), f"built for compute capability up to {most} for more")


@pytest.mark.parametrize(("version", "start"), [
    ("==0.5.2", "python -m vllm.entrypoints.openai.api_server --model "), ("==0.5.3", "vllm serve "),
    ("==0.5", "python -m vllm.entrypoints.openai.api_server --model "), ("", "vllm serve "),
])  # fmt: skip
def test_how_it_is_started(ask: Ask, version: str, start: str) -> None:
    assert vllm(fit(ask("llama-3-8b", "h100-80")), version).text.startswith(start)


@pytest.mark.parametrize(("gpu", "version", "reason"), [
    ("rtx5090", "==0.6.6", "up to 9.0, 0.9.2 for more; rtx5090 has 12.0"),
    ("rtx5090", "==0.9.1", "up to 10.0, 0.9.2 for more; rtx5090 has 12.0"), ("rtx5090", "==0.9.2", None),
    ("b200", "==0.7.3", "up to 9.0, 0.9.0 for more; b200 has 10.0"), ("b200", "==0.8.5", "up to 9.0"),
    ("b200", "==0.9.0", None), ("b300", "==0.9.0", None), ("h200", "==0.6.6", None), ("mi300x", "==0.6.6", None),
    ("b200", "", None), ("rtx5090", "", None),
])  # fmt: skip
def test_gpus_that_are_newer_than_its_builds(ask: Ask, gpu: str, version: str, reason: str | None) -> None:
    command = vllm(fit(ask("qwen2.5-7b", gpu, max_model_len=8192)), version)
    assert command.available == (reason is None), command.notes
    assert reason is None or said(command, reason)


@pytest.mark.parametrize("version", ["==0.1.0", "==0.2.4", "==0.3.3", "==0.3"])
def test_versions_that_are_older_than_what_is_known_are_refused(version: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        parse_vllm(version)
    assert refused.value.code == "HF147"
    assert refused.value.needed == "vLLM 0.4 or later"


@pytest.mark.parametrize(("text", "release", "at"), [
    ("==0.5.3.post1", "0.5.3.post1", (0, 5, 3, 1)), ("==0.10.1.1", "0.10.1.1", (0, 10, 1, 1)),
    ("==0.5.3", "0.5.3", (0, 5, 3, 0)), ("==0.8.5.post1:v0", "0.8.5.post1", (0, 8, 5, 1)),
    ("==0.11.0rc2", "0.11.0", (0, 11, 0, 0)), ("==0.11", "0.11", (0, 11, 99, 0)),
])  # fmt: skip
def test_what_is_released_after_a_patch_is_another_release(text: str, release: str, at: tuple[int, ...]) -> None:
    found = parse_vllm(text)
    assert (found.release, found.at) == (release, at)
    assert f"vLLM {release} (" in found.name


# What the command asks for


@pytest.mark.parametrize(("quantization", "without", "first"), [
    ("fp8", "0.4.0", "0.4.1"), ("nf4", "0.4.3", "0.5.0"), ("int8", "0.5.0", "0.5.1"), ("int4", "0.5.0", "0.5.1"),
    ("Q4_K_M", "0.5.4", "0.5.5"),
])  # fmt: skip
def test_quantizations_by_release(ask: Ask, quantization: str, without: str, first: str) -> None:
    question = ask("llama-3-8b", "h100-80", max_model_len=4096)
    found = fit(replace(question, model=quantized_as(question.model, quantization), engine="vllm"))
    older, newer = vllm(found, f"=={without}"), vllm(found, f"=={first}")
    assert not older.available
    assert said(older, f"in vLLM since {first}, and not in {without}"), older.notes
    assert not said(newer, "in vLLM since")
    whole = vllm(found, f"=={first.rpartition('.')[0]}")
    assert said(whole, f": in vLLM since {first}") == (not first.endswith(".0"))


@pytest.mark.parametrize("quantization", ["awq", "gptq"])
def test_quantizations_that_the_oldest_has(ask: Ask, quantization: str) -> None:
    question = ask("llama-3-8b", "h100-80", max_model_len=4096)
    found = fit(replace(question, model=quantized_as(question.model, quantization)))
    assert not said(vllm(found, "==0.4.0"), "in vLLM since")


@pytest.mark.parametrize(("granularity", "head", "first"), [
    ("tensor", False, "0.4.2"), ("tensor", True, "0.5.2"), ("channel", True, "0.5.2"), ("channel", False, "0.5.3"),
    ("block", False, "0.6.6"),
])  # fmt: skip
def test_fp8_that_is_stored_came_by_who_made_it(ask: Ask, granularity: Any, head: bool, first: str) -> None:
    question = ask("llama-3-8b", "h100-80", max_model_len=4096)
    block = (128, 128) if granularity == "block" else (0, 0)
    stored = QuantSpec(method="fp8", bits=8, granularity=granularity, head_converted=head, block=block)
    model = replace(question.model, spec=replace(question.model.spec, quantization=stored), name="somebody/model")
    found = fit(replace(question, model=model))
    assert said(vllm(found, "==0.4.0"), f"FP8 weights: in vLLM since {first}, and not in 0.4.0")
    assert vllm(found, f"=={first}").available


@pytest.mark.parametrize(("gpu", "version", "since"), [
    ("a100-80", "==0.5.0", "0.5.1"), ("a100-80", "==0.5.1", None), ("l40s", "==0.4.1", "0.4.2"),
    ("l40s", "==0.4.2", None), ("h100-80", "==0.4.1", None),
])  # fmt: skip
def test_fp8_needed_newer_gpus_at_first(ask: Ask, gpu: str, version: str, since: str | None) -> None:
    question = ask("llama-3-8b", gpu, max_model_len=4096)
    command = vllm(fit(replace(question, model=quantized_as(question.model, "fp8"))), version)
    assert command.available == (since is None), command.notes
    assert since is None or said(command, f", enough since {since}")


def test_bitsandbytes_over_several_gpus_and_without_graphs(ask: Ask) -> None:
    question = ask("llama-3-8b", "l4", count=2, tensor_parallel=2, max_model_len=4096)
    found = fit(replace(question, model=quantized_as(question.model, "nf4")))
    assert said(vllm(found, "==0.6.1"), "bitsandbytes over several GPUs: in vLLM since 0.6.2, and not in 0.6.1")
    assert vllm(found, "==0.6.2").available
    assert "--enforce-eager" in vllm(found, "==0.5.4").text
    assert "--enforce-eager" not in vllm(found, "==0.5.5").text


def test_a_gguf_is_named_at_the_hub_since_0_12(ask: Ask) -> None:
    question = ask("llama-3-8b", "h100-80", max_model_len=4096)
    made = quantized_as(question.model, "Q8_0")
    model = replace(made, origin="hub", made_as=None, name="somebody/llama-GGUF:Q8_0")
    found = fit(replace(question, model=model, engine="vllm"))
    assert said(vllm(found, "==0.11.2"), "a GGUF by its name at the hub: in vLLM since 0.12.0")
    assert vllm(found, "==0.12.0").available


def test_kv_in_fp8_by_release(ask: Ask) -> None:
    found = fit(ask("llama-3-8b", "l40s", kv_cache_dtype="fp8"))
    assert "--kv-cache-dtype fp8_e5m2" in vllm(found, "==0.4.0").text
    assert "--kv-cache-dtype fp8 " in vllm(found, "==0.4.1").text + " "
    hopper = fit(ask("llama-3-8b", "h100-80", kv_cache_dtype="fp8"))
    for version, here, there in (
        ("==0.8.2", True, True),
        ("==0.8.3", True, False),
        ("==0.10.0", True, False),
        ("==0.11", False, False),
        ("==0.8.2:v0", False, False),
    ):
        assert said(vllm(found, version), "falls back to V0") == here, version
        assert said(vllm(hopper, version), "falls back to V0") == there, version


@pytest.mark.parametrize(("model", "without", "first"), [
    ("llama-3-8b", "0.5.0", "0.5.1"), ("mixtral-8x7b", "0.5.2", "0.5.3"), ("qwen2.5-7b", "0.5.3", "0.5.4"),
    ("gemma-2-9b", "0.6.2", "0.6.3"),
])  # fmt: skip
def test_stages_by_release_and_architecture(ask: Ask, model: str, without: str, first: str) -> None:
    found = fit(ask(model, "h100-80", count=2, pipeline_parallel=2, tensor_parallel=1, max_model_len=2048))
    assert said(vllm(found, f"=={without}"), f"in vLLM since {first}, and not in {without}")
    assert not said(vllm(found, f"=={first}"), "pipeline stages of")


@pytest.mark.parametrize(
    ("version", "rank", "taken"),
    [
        ("==0.5.4", 128, None),
        ("==0.5.5", 128, 128),
        ("==0.7.3", 320, None),
        ("==0.8.0", 320, 320),
        ("==0.4.0", 64, 64),
    ],
)
def test_ranks_of_adapters_by_release(ask: Ask, version: str, rank: int, taken: int | None) -> None:
    found = fit(ask("llama-3-8b", "h100-80", max_loras=4, max_lora_rank=rank, max_model_len=4096))
    assert said(vllm(found, version), f"it does not support adapters of rank {rank}") == (taken is None)
    assert taken is None or f"--max-lora-rank {taken}" in vllm(found, version).text


@pytest.mark.parametrize(("version", "tokens", "able"), [
    ("==0.6.3", 64, False), ("==0.7.0", 64, True), ("==0.11.0", 256, False), ("==0.11.1", 256, True),
    ("==0.4.0", 128, True), ("==0.4.1", 128, False),
])  # fmt: skip
def test_sizes_of_kv_blocks_by_release(ask: Ask, version: str, tokens: int, able: bool) -> None:
    found = fit(ask("llama-3-8b", "h100-80", block_tokens=tokens, max_model_len=4096))
    assert said(vllm(found, version), "its KV blocks hold") != able


# Traffic that the plan holds


def test_requests_that_are_too_long_for_that_version(ask: Ask) -> None:
    found = fit(ask("gemma-3-27b", "h100-80", traffic=(1, 60_000, 4_000)))
    assert found.fits
    command = vllm(found, "==0.8.5")
    assert not command.available
    assert said(command, "requests reach 64,000 tokens, but it holds ")
    assert vllm(found, "==0.11").available


def test_requests_that_it_does_not_hold_at_once(ask: Ask) -> None:
    found = fit(ask("deepseek-v2-lite", "h100-80", traffic=(40, 7_000, 1_000)))
    assert found.fits
    command = vllm(found, "==0.6.6")
    assert command.available
    assert said(command, "of the traffic's 40 requests it holds ")
    assert not said(vllm(found, "==0.11"), "of the traffic's")


def test_a_pool_that_holds_nothing(ask: Ask) -> None:
    found = fit(ask("deepseek-v2-lite", "l40s", utilization=0.7))
    rank = found.ranks[0]
    less = replace(found, ranks=(replace(rank, budget_bytes=rank.budget_bytes - rank.room_bytes - 2 * GIB),))
    command = vllm(less, "==0.6.6")
    assert not command.available
    assert said(command, "its KV cache does not hold a single sequence")
    assert command.text == "", "a context of no tokens can be asked of nobody"
    assert not said(command, "GiB: 0 tokens")


# In the answer


def test_the_answer_says_how_that_version_sizes_it(ask: Ask) -> None:
    question = ask("gemma-3-27b", "h100-80")
    found = answer(question, engine="vllm==0.8.2")
    (decision,) = [one for one in found.decisions if one.field == "vllm"]
    notes: dict[str, Any] = found.to_json()["command_notes"]
    assert (
        decision.value == f"{notes['vllm']['kv_tokens']:,} KV tokens, a context of {notes['vllm']['max_model_len']:,}"
    )
    assert decision.reason.startswith("as vLLM 0.8.2 (V1 engine) sizes it: vLLM 0.8.2 keeps every token in all layers")
    assert notes["holdfast"]["kv_tokens"] is None
    shown = f"as vLLM 0.8.2 (V1 engine) sizes it: a context of {notes['vllm']['max_model_len']:,} and"
    assert shown in " ".join(str(found).split())
    assert "sizes it: a context" not in " ".join(str(answer(question)).split())
    assert not [one for one in answer(question).decisions if one.field == "vllm"]
    assert not [one for one in answer(question, engine="sglang").decisions if one.field == "vllm"]


def test_the_v0_engine_refuses_in_its_own_words(ask: Ask) -> None:
    command = vllm(fit(ask("deepseek-v2-lite", "h100-80", max_model_len=131072)), "==0.6.6")
    assert not command.available
    assert said(
        command, "The model's max seq len (131072) is larger than the maximum number of tokens that can be stored"
    )


@pytest.mark.parametrize(
    ("name", "length", "kv_gib", "graphs_gib"),
    [("llama-3.1-8b", 8192, 0.9 * 139.8 - 15.0 - 1.78 - 0.22, 0.99), ("qwen3-0.6b", 4096, 0.9 * 139.8 - 1.84, 0.5)],
)
def test_what_it_printed_on_an_h200(ask: Ask, name: str, length: int, kv_gib: float, graphs_gib: float) -> None:
    """Measured with vLLM 0.26; its own terms, not those that this engine takes for the same shape."""
    found = fit(ask(name, "h200", max_model_len=length))
    version = parse_vllm("==0.26")
    assert vllm_kv_bytes(found, version) / GIB == pytest.approx(kv_gib, rel=0.01)
    assert vllm_terms(found, version).graphs / GIB == pytest.approx(graphs_gib, rel=0.15)
