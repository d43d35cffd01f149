"""Ranks with whole experts, two or four of them on one GPU: the same tokens as one rank, with graphs, chunks and cached
prefixes, however unevenly experts are dealt out, and in formats that are not divided."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from quantized_files import Format, compressed, fp8, pack_quantized, write_quantized
from tiny_gpu import Tiny, prompt

from holdfast import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4,
        "num_hidden_layers": 2, "vocab_size": 224, "max_position_embeddings": 512}  # fmt: skip
QWEN3 = {"architecture": "Qwen3Moe", "head_dim": 16, "num_experts": 5, "num_experts_per_tok": 3, "norm_topk_prob": True,
         "moe_intermediate_size": 128, "decoder_sparse_step": 1, "mlp_only_layers": []}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": WIDE | QWEN3,
    "mixtral": WIDE | {"architecture": "Mixtral", "num_local_experts": 3},
}
CASES = {
    "qwen3": ("linear", 2, 1, [3, 2]),
    "mixtral": ("round_robin", 2, 1, [2, 1]),
    "qwen3 in stages": ("round_robin", 2, 2, [3, 2, 3, 2]),
}
"""How experts are dealt out, the ranks of a stage, stages, and the experts of each rank."""
PROMPTS = [prompt(1, 5), prompt(2, 150), prompt(3, 33)]
"""The second is computed in chunks."""


def engine(model: Path, ranks: int, **settings: Any) -> LLM:
    given = {"device": "cuda", "dtype": "float32", "max_model_len": 400, "max_num_seqs": 4,
             "max_num_batched_tokens": 64, "kv_cache_memory_bytes": "32MiB", "vram": "4GiB",
             "skip_tokenizer_init": True}  # fmt: skip
    return LLM(str(model), tensor_parallel_size=ranks, **given | settings)


def said(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(prompt_token_ids=PROMPTS, sampling_params=GREEDY, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def check(model: Path, of_one: list[list[int]], case: tuple[str, int, int, list[int]]) -> None:
    placement, ranks, stages, counts = case
    settings = {"enable_expert_parallel": True, "expert_placement_strategy": placement}
    began_s = time.monotonic()
    with engine(model, ranks, pipeline_parallel_size=stages, **settings) as llm:
        print(f"start of {ranks * stages} ranks: {time.monotonic() - began_s:.1f} s")
        decisions = "\n".join(llm.info.decisions)
        print(decisions)
        assert f"enable_expert_parallel = {', '.join(map(str, counts[:ranks]))}" in decisions
        rows = llm.info.memory.ranks
        print(rows)
        assert [row.experts for row in rows] == counts
        assert [row.weights_bytes for row in rows] == [row.planned_weights_bytes for row in rows]
        assert said(llm) == of_one
        assert said(llm) == of_one, "with cached prefixes, and graphs that are there already"


@pytest.mark.parametrize("name", CASES)
def test_ranks_with_whole_experts_say_what_one_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny, case = Tiny(tmp_path, **MODELS[name.split(" ")[0]]), CASES[name]
    with engine(tmp_path, 1) as llm:
        of_one = said(llm)
    monkeypatch.setenv("HOLDFAST_RANK_GPUS", ",".join(["0"] * (case[1] * case[2])))
    check(tmp_path, of_one, case)
    for one, tokens in zip(PROMPTS[::2], of_one[::2], strict=True):
        tiny.assert_greedy(one, tokens)


EXPERTS_ALONE = {"ignore": ["lm_head", "re:.*mlp.gate$", "re:.*self_attn.*"]}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True, "actorder": "group"}
FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
ROUNDED = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token", "symmetric": True}
FORMATS = {
    "act-order": Format(
        compressed(INT4, **EXPERTS_ALONE), pack_quantized(ordered=True), modules={"self_attn": None}
    ),
    "fp8": Format(
        compressed(FLOAT8, ROUNDED, "float-quantized", **EXPERTS_ALONE),
        fp8("channel"),
        "fp8",
        modules={"self_attn": None},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_experts_in_formats_that_are_not_divided(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns in an order of their own, and inputs that are rounded by whole rows."""
    (tmp_path / "plain").mkdir()
    (tmp_path / "made").mkdir()
    Tiny(tmp_path / "plain", **MODELS["qwen3"])
    write_quantized(tmp_path / "plain", tmp_path / "made", FORMATS[name])
    with engine(tmp_path / "made", 1) as llm:
        of_one = said(llm)
    monkeypatch.setenv("HOLDFAST_RANK_GPUS", "0,0")
    check(tmp_path / "made", of_one, CASES["qwen3"])
