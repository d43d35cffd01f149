"""Ranks on GPUs, two to four of them on one: every exchange over CUDA IPC is right, in graphs too, and engines of
several ranks, or stages, say what one says. Time slices of one GPU say nothing of speed."""

from __future__ import annotations

import multiprocessing
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpu_exchange
import psutil
import pytest
import torch
from gpu_exchange import ExchangeProcesses
from lora_adapters import LAYER_MODULES, write_adapter
from quantized_files import Format, awq, write_quantized
from tiny_gpu import Tiny, prompt

from holdfast import LLM, SamplingParams
from holdfast.errors import HoldfastError
from holdfast.execution.parallel.gpu.exchange import ExchangeCollectives
from holdfast.lora.request import LoRARequest
from holdfast.records import StructuredOutputsParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SHARED = {"HOLDFAST_RANK_GPUS": "0,0"}
WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 16, "num_hidden_layers": 2, "vocab_size": 224, "max_position_embeddings": 512}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"architecture": "Llama"},
    "olmo2": {"architecture": "Olmo2"},
    "qwen3-moe": {"architecture": "Qwen3Moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
                  "decoder_sparse_step": 1, "mlp_only_layers": []},
    "gemma-window": {"architecture": "Gemma3", "sliding_window": 9,
                     "layer_types": ["full_attention", "sliding_attention"]},
}  # fmt: skip


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExchangeProcesses]:
    made = ExchangeProcesses(tmp_path_factory.mktemp("exchange"), request.param)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("count", "offset"), [(1, 0), (7, 0), (8, 8), (1000, 0), (1003, 3), (16384, 0), (40_009, 0), (40_009, 1)]
)
def test_sums_are_exact_and_the_same_everywhere(ranks: ExchangeProcesses, count: int, offset: int) -> None:
    """The largest go in pieces."""
    found = ranks.together(gpu_exchange.sums, count, offset)
    assert all(one == found[0] for one in found), "the same bits on all ranks"
    assert found[0][0::6] == found[0][2::6] == found[0][4::6], "and by one shot as by two"


@pytest.mark.parametrize(
    ("rows", "widths"),
    [(1, (5, 3, 2)), (3, (64, 64, 32)), (7, (33, 32, 32)), (40, (1024, 1000, 8)), (1, (9000, 8999, 1))],
)
def test_parts_come_together_at_the_first(ranks: ExchangeProcesses, rows: int, widths: tuple[int, ...]) -> None:
    ranks.together(gpu_exchange.gathers, rows, widths[: len(ranks._logs)])


@pytest.mark.parametrize("count", [1, 5, 256, 20_001])
def test_the_first_tells_all(ranks: ExchangeProcesses, count: int) -> None:
    ranks.together(gpu_exchange.broadcasts, count)


def test_graphs_replay_a_thousand_times(ranks: ExchangeProcesses) -> None:
    times = 1000 if len(ranks._logs) == 2 else 100
    found = ranks.together(gpu_exchange.replays, times, timeout_s=90.0)
    print(f"{len(found)} ranks on one GPU: {max(found) / times * 1e3:.2f} ms for four exchanges, time-sliced")


def test_nobody_waits_for_ever(tmp_path: Path) -> None:
    pair = ExchangeProcesses(tmp_path)
    try:
        (said, took_s), _ = pair.together(gpu_exchange.lonely, 1.0)
        print(said, took_s)
        assert "EngineHungError" in said
        assert "rank 1 has not come" in said
        assert 0.9 < took_s < 5.0, took_s
    finally:
        pair.close()
    pair = ExchangeProcesses(tmp_path, limit_s=0.0)
    try:
        (said, took_s), _ = pair.together(gpu_exchange.given_up)
        print(said, took_s)
        assert "one of them has ended" in said
        assert 0.4 < took_s < 5.0, took_s
    finally:
        pair.close()


def test_lines_between_stages_are_exact_in_graphs_too(tmp_path: Path) -> None:
    pair = ExchangeProcesses(tmp_path, staged=True)
    try:
        found = pair.together(gpu_exchange.lines, 100, timeout_s=60.0)
        print(f"two stages on one GPU: {max(found) / 100 * 1e3:.2f} ms there and back, time-sliced")
        (said, took_s), _ = pair.together(gpu_exchange.unanswered, 1.0)
        assert "EngineHungError" in said, said
        assert "rank 1 has not come" in said
        assert 0.9 < took_s < 5.0, took_s
    finally:
        pair.close()


def test_nccl_of_one_rank_in_a_graph(tmp_path: Path) -> None:
    log = tmp_path / "nccl.log"
    process = multiprocessing.get_context("spawn").Process(target=gpu_exchange.nccl_alone, args=(str(log),))
    process.start()
    process.join(90)
    if process.is_alive():
        process.kill()
    assert process.exitcode == 0, log.read_text()


def engine(model: Any, ranks: int, **settings: Any) -> LLM:
    given = {"device": "cuda", "dtype": "float32", "max_model_len": 400, "max_num_seqs": 4,
             "max_num_batched_tokens": 64, "kv_cache_memory_bytes": "32MiB", "vram": "8GiB",
             "skip_tokenizer_init": True, "tensor_parallel_size": ranks}  # fmt: skip
    return LLM(str(model), **given | settings)


def said(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    outputs = llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


PROMPTS = [prompt(1, 5), prompt(2, 150), prompt(3, 33)]
"""The second is computed in chunks."""


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_say_what_one_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = WIDE | MODELS[name]
    tiny = Tiny(tmp_path, **settings)
    began_s = time.monotonic()
    with engine(tmp_path, 1) as llm:
        of_one = said(llm, PROMPTS)
    one_s = time.monotonic() - began_s
    for name, value in SHARED.items():
        monkeypatch.setenv(name, value)
    began_s = time.monotonic()
    with engine(tmp_path, 2) as llm:
        ready_s = time.monotonic() - began_s
        print("\n".join(llm.info.decisions))
        assert "all_reduce = CUDA IPC" in "\n".join(llm.info.decisions)
        rows = llm.info.memory.ranks
        print(rows)
        assert [row.weights_bytes for row in rows] == [row.planned_weights_bytes for row in rows]
        assert [row.device for row in rows] == ["GPU 0", "GPU 0"]
        found = said(llm, PROMPTS)
        again = llm.generate(prompt_token_ids=PROMPTS, sampling_params=GREEDY, use_tqdm=False)
    print(f"one rank {one_s:.1f} s, two {time.monotonic() - began_s:.1f} s, of which start {ready_s:.1f} s")
    assert found == of_one
    assert [list(output.outputs[0].token_ids) for output in again] == of_one, "with cached prefixes"
    assert [output.num_cached_tokens for output in again] == pytest.approx([0, 144, 32], abs=16)
    for one, tokens in zip(PROMPTS[::2], found[::2], strict=True):
        tiny.assert_greedy(one, tokens)


STAGES = {
    "llama": ({"num_hidden_layers": 3}, 2, 1),
    "qwen3-moe": ({}, 2, 1),
    "gemma-window": ({"num_hidden_layers": 3,
                      "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}, 2, 1),
    "llama of two ranks in each": ({}, 2, 2),
    "llama through RAM": ({"num_hidden_layers": 3}, 3, 1),
}  # fmt: skip
"""Settings, stages, and the ranks of each."""


@pytest.mark.parametrize("name", STAGES)
def test_stages_say_what_one_rank_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several steps are under way, of single tokens in graphs; a prompt is computed in chunks, one is scored."""
    more, stages, each = STAGES[name]
    tiny = Tiny(tmp_path, **WIDE | MODELS[name.split(" ")[0]] | more)
    scored = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, prompt_logprobs=1, logprobs=1)
    with engine(tmp_path, 1) as llm:
        of_one = said(llm, PROMPTS)
        [alone] = llm.generate(prompt_token_ids=[prompt(4, 40)], sampling_params=scored, use_tqdm=False)
    monkeypatch.setenv("HOLDFAST_RANK_GPUS", ",".join(["0"] * (stages * each)))
    way = "CUDA IPC"
    if "RAM" in name:  # As where GPUs have no peer access.
        monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
        way = "sockets, through pinned memory"
    began_s = time.monotonic()
    with engine(tmp_path, each, pipeline_parallel_size=stages, vram="4GiB") as llm:
        print(f"start of {stages * each} ranks: {time.monotonic() - began_s:.1f} s")
        decisions = "\n".join(llm.info.decisions)
        print(decisions)
        assert f"stage_lines = {way}" in decisions
        assert ("all_reduce = CUDA IPC" in decisions) == (each > 1)
        rows = llm.info.memory.ranks
        print(rows)
        assert [row.weights_bytes for row in rows] == [row.planned_weights_bytes for row in rows]
        assert sum(row.layers for row in rows[::each]) == len(tiny.spec.layers)
        assert [row.first_layer for row in rows[: 2 * each : each]] == [0, rows[0].layers]
        found, again = said(llm, PROMPTS), said(llm, PROMPTS)
        [told] = llm.generate(prompt_token_ids=[prompt(4, 40)], sampling_params=scored, use_tqdm=False)
    assert found == of_one
    assert again == of_one, "with cached prefixes, and graphs that are there already"
    for one, tokens in zip(PROMPTS[::2], found[::2], strict=True):
        tiny.assert_greedy(one, tokens)
    assert told.outputs[0].token_ids == alone.outputs[0].token_ids
    ours, theirs = (
        [{token: one.logprob for token, one in place.items()} for place in output.prompt_logprobs[1:]]
        for output in (told, alone)
    )
    assert len(ours) == 39
    for one, other in zip(ours, theirs, strict=True):
        assert one == pytest.approx(other, abs=1e-3)


def test_gguf_in_two_stages_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """SmolLM2's head is its embedding, which both stages have."""
    settings = {"kv_cache_memory_bytes": "64MiB", "skip_tokenizer_init": False, "dtype": "bfloat16", "vram": "4GiB"}
    monkeypatch.setenv("HOLDFAST_RANK_GPUS", "0,0")
    with engine("smollm2", 1, pipeline_parallel_size=2, **settings) as llm:
        chat = [{"role": "user", "content": "What is the capital of France?"}]
        drawn = SamplingParams(temperature=0.7, seed=3, max_tokens=8, logprobs=2)
        first, second = llm.chat([chat, chat], [GREEDY, drawn], use_tqdm=False)
    assert first.outputs[0].text.startswith("The capital of France is Paris.")
    assert len(second.outputs[0].token_ids) == 8


def test_awq_of_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "awq").mkdir()
    Tiny(tmp_path / "plain", **WIDE, **MODELS["llama"])
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    write_quantized(tmp_path / "plain", tmp_path / "awq", Format(config, awq(32)))
    with engine(tmp_path / "awq", 1) as llm:
        of_one = said(llm, PROMPTS)
    for name, value in SHARED.items():
        monkeypatch.setenv(name, value)
    with engine(tmp_path / "awq", 2) as llm:
        print("\n".join(llm.info.decisions))
        assert said(llm, PROMPTS) == of_one


def test_gguf_of_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """SmolLM2 has nine heads over three: six of them are the first rank's. In bfloat16 too, with grammars and draws."""
    settings = {"kv_cache_memory_bytes": "64MiB", "skip_tokenizer_init": False}
    chat = [[{"role": "user", "content": "What is the capital of France?"}]]
    words = [[{"role": "user", "content": "Say three words about the sea, then explain how a refrigerator works."}]]
    with engine("smollm2", 1, **settings) as llm:
        of_one = [one.outputs[0].text for one in llm.chat(chat + words, GREEDY, use_tqdm=False)]
    for name, value in SHARED.items():
        monkeypatch.setenv(name, value)
    with engine("smollm2", 2, **settings) as llm:
        print("\n".join(llm.info.decisions))
        found = [one.outputs[0].text for one in llm.chat(chat + words, GREEDY, use_tqdm=False)]
    print(of_one, found)
    assert found == of_one
    with engine("smollm2", 2, **settings | {"dtype": "bfloat16"}) as llm:
        drawn = SamplingParams(temperature=0.7, seed=3, max_tokens=8, logprobs=2, prompt_logprobs=1)
        first, second = llm.chat([chat[0], words[0]], [GREEDY, drawn], use_tqdm=False)
        print(first.outputs[0].text, second.outputs[0].text)
        assert first.outputs[0].text.startswith("The capital of France is Paris.")
        assert len(second.outputs[0].token_ids) == 8


SIZES = {"-tp 2": {"tensor_parallel_size": 2}, "-pp 2": {"pipeline_parallel_size": 2}}


@pytest.mark.parametrize("size", SIZES)
def test_forms_and_vectors_are_those_of_one_rank(size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks of grammars, known to the first rank alone, in graphs too; and prompts as vectors."""
    Tiny(tmp_path, **WIDE, **MODELS["llama"])
    regex, text = "[a-c]{3,5}( [0-9]{2}){1,9}", "Say three words."
    held = SamplingParams(temperature=0.0, max_tokens=24, structured_outputs=StructuredOutputsParams(regex=regex))
    drawn = held.replace(temperature=0.8, seed=5)
    free = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    settings = {"kv_cache_memory_bytes": "64MiB", "skip_tokenizer_init": False}

    def answers(**sizes: int) -> list[str]:
        with engine("smollm2", 1, **settings, **sizes) as llm:
            outputs = llm.generate([text] * 3, [held, drawn, free], use_tqdm=False)
        return [output.outputs[0].text for output in outputs]

    def vectors(**sizes: int) -> list[list[float]]:
        with engine(tmp_path, 1, **sizes) as llm:
            prompts: list[Any] = [{"prompt_token_ids": ids} for ids in (*PROMPTS, PROMPTS[1])]
            return [output.outputs.embedding for output in llm.embed(prompts, use_tqdm=False)]

    of_one, vectors_of_one = answers(), vectors()
    monkeypatch.setenv("HOLDFAST_RANK_GPUS", "0,0")
    found = answers(**SIZES[size])
    print(of_one, found)
    assert found == of_one
    assert all(re.fullmatch("[a-c]{3,5}( [0-9]{2})*( [0-9]?)?", one) for one in found[:2])
    for ours, theirs in zip(vectors(**SIZES[size]), vectors_of_one, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)


@pytest.mark.parametrize("size", SIZES)
def test_answers_survive_a_pool_that_is_too_small(size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences are preempted, and computed again, on all ranks alike: a pool for 496 tokens, and 720 of them."""
    Tiny(tmp_path, **WIDE, **MODELS["llama"])
    prompts = [prompt(number, 20) for number in range(4)]
    long = SamplingParams(temperature=0.0, max_tokens=160, ignore_eos=True)
    with engine(tmp_path, 1) as llm:
        of_one = said(llm, prompts, long)
        assert llm.get_stats().preemptions_total == 0
    monkeypatch.setenv("HOLDFAST_RANK_GPUS", "0,0")
    with engine(tmp_path, 1, **SIZES[size] | {"kv_cache_memory_bytes": "256KiB"}) as llm:
        found, preempted = said(llm, prompts, long), llm.get_stats().preemptions_total
    print(f"{preempted} preemptions")
    assert preempted > 0
    assert found == of_one


@pytest.mark.parametrize("size", SIZES)
def test_adapters_are_those_of_one_rank(size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three through two places, beside answers without one, in chunks and in graphs; each rank reads its part."""
    tiny = Tiny(tmp_path / "model", **WIDE, **MODELS["llama"])
    for seed, modules in enumerate((LAYER_MODULES, LAYER_MODULES, ("mlp.down_proj", "self_attn.o_proj"))):
        write_adapter(tmp_path / f"adapter-{seed}", tiny.folder, seed=seed, rank=3 + 5 * seed, modules=modules)
    asked = [None, *(LoRARequest(f"adapter-{seed}", 1 + seed, str(tmp_path / f"adapter-{seed}")) for seed in range(3))]
    lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 16, "max_cpu_loras": 4}

    def answers(**sizes: int) -> list[list[int]]:
        with engine(tiny.folder, 1, **lora, **sizes) as llm:
            turns = [
                llm.generate(
                    prompt_token_ids=[PROMPTS[1], PROMPTS[0]] * 2, sampling_params=GREEDY, use_tqdm=False,
                    lora_request=list(asked),
                )
                for _ in range(2)
            ]  # fmt: skip
            rows = [(row.planned_bytes, row.measured_bytes) for row in llm.info.memory.terms if row.term == "adapters"]
        print(rows)
        assert [[list(one.outputs[0].token_ids) for one in turn] for turn in turns[1:]] == [
            [list(one.outputs[0].token_ids) for one in turns[0]]
        ], "and once all are there"
        return [list(one.outputs[0].token_ids) for one in turns[0]]

    of_one = answers()
    monkeypatch.setenv("HOLDFAST_RANK_GPUS", "0,0")
    assert answers(**SIZES[size]) == of_one
    assert of_one[0] != of_one[2], "of one prompt, without an adapter and with one"


def test_sums_in_two_passes_in_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks add up a large step each its share; two would do that in one pass at any size."""
    Tiny(tmp_path, **WIDE, **MODELS["llama"])
    prompts, wide = [prompt(number, 399 - number) for number in range(4)], {"max_num_batched_tokens": 2048}
    few = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    with engine(tmp_path, 1, **wide) as llm:
        of_one = said(llm, prompts, few)
    monkeypatch.setenv("HOLDFAST_RANK_GPUS", "0,0,0,0")
    passes, real = list[bool](), ExchangeCollectives._in_two

    def noted(collectives: ExchangeCollectives, nbytes: int) -> bool:
        passes.append(real(collectives, nbytes))
        return passes[-1]

    monkeypatch.setattr(ExchangeCollectives, "_in_two", noted)
    with engine(tmp_path, 4, vram="4GiB", **wide) as llm:
        passes.clear()
        found = said(llm, prompts, few)
    assert True in passes, "of the first rank; the others go by the same sizes"
    assert found == of_one


def test_too_few_gpus_are_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Tiny(tmp_path, **WIDE, **MODELS["llama"])
    began_s, many = time.monotonic(), torch.cuda.device_count() + 1
    monkeypatch.delenv("HOLDFAST_RANK_GPUS", raising=False)
    with pytest.raises(HoldfastError, match=f"rank {many - 1} has no GPU"):
        engine(tmp_path, many)
    assert time.monotonic() - began_s < 5


def test_ranks_of_one_gpu_need_each_others_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL has no two ranks on one GPU: what is against CUDA IPC is said, by the rank that found it."""
    Tiny(tmp_path, **WIDE, **MODELS["llama"])
    for name, value in (SHARED | {"NCCL_P2P_DISABLE": "1"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(HoldfastError, match="NCCL_P2P_DISABLE is set"):
        engine(tmp_path, 2)
    children = [one for one in psutil.Process(os.getpid()).children() if "ranks.entry" in " ".join(one.cmdline())]
    assert not children
